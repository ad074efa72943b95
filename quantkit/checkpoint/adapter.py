"""Adapter: a LoRA adapter as PEFT saves it, read lazily: adapter_config.json and adapter_model.safetensors.

Tensors are `base_model.model.<module>.lora_A.weight` [r, in] and `lora_B.weight` [out, r], for embeddings
`lora_embedding_A` [r, vocabulary] and `lora_embedding_B` [width, r]; a module of `modules_to_save` is there as a whole.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.folder import is_pickle, read_json
from quantkit.checkpoint.header import TORCH_DTYPES, Header, read_header, shown
from quantkit.checkpoint.links import require_inside
from quantkit.checkpoint.regular import file_stamp, open_regular, read_chunks, read_into
from quantkit.errors import CheckpointError, UsageError
from quantkit.formats.patterns import compile_pattern

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PARTS = {".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_embedding_A": "ea", ".lora_embedding_B": "eb"}
# Settings that change what the tensors mean in ways that are not merged here, unless they are false, null or empty.
REFUSED = (
    "use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "layer_replication", "megatron_config",
    "target_parameters", "alora_invocation_tokens", "arrow_config", "velora_config", "use_bdlora",
)  # fmt: skip
TRAINED_WITH = "merge it with the library that it was trained with"


@dataclass(frozen=True, eq=False)
class Adapter:
    """`deltas` are the weights it adds to, `replacements` the tensors it holds as a whole, by names of the model."""

    path: Path
    config: Mapping[str, Any] = field(repr=False)
    header: Header = field(repr=False)
    deltas: Mapping[str, tuple[str, str, bool]] = field(repr=False)
    replacements: Mapping[str, str] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def targets(self) -> list[str]:
        return [*self.deltas, *self.replacements]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor of the model that this adds to or replaces."""
        if name in self.replacements:
            return self.header.entries[self.replacements[name]].shape
        first, second, embedding = self.deltas[name]
        (_, inputs), (outputs, _) = (self.header.entries[key].shape for key in (first, second))
        return (inputs, outputs) if embedding else (outputs, inputs)

    def scale(self, name: str) -> float:
        """alpha / r, or alpha / √r with rsLoRA, of the module that this name belongs to."""
        module = name.removesuffix(".weight")
        rank = self.header.entries[self.deltas[name][0]].shape[0]
        alpha = float(_of_module(self.config, "alpha_pattern", module, self.config.get("lora_alpha", 8)))
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def delta(self, name: str) -> Tensor:
        """What is added to a weight, float32, in its shape."""
        first, second, embedding = self.deltas[name]
        product = self._tensor(second).to(torch.float32) @ self._tensor(first).to(torch.float32)
        return self.scale(name) * (product.T if embedding else product)

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """The two matrices that `x` goes through one after the other, float32 `[in, r]` and `[r, out]`: what they make
        of `x` is added to what the linear of this weight makes of it."""
        first, second, _ = self.deltas[name]
        down, up = self._tensor(first).to(torch.float32), self._tensor(second).to(torch.float32)
        return down.T.contiguous(), self.scale(name) * up.T

    @cached_property
    def digest(self) -> str:
        """Of all bytes of the adapter: another digest is another adapter."""
        sha = hashlib.sha256()
        for file in (self.path / CONFIG, self.header.path):
            for chunk in read_chunks(file):
                sha.update(chunk)
        return sha.hexdigest()

    def replacement(self, name: str) -> Tensor:
        return self._tensor(self.replacements[name])

    def _tensor(self, key: str) -> Tensor:
        entry = self.header.entries[key]
        if entry.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"`{key}` in `{self.header.path}` is stored as {entry.dtype}", hint=TRAINED_WITH)
        data = torch.empty(entry.size_bytes, dtype=torch.uint8)
        with open_regular(self.header.path) as (descriptor, status):
            if file_stamp(status) != self.header.stamp:
                raise CheckpointError(f"`{self.header.path}` changed after it was opened", hint="run it again")
            if read_into(descriptor, data.numpy().data, entry.start) < entry.size_bytes:
                raise CheckpointError(f"`{self.header.path}` ended within `{key}`", hint="fetch it again")
        return data.view(TORCH_DTYPES[entry.dtype]).reshape(entry.shape)


def open_adapter(path: Path) -> Adapter:
    """Raises CheckpointError for a folder that is no LoRA adapter, or one with settings or tensors not understood."""
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"`{path}` has no `{CONFIG}`", hint="give the folder of a PEFT adapter")
    require_inside(path, [path / CONFIG, path / WEIGHTS])
    config = read_json(path / CONFIG)
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(f"`{path}` is an adapter of type {kind}, expected LORA", hint=TRAINED_WITH)
    for key in REFUSED:
        if config.get(key):
            raise CheckpointError(f"`{key}` of `{path / CONFIG}` cannot be honoured", hint=TRAINED_WITH)
    _check_numbers(config, path / CONFIG)
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"`{path}` trains biases (`bias` is {config['bias']!r})", hint=TRAINED_WITH)
    if not (path / WEIGHTS).is_file():
        pickled = [file.name for file in path.iterdir() if is_pickle(file.name)]
        found = f", only `{pickled[0]}`, which is pickled" if pickled else ""
        raise CheckpointError(f"`{path}` has no `{WEIGHTS}`{found}", hint="save it again with PEFT, as safetensors")
    header = read_header(path / WEIGHTS)
    deltas, replacements = _sort(path, header)
    adapter = Adapter(path, config, header, deltas, replacements)
    _check_ranks(adapter)
    return adapter


def open_weighted(text: str, mark: str, option: str) -> tuple[Adapter, float]:
    """An adapter with the weight that follows its folder behind `mark`, 1 if none does. A folder whose own name has a
    `mark` is taken as it is. Raises as `open_adapter` does, and UsageError for a weight that is no number."""
    path, _, number = text.rpartition(mark)
    if not path or Path(text).exists():
        return open_adapter(Path(text)), 1.0
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UsageError(f"`{number}` in `{text}` is no weight", hint=f"use `{option} DIR{mark}0.5`")
    return open_adapter(Path(path)), weight


def _sort(path: Path, header: Header) -> tuple[dict[str, tuple[str, str, bool]], dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    replacements: dict[str, str] = {}
    for key in header.entries:
        name = key.removeprefix(PREFIX)
        ending = next((ending for ending in PARTS if name.endswith(ending)), None)
        if name == key or (ending is None and "lora_" in name):
            raise CheckpointError(f"`{key}` in `{path / WEIGHTS}` is not understood", hint=TRAINED_WITH)
        if ending is None:
            replacements[name] = key
        else:
            found.setdefault(name.removesuffix(ending), {})[PARTS[ending]] = key
    deltas = {}
    for module, parts in found.items():
        for first, second in (("a", "b"), ("ea", "eb")):
            if (first in parts) != (second in parts):
                raise CheckpointError(f"`{path / WEIGHTS}` has half of the pair for `{module}`", hint="fetch it again")
            if first in parts:
                deltas[f"{module}.weight"] = parts[first], parts[second], first == "ea"
    return deltas, replacements


def _check_ranks(adapter: Adapter) -> None:
    config = adapter.config
    for name, (first, second, _) in adapter.deltas.items():
        shapes = [adapter.header.entries[key].shape for key in (first, second)]
        expected = _of_module(config, "rank_pattern", name.removesuffix(".weight"), config.get("r"))
        if [len(shape) for shape in shapes] != [2, 2] or shapes[0][0] != shapes[1][1]:
            halves = f"`{first}` and its other half in `{adapter.header.path}`"
            raise CheckpointError(f"{halves} do not fit: {shapes}", hint="fetch it again")
        if expected is not None and shapes[0][0] != expected:
            raise CheckpointError(
                f"`{first}` in `{adapter.path}` has rank {shapes[0][0]}, its config says {expected}", hint=TRAINED_WITH
            )


def _of_module(config: Mapping[str, Any], patterns: str, module: str, default: Any) -> Any:
    """The value of the first pattern that fits the end of a module's name, as PEFT matches them."""
    for pattern, value in (config.get(patterns) or {}).items():
        if compile_pattern(rf"(.*\.)?({pattern})$").match(module):
            return value
    return default


def _check_numbers(config: Mapping[str, Any], file: Path) -> None:
    """Ranks and factors are numbers, for every module and for those of a pattern."""
    named: list[tuple[str, Any]] = [(key, config.get(key)) for key in ("r", "lora_alpha")]
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(f"`{key}` in `{file}` is no object", hint="fetch this file again")
        for pattern, value in patterns.items():
            try:
                compile_pattern(rf"(.*\.)?({pattern})$")
            except ValueError as error:
                raise CheckpointError(f"`{key}` in `{file}`: {shown(pattern)}: {error}", hint=TRAINED_WITH) from error
            named.append((key, value))
    for key, value in named:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise CheckpointError(
                f"`{key}` in `{file}` is {shown(str(value))}, expected a number", hint="fetch this file again"
            )
