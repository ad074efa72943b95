"""MergedSource: the weights of a checkpoint with adapters added, for a model that is loaded with them for good.

    W' = W + Σ_i weight_i · s_i · B_i A_i        s = alpha / r, or alpha / √r with rsLoRA (arXiv 2312.03732)

Sums are made in float32. What an adapter holds and a model has no place for is refused by name: a tensor left out in
silence would be another adapter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.adapter import Adapter
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, FormatError, UsageError
from quantkit.formats import dense
from quantkit.formats.codec import StoredTensor
from quantkit.formats.dense import DenseTensor
from quantkit.models.architecture import EMBEDDING

Weighted = Sequence[tuple[Adapter, float]]
OTHER_MODEL = "use it with the model that it was trained on"


def require_fit(adapter: Adapter, weight: float, shapes: Mapping[str, tuple[int, ...]], model: Path) -> None:
    """That a model with tensors of these names and shapes has a place for everything in `adapter`.

    Raises CheckpointError for a target that is absent or of another shape, UsageError for a `weight` that cannot be.
    """
    for name in adapter.targets:
        if name not in shapes:
            raise CheckpointError(f"`{adapter.path}` adapts `{name}`, which is not in `{model}`", hint=OTHER_MODEL)
        expected, found = shapes[name], adapter.shape(name)
        if tuple(found) != tuple(expected):
            raise CheckpointError(
                f"`{adapter.path}` adapts `{name}` as {list(found)}, it is {list(expected)} in `{model}`",
                hint=OTHER_MODEL,
            )
    if adapter.replacements and weight != 1.0:
        raise UsageError(
            f"`{adapter.path}` replaces `{min(adapter.replacements)}` as a whole, which has no weight of {weight:g}",
            hint="leave out the weight of this adapter",
        )


def require_no_tied_embedding(adapter: Adapter, tied: bool, model: Path) -> None:
    """Raises CheckpointError for an adapter of an embedding that is the head as well, which would change both."""
    if tied and f"{EMBEDDING}.weight" in adapter.targets:
        raise CheckpointError(
            f"`{adapter.path}` adapts `{EMBEDDING}.weight`, which is the head of `{model}` as well",
            hint="merge it with the library that it was trained with",
        )


def added(name: str, adapters: Weighted) -> Tensor | None:
    """What adapters add to a tensor, float32; None where no adapter does."""
    total: Tensor | None = None
    for adapter, weight in adapters:
        if name in adapter.deltas:
            own = weight * adapter.delta(name)
            total = own if total is None else total + own
    return total


@dataclass(frozen=True, eq=False)
class MergedSource:
    """A `models.source.Source`. Make it with `merge`."""

    checkpoint: Checkpoint
    adapters: Weighted

    def has(self, name: str) -> bool:
        return self.checkpoint.has(name)

    def tensor(self, name: str) -> Tensor:
        """As stored where no adapter has a part in it; else float32, not rounded."""
        tensor = self.checkpoint.tensor(name)
        total = added(name, self.adapters)
        if total is not None:
            tensor = tensor.to(torch.float32) + total
        for adapter, _ in self.adapters:
            if name in adapter.replacements:
                tensor = adapter.replacement(name)
        return tensor

    def linear(self, name: str) -> StoredTensor:
        """Dense, its weight in float32 where an adapter has a part in it."""
        stored = self.checkpoint.linear(name)
        total = added(f"{name}.weight", self.adapters)
        if total is not None:
            bias = stored.tensors().get("bias")
            stored = DenseTensor(stored.dequantize().T.to(torch.float32) + total, bias)
        parts = stored.tensors()
        replaced = {
            suffix: adapter.replacement(f"{name}.{suffix}")
            for adapter, _ in self.adapters
            for suffix in parts
            if f"{name}.{suffix}" in adapter.replacements
        }
        return dense.decode(name, {**parts, **replaced}) if replaced else stored


def merge(checkpoint: Checkpoint, adapters: Weighted) -> MergedSource:
    """Reads no tensor yet. Raises CheckpointError for an adapter that does not fit, FormatError for a quantized model,
    UsageError for a weight that cannot be."""
    if checkpoint.quantization is not None:
        raise FormatError(
            f"`{checkpoint.path}` is quantized: adapters are merged into dense weights",
            hint="apply them on the fly, without `--merge-lora`",
        )
    config = checkpoint.model_config
    shapes = checkpoint.architecture.tensors(config)
    for adapter, weight in adapters:
        require_fit(adapter, weight, shapes, checkpoint.path)
        require_no_tied_embedding(adapter, config.tie_embeddings, checkpoint.path)
    return MergedSource(checkpoint, adapters)
