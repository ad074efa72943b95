"""Where a model lives: safetensors folders, read lazily and written in bounded shards."""
