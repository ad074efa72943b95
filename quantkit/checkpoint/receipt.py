"""Receipt: what was handed to a writer, kept as digests, to be compared with what is read back from the disk.

    receipt = Receipt()
    receipt.add("model.norm.weight", tensor)                    # the bytes that a file must have
    receipt.add_weight("model.layers.0.mlp.up_proj", weight)    # what the reader must make of them
    receipt.check(open_checkpoint(folder))

The digests are 32 bytes a tensor, so a model of any size can be checked.
"""

from hashlib import sha256

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import GateError
from quantkit.progress import NOBODY, Progress

ROWS_AT_ONCE = 512
HINT = "the disk or the memory of this machine may be faulty; run the command again"


class Receipt:
    """Digests of tensors by name, and of the weights they stand for by linear."""

    def __init__(self) -> None:
        self._tensors: dict[str, str] = {}
        self._weights: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor as it is written."""
        self._tensors[name] = digest_of(tensor)

    def add_weight(self, linear: str, weight: Tensor) -> None:
        """The weight `[in, out]` that a linear must decode to, in any float dtype: float16 is compared."""
        self.add_weight_digest(linear, digest_of_values(weight))

    def add_weight_digest(self, linear: str, digest: str) -> None:
        """As `add_weight`, where `digest_of_values` was taken earlier."""
        self._weights[linear] = digest

    def digest(self) -> str:
        """One for all tensors, whatever their order, in hex."""
        lines = (f"{name}\0{self._tensors[name]}\n" for name in sorted(self._tensors))
        return sha256("".join(lines).encode()).hexdigest()

    def differing(self, other: "Receipt") -> set[str]:
        """The tensors that are in one of them only, or are not the same in both."""
        return {name for name, _ in self._tensors.items() ^ other._tensors.items()}

    def check(self, checkpoint: Checkpoint, progress: Progress = NOBODY) -> None:
        """Raises GateError, naming the tensor and its file, unless all of it and nothing else is in `checkpoint`."""
        differing = self._tensors.keys() ^ set(checkpoint.names())
        for name in sorted(differing):
            what = "is missing from" if name in self._tensors else "was not written, yet it is in"
            raise GateError(f"read back: tensor `{name}` {what} the result", hint=HINT)
        with progress.task("read back", total=len(self._tensors) + len(self._weights)) as task:
            for name, digest in self._tensors.items():
                if digest_of(checkpoint.tensor(name)) != digest:
                    file = checkpoint.info(name).file.name
                    raise GateError(f"read back: tensor `{name}` in `{file}` is not what was written", hint=HINT)
                task.advance(note=name)
            for name, digest in self._weights.items():
                if digest_of_values(checkpoint.linear(name).dequantize()) != digest:
                    raise GateError(f"read back: `{name}` does not decode to the weight that was solved", hint=HINT)
                task.advance(note=name)


def digest_of(tensor: Tensor) -> str:
    """Of dtype, shape and bytes, in hex."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    digest = sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_of_values(weight: Tensor) -> str:
    """Of the float16 values of any float weight: a zero is a zero, whatever its sign. Some rows at a time."""
    digest = sha256(f"{torch.float16} {list(weight.shape)}".encode())
    for rows in weight.detach().split(ROWS_AT_ONCE):
        values = rows.cpu().to(torch.float16) + 0.0
        digest.update(values.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
