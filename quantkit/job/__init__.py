"""Jobs: what a long command has finished, kept so that a killed one loses no more than the block in hand."""
