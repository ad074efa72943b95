"""How one weight is stored: a codec for each format."""
