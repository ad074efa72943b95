"""The fingerprint of a model: the same for the same weights, whatever files they are spread over."""

from hashlib import sha256

import torch

from quantkit.checkpoint.reader import Checkpoint


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 of every tensor's name, dtype, shape and bytes, in hex. Reads the whole model once."""
    whole = sha256()
    for name in sorted(checkpoint.names()):
        tensor = checkpoint.tensor(name)
        whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        whole.update(sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).digest())
    return whole.hexdigest()
