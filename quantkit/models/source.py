"""Where weights come from, as the model code sees it, and reading them with their shapes checked."""

from typing import Protocol

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats.codec import StoredTensor
from quantkit.models.architecture import LinearSpec
from quantkit.models.linear import Linear

Device = str | torch.device

SHAPE_HINT = "config.json and the tensors are of two different models: take both from one place"


class Source(Protocol):
    """The part of a checkpoint that models need. Names are those of Hugging Face."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def tensor(self, name: str) -> Tensor:
        """A tensor in its stored dtype. Raises CheckpointError where there is none."""

    def linear(self, name: str) -> StoredTensor:
        """A linear by its module name, in whatever format it is stored."""


def read_tensor(source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of that shape. Raises CheckpointError, naming both shapes, for any other."""
    tensor = source.tensor(name)
    if tuple(tensor.shape) != shape:
        raise wrong_shape(name, shape, tuple(tensor.shape))
    return tensor


def read_linear(source: Source, spec: LinearSpec, dtype: torch.dtype, device: Device) -> Linear:
    """The linear that `spec` describes.

    Raises CheckpointError when its shape is another, when its bias is missing, or when it has a bias that the family
    has not. A bias of zeros, which some tools write for every linear, changes nothing and is let through.
    """
    stored = source.linear(spec.name)
    found = (stored.out_features, stored.in_features)
    if found != (spec.out_features, spec.in_features):
        raise wrong_shape(f"{spec.name}.weight", (spec.out_features, spec.in_features), found)
    if spec.bias and stored.bias is None:
        raise CheckpointError(
            f"`{spec.name}.bias` is missing: this model has a bias there",
            hint="quantize the model again with a tool that keeps the bias, or correct the bias keys of config.json",
        )
    if not spec.bias and stored.bias is not None and bool(stored.bias.any()):
        raise CheckpointError(
            f"`{spec.name}.bias` is not part of this model by its config.json",
            hint="if it was trained with this bias, set `attention_bias` or `mlp_bias` in config.json",
        )
    return Linear(spec.name, stored, dtype, device)


def wrong_shape(name: str, expected: tuple[int, ...], found: tuple[int, ...], where: str = "") -> CheckpointError:
    return CheckpointError(
        f"`{name}`{where} has shape {list(found)}, its config.json asks for {list(expected)}", hint=SHAPE_HINT
    )
