"""What a model is: families as data, one transformer for calibration and generation."""
