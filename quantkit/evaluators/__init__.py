"""Proof that a quantized model is still itself."""
