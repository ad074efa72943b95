"""The fingerprint of a model: the same for the same weights, whatever files they are spread over."""

from hashlib import sha256

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.progress import NOBODY, Progress


def fingerprint(checkpoint: Checkpoint, progress: Progress = NOBODY) -> str:
    """SHA-256 of every tensor's name, dtype, shape and bytes, in hex, those of the original where it is another form of
    one (`in_form`). Reads the whole model once."""
    checkpoint, made = checkpoint.original, checkpoint
    whole = sha256()
    names = sorted(checkpoint.names())
    with progress.task("fingerprint", total=len(names)) as task:
        for name in names:
            tensor = checkpoint.tensor(name)
            whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            whole.update(sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).digest())
            task.advance(note=name)
    return in_form(whole.hexdigest(), made)


def in_form(original: str, checkpoint: Checkpoint) -> str:
    """The fingerprint of a checkpoint whose original has this one."""
    return sha256(f"{original} {checkpoint.form}".encode()).hexdigest() if checkpoint.form else original
