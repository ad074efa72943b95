"""RotatedCheckpoint: a model as the rotated one that says the same, so that it can be quantized in its place.

    source = RotatedCheckpoint.of(open_checkpoint("models/llama"), seed=0)
    source.tensor(name)          # turned as `models.rotation` says, in the dtype of the original

Its norms are ones, their weights are in the linears behind them. A head that was the embedding is a weight of its own:
both are turned alike, but only the head takes up the weight of the last norm.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from quantkit.checkpoint.header import Header
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.spelling import respelled
from quantkit.errors import CheckpointError
from quantkit.models.architecture import EMBEDDING, FINAL_NORM, HEAD, LinearSpec
from quantkit.models.rotation import Rotation, norm_before


@dataclass(frozen=True, eq=False)
class RotatedCheckpoint(Checkpoint):
    """Every tensor is read as it is after the rotation that `seed` draws, and no head is tied; all else is that of the
    checkpoint it was made `of`."""

    inner: Checkpoint | None = None
    rotation: Rotation | None = None
    seed: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint, seed: int) -> Self:
        """Reads no tensor yet. Raises UnsupportedModel for a family that cannot be rotated."""
        rotation = Rotation.drawn(checkpoint.model_config, checkpoint.architecture, seed)
        values = {field.name: getattr(checkpoint, field.name) for field in fields(Checkpoint)}
        if checkpoint.model_config.tie_embeddings:
            values["config"] = {**checkpoint.config, "tie_word_embeddings": False}
            values["homes"] = dict(_with_head(checkpoint))
        return cls(**values, inner=checkpoint, rotation=rotation, seed=seed)

    @property
    def original(self) -> Checkpoint:
        assert self.inner is not None
        return self.inner

    @property
    def form(self) -> str:
        return f"rotated by seed {self.seed}"

    def tensor(self, name: str) -> Tensor:
        """Raises as `Checkpoint.tensor` does, and CheckpointError where a turned value is beyond the dtype."""
        tensor = super().tensor(name)
        turned = self._turned(name if name in self.homes else respelled(name), tensor)
        if turned is not tensor and not bool(torch.isfinite(turned).all()):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"`{name}` of `{self.path}` cannot be rotated: in {dtype} a value of the turned weight is not finite",
                hint="use a version of this model in bfloat16 or float32, or leave out `--rotate`",
            )
        return turned

    def _turned(self, name: str, tensor: Tensor) -> Tensor:
        rotation = self.rotation
        assert rotation is not None
        if name in self._norms:
            return rotation.norm(tensor)
        if name == f"{EMBEDDING}.weight":
            return rotation.embedding(tensor)
        module, _, suffix = name.rpartition(".")
        if module not in self._specs or suffix not in ("weight", "bias"):
            return tensor
        spec = self._specs[module]
        if suffix == "bias":
            return rotation.bias(spec, tensor)
        norm = norm_before(spec)
        return rotation.linear(spec, tensor, None if norm is None else self.original.tensor(f"{norm}.weight"))

    @cached_property
    def _norms(self) -> set[str]:
        """The norms over the residual stream; those over heads stay."""
        config = self.model_config
        names = {name for layer in range(config.num_layers) for name in self.architecture.norms(config, layer)}
        return {f"{name}.weight" for name in (*names, FINAL_NORM) if ".self_attn." not in name}

    @cached_property
    def _specs(self) -> dict[str, LinearSpec]:
        """Module on disk → what it is; for a fused linear that lies there in parts, that part of it."""
        config = self.model_config
        specs = {HEAD: LinearSpec(HEAD, config.hidden_size, (config.vocab_size,), ("head",), HEAD)}
        for spec in self.architecture.linears(config):
            modules = list(dict.fromkeys(name.rpartition(".")[0] for name in self.tensors_of(spec.name)))
            if len(modules) == 1:
                specs[modules[0]] = spec
                continue
            for module, role, width in zip(modules, spec.roles, spec.widths, strict=True):
                specs[module] = replace(spec, roles=(role,), widths=(width,))
        return specs


def _with_head(checkpoint: Checkpoint) -> Iterator[tuple[str, Header]]:
    """Every tensor with the header that has it, and the bytes of the embedding as those of the head too."""
    yield from checkpoint.homes.items()
    embedding, head = f"{EMBEDDING}.weight", f"{HEAD}.weight"
    if embedding in checkpoint.homes:
        home = checkpoint.homes[embedding]
        yield head, replace(home, entries={**home.entries, head: home.entries[embedding]})
