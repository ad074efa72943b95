"""Whether a checkpoint holds the tensors of its model, all of them and nothing else, known before any is used.

A tensor that is silently skipped, or silently not used, makes a model that talks nonsense.
"""

from pathlib import Path
from typing import Protocol

import torch

from quantkit.errors import CheckpointError
from quantkit.formats import exl2
from quantkit.formats.dense import DTYPES
from quantkit.models.architecture import EMBEDDING, HEAD, Architecture
from quantkit.models.config import ModelConfig
from quantkit.models.source import Source, wrong_shape


class Info(Protocol):
    """What a header says of a tensor."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> Path: ...


class Listing(Source, Protocol):
    """A source that can say what it holds without reading it."""

    @property
    def path(self) -> Path: ...

    def names(self) -> list[str]:
        """All tensors, as they are called on disk."""

    def tensors_of(self, name: str) -> list[str]:
        """The names on disk of one module's tensors. Raises CheckpointError where there are none."""

    def info(self, name: str) -> Info:
        """Dtype, shape and file of a tensor."""


def check_contents(listing: Listing, config: ModelConfig, architecture: Architecture) -> None:
    """Raises CheckpointError for a missing tensor, one of another shape or no floats, and one that belongs to nothing.

    Linears that are quantized, or split where the family fuses them, are held to their shapes when they are read.
    """
    linears = {spec.name for spec in architecture.linears(config)} | {HEAD}
    used: set[str] = set()
    for name, shape in architecture.tensors(config).items():
        module = name.rpartition(".")[0]
        if module == HEAD and not any(other.startswith(f"{HEAD}.") for other in listing.names()):
            raise _no_head(listing.path)
        stored = listing.tensors_of(module)
        if listing.has(f"{module}.weight"):
            _check_plain(listing, name, shape)
            suffixes = (".weight", ".bias") if module in linears else (".weight",)
            stored = [found for found in stored if found.endswith(suffixes)]
        used.update(stored)
    if config.tie_embeddings:
        used.update(_checked_copy_of_embedding(listing))
    left_over = [name for name in listing.names() if name not in used and not name.endswith(".rotary_emb.inv_freq")]
    if left_over:
        raise _left_over(listing.path, left_over)


def _check_plain(listing: Listing, name: str, shape: tuple[int, ...]) -> None:
    if not listing.has(name):
        raise CheckpointError(
            f"`{name}` is not in `{listing.path}`",
            hint="correct the bias keys of config.json, or fetch the model again",
        )
    info = listing.info(name)
    if info.dtype not in DTYPES:  # before the shape, which integers of an unknown format rarely have
        dtype = str(info.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"`{name}` in `{info.file}` is stored as {dtype}, which is no plain weight",
            hint="use a version of this model in bfloat16, float16 or float32",
        )
    if tuple(info.shape) != shape:
        raise wrong_shape(name, shape, tuple(info.shape), f" in `{info.file}`")


def _checked_copy_of_embedding(listing: Listing) -> list[str]:
    """The head's tensors in a tied model: none, the embedding once more, or the embedding in EXL2 form."""
    stored = [name for name in listing.names() if name.startswith(f"{HEAD}.")]
    if not stored or exl2.recognise([name.removeprefix(f"{HEAD}.") for name in stored]):
        return stored
    copy, embedding = f"{HEAD}.weight", f"{EMBEDDING}.weight"
    if stored != [copy] or not torch.equal(listing.tensor(copy), listing.tensor(embedding)):
        raise CheckpointError(
            f"`tie_word_embeddings` is true for `{listing.path}`, but `{stored[0]}` is not `{embedding}`",
            hint="set `tie_word_embeddings` to false in config.json",
        )
    return stored


def _no_head(path: Path) -> CheckpointError:
    return CheckpointError(
        f"`{HEAD}.weight` is not in `{path}`",
        hint="if the output is tied to the embedding, set `tie_word_embeddings` to true in config.json",
    )


def _left_over(path: Path, names: list[str]) -> CheckpointError:
    shown = ", ".join(f"`{name}`" for name in names[:3]) + (", …" if len(names) > 3 else "")
    count = "1 tensor belongs" if len(names) == 1 else f"{len(names)} tensors belong"
    return CheckpointError(
        f"{count} to no part of the model that config.json describes: {shown} in `{path}`",
        hint="take config.json and weights from one place; a tensor under a wrong name is missing elsewhere",
    )
