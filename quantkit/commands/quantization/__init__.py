"""What `quantkit quantize` is made of: from a model and its text to steps of a job
and a folder that is read back."""
