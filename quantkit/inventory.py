"""Inventory: what a model folder holds, linear by linear, as those who load it will find it.

`take(checkpoint)` reads headers, and of the tensors only the small ones that say which rows form a group. A linear that
is absent, or whose tensors make no sense, is left out here: faults are what `quantkit check` lists.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.spelling import spellings
from quantkit.errors import QuantkitError
from quantkit.formats import dense, exl2, gptq
from quantkit.formats.gptq_config import GptqConfig, GptqSettings
from quantkit.models.architecture import HEAD, Architecture, LinearSpec
from quantkit.models.catalog import FAMILIES
from quantkit.models.config import ModelConfig

DENSE, GPTQ, EXL2 = "dense", "gptq", "exl2"


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """One linear as it lies on disk; a fused one that lies there in parts is several.

    name         of the module on disk; `linear` is what the family calls it
    stage        shared by the linears that read the same input
    format       `dense`, `gptq`, `exl2`, or the suffixes of a format that is not known here
    settings     GPTQ's, as the config has them
    scattered    digest of the groups of its rows, where they do not follow one another
    stored_bits  all bits on disk, side data and bias included
    zero_points  least and greatest, where they were looked at: GPTQ's true zero points
    """

    name: str
    linear: str
    stage: str
    in_features: int
    out_features: int
    format: str
    bias: bool
    stored_bits: int
    settings: GptqSettings | None = None
    scattered: str | None = None
    zero_points: tuple[int, int] | None = None

    @property
    def group_rows(self) -> int:
        """Rows of a GPTQ group; all of them where the config says -1."""
        size = -1 if self.settings is None else self.settings.group_size
        return self.in_features if size == -1 else size

    @property
    def is_expert(self) -> bool:
        return any(part.isdigit() for part in self.name.split(".")[3:])


@dataclass(frozen=True, slots=True)
class Inventory:
    """A model folder, or one that is planned.

    family        `LlamaForCausalLM`, …
    method        `quant_method` of its settings, or what its tensors are; None where nothing is quantized
    quantization  its settings, from wherever they stand; `in_config` where that is config.json
    linears       of the blocks, in the order of the model; the head is apart
    """

    family: str
    config: ModelConfig
    tied: bool
    method: str | None
    quantization: Mapping[str, Any] | None
    in_config: bool
    linears: tuple[StoredLinear, ...]
    head: StoredLinear | None

    @property
    def quantized(self) -> tuple[StoredLinear, ...]:
        """All that are not dense, the head last."""
        everything = self.linears if self.head is None else (*self.linears, self.head)
        return tuple(linear for linear in everything if linear.format != DENSE)

    def with_zero_points(self, found: Mapping[str, tuple[int, int]]) -> "Inventory":
        """The same with least and greatest zero points, by module."""
        linears = tuple(replace(linear, zero_points=found.get(linear.name)) for linear in self.linears)
        head = self.head and replace(self.head, zero_points=found.get(self.head.name))
        return replace(self, linears=linears, head=head)


def take(checkpoint: Checkpoint) -> Inventory:
    """What a folder holds.

    Raises CheckpointError and UnsupportedModel where config.json describes no model that is known here.
    """
    config, architecture = checkpoint.model_config, checkpoint.architecture
    settings = _settings(checkpoint)
    by_module: dict[str, list[str]] = {}
    for name in checkpoint.names():
        module, _, suffix = name.rpartition(".")
        by_module.setdefault(module, []).append(suffix)
    specs = [spec for spec in architecture.linears(config) if spec.quantizable]
    linears = tuple(linear for spec in specs for linear in _stored(checkpoint, spec, by_module, settings))
    head = next(iter(_stored(checkpoint, head_spec(config), by_module, settings)), None)
    formats = [linear.format for linear in (*linears, *([head] if head else [])) if linear.format != DENSE]
    said = checkpoint.quantization or {}
    method = said.get("quant_method", said.get("method")) or (formats[0] if formats else None)
    return Inventory(
        family=family_name(architecture),
        config=config,
        tied=config.tie_embeddings,
        method=None if method is None else str(method),
        quantization=checkpoint.quantization,
        in_config=isinstance(checkpoint.config.get("quantization_config"), Mapping),
        linears=linears,
        head=head,
    )


def head_spec(config: ModelConfig) -> LinearSpec:
    """The output linear, also where it is tied to the embedding."""
    return LinearSpec(HEAD, config.hidden_size, (config.vocab_size,), ("head",), HEAD)


def family_name(architecture: Architecture) -> str:
    """`LlamaForCausalLM`: as the catalog names it."""
    return next(name for name, family in FAMILIES.items() if family is architecture)


def _settings(checkpoint: Checkpoint) -> GptqConfig | None:
    try:
        if checkpoint.quantization is None:
            return None
        return GptqConfig.read(checkpoint.quantization, str(checkpoint.path / "config.json"))
    except QuantkitError:  # another method, or settings that cannot be read: told elsewhere
        return None


def _stored(
    checkpoint: Checkpoint, spec: LinearSpec, by_module: Mapping[str, list[str]], config: GptqConfig | None
) -> Iterable[StoredLinear]:
    modules = next((found for found in spellings(spec.name) if all(module in by_module for module in found)), ())
    for index, module in enumerate(modules):
        suffixes = by_module[module]
        infos = {suffix: checkpoint.homes[f"{module}.{suffix}"].entries[f"{module}.{suffix}"] for suffix in suffixes}
        form = _format(suffixes)
        gptq_settings = config.for_module(module) if form == GPTQ and config is not None else None
        yield StoredLinear(
            name=module,
            linear=spec.name,
            stage=spec.stage,
            in_features=spec.in_features,
            out_features=spec.out_features if len(modules) == 1 else spec.widths[index],
            format=form,
            bias="bias" in suffixes,
            stored_bits=8 * sum(info.size_bytes for info in infos.values()),
            settings=gptq_settings,
            scattered=_scattered(checkpoint, module, gptq_settings) if form == GPTQ else None,
        )


def _format(suffixes: list[str]) -> str:
    if exl2.recognise(suffixes):
        return EXL2
    if gptq.recognise(suffixes):
        return GPTQ
    return DENSE if dense.recognise(suffixes) else "+".join(sorted(suffixes))


def _scattered(checkpoint: Checkpoint, module: str, settings: GptqSettings | None) -> str | None:
    """A digest of `g_idx`; None where groups follow one another, as all zeros and an absent one mean too."""
    name = f"{module}.g_idx"
    if not checkpoint.has(name) or settings is None:
        return None
    try:
        group = checkpoint.tensor(name)
    except QuantkitError:
        return None
    rows = group.numel() if settings.group_size == -1 else settings.group_size
    if group.is_floating_point() or not bool(group.any()):
        return None
    if torch.equal(group.to(torch.int64), torch.arange(group.numel()) // max(1, rows)):
        return None
    return hashlib.sha256(group.to(torch.int32).numpy().tobytes()).hexdigest()[:16]
