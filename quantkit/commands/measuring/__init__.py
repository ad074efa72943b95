"""What `quantkit measure` is made of, and what is done with a measurement."""
