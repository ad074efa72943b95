"""Text and activations that tell the solver which errors matter."""
