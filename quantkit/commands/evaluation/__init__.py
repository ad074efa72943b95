"""What `quantkit eval` and `quantkit report` are made of."""
