"""Rewriting: a model folder written anew, tensor by tensor, every one of them read back and compared.

    with rewriting(checkpoint, out, progress, overwrite=False) as new:
        new.add_linear(name, stored, weight)      # `weight` is what the written tensors must decode to
        new.add_others()
        files = new.finish(config)

In memory is what the caller holds, one linear, and 32 bytes for each tensor.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.checkpoint.receipt import Receipt
from quantkit.checkpoint.spelling import on_disk
from quantkit.checkpoint.writer import SHARD_BYTES, CheckpointWriter
from quantkit.commands.conversion.report import Written
from quantkit.errors import OWN_FAULT, CheckpointError, GateError
from quantkit.formats.codec import StoredTensor
from quantkit.models.architecture import HEAD
from quantkit.progress import Progress


class Rewriting:
    """The new folder while it is written. Its parameters are counted as they are written, dense or not."""

    def __init__(self, checkpoint: Checkpoint, writer: CheckpointWriter, progress: Progress) -> None:
        self._checkpoint, self._writer, self._progress = checkpoint, writer, progress
        self._receipt = Receipt()
        self._replaced: set[str] = set()
        self._tensors = 0
        self._parameters = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor that is no part of a quantized linear."""
        self._put(name, tensor)
        self._parameters += tensor.numel()

    def add_linear(self, linear: str, stored: StoredTensor, weight: Tensor, module: str | None = None) -> None:
        """A linear of the source in another form. `weight` `[in, out]` is what a reader must make of it; `module` its
        name on disk, else that of the source."""
        module = module or module_on_disk(self._checkpoint, linear)
        for suffix, tensor in stored.tensors().items():
            self._put(on_disk(module, suffix), tensor)
        self._receipt.add_weight(linear, weight)
        self.replace(linear)
        self._parameters += stored.in_features * stored.out_features
        self._parameters += 0 if stored.bias is None else stored.out_features

    def add_equal_linear(self, module: str, stored: StoredTensor, weight: Tensor) -> None:
        """A linear whose weight must not change: GateError, before anything more is done, where it would."""
        if not bool((stored.dequantize() == weight).all()):
            raise GateError(f"`{module}` does not decode to the same weight", hint=OWN_FAULT)
        self.add_linear(module, stored, weight, module=module)

    def replace(self, linear: str) -> None:
        """The source's tensors of this linear are not wanted. A tied head has none."""
        if linear != HEAD or has_own_head(self._checkpoint):
            self._replaced.update(self._checkpoint.tensors_of(linear))

    def left(self) -> list[str]:
        """The tensors of the source that were not replaced."""
        return [name for name in self._checkpoint.names() if name not in self._replaced]

    def add_others(self) -> None:
        """Every tensor that was not replaced, as it is."""
        for name in self.left():
            self.add(name, self._checkpoint.tensor(name))

    def finish(
        self,
        config: Mapping[str, Any],
        side_json: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Written:
        """Read everything back, put the folder in its place.

        Raises GateError for a tensor that is not what was written, or that does not decode to its weight.
        """
        files = self._writer.finish(
            config,
            self._checkpoint.side_files(),
            side_json,
            check=lambda folder: self._receipt.check(open_checkpoint(folder), self._progress),
        )
        return Written(self._tensors, self._parameters, weight_bytes(files))

    def _put(self, name: str, tensor: Tensor) -> None:
        self._writer.add(name, tensor)
        self._receipt.add(name, tensor)
        self._tensors += 1


@contextmanager
def rewriting(
    checkpoint: Checkpoint, out: Path, progress: Progress, *, overwrite: bool, shard_bytes: int = SHARD_BYTES
) -> Iterator[Rewriting]:
    """Raises CheckpointError for a place that cannot be written; leaving without `finish` leaves nothing behind."""
    with CheckpointWriter(out, source=checkpoint.path, overwrite=overwrite, shard_bytes=shard_bytes) as writer:
        yield Rewriting(checkpoint, writer, progress)


def module_on_disk(checkpoint: Checkpoint, linear: str) -> str:
    """What the checkpoint calls a linear; its Hugging Face name where it holds it in parts, or not at all."""
    if linear == HEAD and not has_own_head(checkpoint):
        return linear
    modules = {name.rpartition(".")[0] for name in checkpoint.tensors_of(linear)}
    return modules.pop() if len(modules) == 1 else linear


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether there are tensors of a head, be it tied or not."""
    return any(name.startswith(f"{HEAD}.") for name in checkpoint.names())


def written_in(checkpoint: Checkpoint) -> Written:
    """Of a folder as it is read. A tied head does not count twice."""
    parameters = sum(map(prod, checkpoint.architecture.tensors(checkpoint.model_config).values()))
    return Written(len(checkpoint.names()), parameters, weight_bytes(checkpoint.path.iterdir()))


def weight_bytes(files: Iterable[Path]) -> int:
    """Of those among them that hold weights."""
    return sum(file.stat().st_size for file in files if file.suffix == ".safetensors")


def require_free(out: Path, *, overwrite: bool) -> None:
    """CheckpointError for a folder that may not be replaced, asked before the hours that fill it."""
    if out.exists() and not overwrite and any(out.iterdir()):
        raise CheckpointError(f"`{out}` is not empty", hint="use `--overwrite`, or choose another folder")


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the model without what its quantizer put there."""
    return {key: value for key, value in config.items() if key != "quantization_config"}


def open_source(path: Path) -> Checkpoint:
    """A folder, or a model of the hub by its id."""
    return open_checkpoint(str(path))
