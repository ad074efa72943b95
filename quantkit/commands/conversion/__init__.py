"""The conversions, one module for each, and what they share."""
