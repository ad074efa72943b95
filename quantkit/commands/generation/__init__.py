"""What `quantkit generate` is made of."""
