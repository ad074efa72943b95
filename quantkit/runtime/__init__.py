"""Using weights: loading, tokenizing, caching, sampling, generating."""
