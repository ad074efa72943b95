"""Arithmetic on bits: knows tensors and integers only."""
