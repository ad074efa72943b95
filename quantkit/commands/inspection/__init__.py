"""What `quantkit check`, `inspect` and `recommend` find out about a model before any work."""
