"""Checkpoint: a model folder, read lazily. Opening reads headers and JSON; each tensor is read when it is asked for.

    checkpoint = open_checkpoint("models/llama")
    for name in checkpoint.linears():
        weight = checkpoint.dense(name)      # [out, in]

Tensors are read into memory of their own, in any order and from any thread; no file stays open. A file that changed
since it was opened is an error, not another weight.
"""

import difflib
import os
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.checkpoint import folder as folders
from quantkit.checkpoint import hub
from quantkit.checkpoint.header import DAMAGED_HINT, TORCH_DTYPES, Entry, Header, read_header, shown
from quantkit.checkpoint.links import require_inside
from quantkit.checkpoint.quantization import read_quantization
from quantkit.checkpoint.regular import file_stamp, open_regular, read_into
from quantkit.checkpoint.spelling import respelled, spellings
from quantkit.errors import CheckpointError, FormatError, in_shell
from quantkit.formats import dense, exl2, gptq
from quantkit.formats.codec import StoredTensor
from quantkit.formats.gptq_config import GptqConfig, GptqSettings
from quantkit.formats.gptq_inference import infer
from quantkit.formats.joined import JoinedTensor
from quantkit.models import catalog
from quantkit.models.architecture import EMBEDDING, HEAD, Architecture
from quantkit.models.config import ModelConfig


class TensorInfo(NamedTuple):
    """What a header says of one tensor, and which file has it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path


def open_checkpoint(path: str | Path, *, offline: bool = False) -> "Checkpoint":
    """A model folder, or a model of the hub by its id (`organisation/name`) where no such folder exists.

    Every header is validated here; no tensor is read. `offline` takes hub models from the local cache only.
    Raises CheckpointError, naming file and tensor, for anything that cannot be read.
    """
    folder = Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser fails for a user who does not exist
    if not os.path.lexists(folder):
        folder = hub.fetch(str(path), offline=offline)
    if not folder.is_dir():
        raise _no_folder(folder)
    try:
        return _open_folder(folder)
    except OSError as error:
        hint = f"`ls -l {in_shell(folder)}`"
        raise CheckpointError(f"`{folder}` cannot be read: {error.strerror}", hint=hint) from error


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A folder whose headers are known and valid. `notes` say what a person should know about how it was read."""

    path: Path
    config: dict[str, Any] = field(repr=False)
    quantization: dict[str, Any] | None
    homes: dict[str, Header] = field(repr=False)
    notes: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """All tensors as they are called on disk, in the order of their files."""
        return list(self.homes)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name, or of its other spelling."""
        return name in self.homes or respelled(name) in self.homes

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and file. Raises CheckpointError for an absent tensor, or a dtype that cannot be read."""
        header, entry = self._entry(name)
        if entry.dtype not in TORCH_DTYPES:
            raise CheckpointError(
                f"tensor {shown(name)} in `{header.path}` is stored as {entry.dtype}, which is not supported",
                hint=dense.HINT,
            )
        return TensorInfo(TORCH_DTYPES[entry.dtype], entry.shape, header.path)

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored: its own dtype and shape, in memory of its own.

        Raises CheckpointError when it is absent, of a dtype that cannot be read, or when its file has changed.
        """
        dtype, shape, _ = self.info(name)
        return self._read(name, 0, self._entry(name)[1].size_bytes).view(dtype).reshape(shape)

    def part(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        """Consecutive rows of a matrix, and of these consecutive columns: no other bytes are read. Raises as `tensor`
        does, and CheckpointError for a tensor that is no matrix of so many rows and columns."""
        dtype, shape, file = self.info(name)
        last = 0 if columns is None else columns.stop
        if len(shape) != 2 or rows.stop > shape[0] or last > shape[1]:
            raise CheckpointError(
                f"tensor {shown(name)} in `{file}` has shape {list(shape)}, expected at least {[rows.stop, last]}",
                hint="config.json and the tensors are of two different models: take both from one place",
            )
        columns = range(shape[1]) if columns is None else columns
        row, first, length = (count * dtype.itemsize for count in (shape[1], columns.start, len(columns)))
        if length == row:
            data = self._read(name, rows.start * row, len(rows) * row)
        else:
            data = self._read(name, rows.start * row + first, length, len(rows), row)
        return data.view(dtype).reshape(len(rows), len(columns))

    def _read(self, name: str, first: int, length: int, count: int = 1, stride: int = 0) -> Tensor:
        """Bytes of a tensor from its byte `first` on: `count` pieces of this length, `stride` apart."""
        header, entry = self._entry(name)
        data = torch.empty(count * length, dtype=torch.uint8)
        target = data.numpy().data
        with open_regular(header.path) as (descriptor, status):
            if file_stamp(status) != header.stamp:
                message = f"`{header.path}` changed after it was opened"
                raise CheckpointError(message, hint="let no other program write to it")
            for piece in range(count):
                here = target[piece * length : (piece + 1) * length]
                if read_into(descriptor, here, entry.start + first + piece * stride) < length:
                    message = f"`{header.path}` ended within tensor {shown(name)}"
                    raise CheckpointError(message, hint=DAMAGED_HINT)
        return data

    def linears(self) -> list[str]:
        """The quantizable linears of the blocks by their Hugging Face module names, in model order.

        Raises UnsupportedModel for a family that is not in the catalog.
        """
        return list(self._widths)

    def linear(self, name: str) -> StoredTensor:
        """A linear by its module name, in the format it is stored in; the parts of a fused one are joined.

        Raises CheckpointError when it is absent, FormatError when its tensors contradict each other or the config.
        """
        modules = self._modules_of(name)
        parts = [self._decode(module, name, index) for index, module in enumerate(modules)]
        if len(parts) == 1:
            return parts[0]
        return JoinedTensor({module.rpartition(".")[2]: part for module, part in zip(modules, parts, strict=True)})

    def dense(self, name: str) -> Tensor:
        """The weight of a linear, `[out, in]`: the stored dtype when it is dense; else float16, rounded once, without
        the outputs that the format added as padding. Raises as `linear` does."""
        return self.linear(name).dequantize().T.contiguous()

    def tensors_of(self, name: str) -> list[str]:
        """The tensors that make up a linear, as they are called on disk."""
        return [f"{module}.{suffix}" for module in self._modules_of(name) for suffix in self._suffixes[module]]

    def suffixes(self, module: str) -> list[str]:
        """What follows the name of a module in the names of its tensors; empty where there is no such module."""
        return list(self._suffixes.get(module, ()))

    def require_one_form(self, module: str) -> None:
        """FormatError for a module on disk that has the tensors of several formats: which one is meant is not known."""
        suffixes = self.suffixes(module)
        if len(found := forms(suffixes)) > 1:
            raise FormatError(
                f"{shown(module)} in `{self.path}` is both {' and '.join(found)}: {', '.join(suffixes)}",
                hint="remove the tensors of the form that does not belong to this model, or fetch it again",
            )

    @contextmanager
    def telling_file(self, module: str) -> Iterator[None]:
        """What a codec, which knows no files, objects to in the tensors of a module is told with the files they are
        in."""
        try:
            yield
        except FormatError as error:
            files = dict.fromkeys(self.homes[f"{module}.{suffix}"].path for suffix in self.suffixes(module))
            where = ", ".join(f"`{file}`" for file in files)
            raise FormatError(f"{where}: {error.message}", hint=error.hint) from error

    def side_files(self) -> list[Path]:
        """What goes along when the model is written anew: tokenizer, chat template, licence, model card, …"""
        return folders.side_files(self.path)

    @cached_property
    def architecture(self) -> Architecture:
        """The family of the model. Raises UnsupportedModel for one that is not in the catalog."""
        return catalog.find(self.config, str(self.path / "config.json"))

    @cached_property
    def model_config(self) -> ModelConfig:
        """The numbers of config.json.

        Raises CheckpointError for a missing key and UnsupportedModel for a value that cannot be honoured.
        """
        return ModelConfig.read(self.config, str(self.path / "config.json"))

    @property
    def original(self) -> "Checkpoint":
        """The model that this one is another form of: itself, unless it was made of one."""
        return self

    @property
    def form(self) -> str:
        """How it differs from the `original`; empty where it does not."""
        return ""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(header.entries[name].size_bytes for name, header in self.homes.items())

    @cached_property
    def _suffixes(self) -> dict[str, list[str]]:
        """Module on disk → what follows it in the names of its tensors."""
        suffixes: dict[str, list[str]] = {}
        for name in self.homes:
            module, _, suffix = name.rpartition(".")
            suffixes.setdefault(module, []).append(suffix)
        return suffixes

    @cached_property
    def _widths(self) -> dict[str, tuple[int, ...]]:
        """Quantizable linear of a block → its outputs as the config has them, for each part of a fused one."""
        linears = self.architecture.linears(self.model_config)
        return {spec.name: spec.widths for spec in linears if spec.quantizable}

    @cached_property
    def _gptq(self) -> GptqConfig | None:
        return None if self.quantization is None else GptqConfig.read(self.quantization, str(self.path / "config.json"))

    def _entry(self, name: str) -> tuple[Header, Entry]:
        for spelled in (name, respelled(name)):
            if spelled in self.homes:
                return self.homes[spelled], self.homes[spelled].entries[spelled]
        raise self._absent(name)

    def _modules_of(self, linear: str) -> tuple[str, ...]:
        """The modules on disk that a linear consists of."""
        for modules in spellings(linear):
            if all(module in self._suffixes for module in modules):
                return modules
        raise self._absent(linear)

    def _decode(self, module: str, linear: str, part: int) -> StoredTensor:
        """One module on disk, which is a linear or, if that is fused, that part of it."""
        suffixes = self._suffixes[module]
        self.require_one_form(module)
        tensors = {suffix: self.tensor(f"{module}.{suffix}") for suffix in suffixes}
        with self.telling_file(module):
            if exl2.recognise(suffixes):
                return exl2.decode(module, tensors, self._width(module, linear, part))
            if gptq.recognise(suffixes):
                return gptq.decode(module, tensors, self._gptq_settings(module) or infer(module, tensors))
            if dense.recognise(suffixes):
                return dense.decode(module, tensors)
        method = (self.quantization or {}).get("quant_method", "an unknown format")
        raise FormatError(
            f"{shown(module)} in `{self.path}` is stored as {method} ({', '.join(suffixes)}), which cannot be read",
            hint="use the GPTQ, EXL2 or unquantized version of this model",
        )

    def _width(self, module: str, linear: str, part: int) -> int | None:
        """The true outputs of a module that may be padded; None for one that the family does not have."""
        if linear == HEAD:
            return self.model_config.vocab_size
        widths = self._widths.get(linear)
        if widths is None:
            return None
        return sum(widths) if module == linear else widths[part]

    def _gptq_settings(self, module: str) -> GptqSettings | None:
        """As the folder says them; None where it says nothing."""
        if self._gptq is None:
            return None
        settings = self._gptq.for_module(module)
        if settings is None:
            raise FormatError(
                f"{shown(module)} is stored as GPTQ, but a rule of `dynamic` says that it is dense",
                hint="remove that rule from `quantization_config` in config.json",
            )
        return settings

    def _absent(self, name: str) -> CheckpointError:
        last = name.removesuffix(".weight").rpartition(".")[2]
        alike = [other for other in (*self._suffixes, *self.homes) if last in other]
        near = difflib.get_close_matches(name, alike[:1000], n=1)
        again = "fetch the model again: it is not complete, or its config.json is of another"
        hint = f"did you mean {shown(near[0])}? if not, {again}" if near else again
        if name.partition(".")[0] == HEAD:
            hint = f"where the output is tied to the embedding, its weight is `{EMBEDDING}.weight`"
        return CheckpointError(f"{shown(name)} is not in `{self.path}`", hint=hint)


def forms(suffixes: Collection[str]) -> list[str]:
    """The formats of which one linear has tensors: a sound one has one."""
    known = {"dense": dense.recognise, "GPTQ": gptq.recognise, "EXL2": exl2.recognise}
    return [name for name, recognise in known.items() if recognise(suffixes)]


def _open_folder(folder: Path) -> Checkpoint:
    require_inside(folder, folders.readable(folder))
    weights = folders.find_weights(folder)
    require_inside(folder, weights.files)
    folders.require([folder / "config.json"], "which describes the model")
    config = folders.read_json(folder / "config.json")
    quantization = read_quantization(folder, config)
    homes = _homes([read_header(file) for file in weights.files])
    notes = [*weights.notes]
    if weights.weight_map is not None:
        notes += _check_index(folder / folders.INDEX, weights.weight_map, homes)
    if quantization is None and any(gptq.recognise([name.rpartition(".")[2]]) for name in homes):
        notes.append("no quantization settings: bits, group size and zero points are told from the tensors")
    if links := folders.dangling(folder):
        notes.append(f"left out, as the links lead to nothing: {', '.join(links)}")
    return Checkpoint(folder, config, quantization, homes, tuple(notes))


def _homes(headers: list[Header]) -> dict[str, Header]:
    """Tensor name → the header that has it, in the order of the files. Raises CheckpointError for one in two files."""
    homes: dict[str, Header] = {}
    for header in headers:
        for name in sorted(header.entries, key=lambda name: (header.entries[name].start, name)):
            if name in homes:
                raise CheckpointError(
                    f"tensor {shown(name)} is in both `{homes[name].path}` and `{header.path}`",
                    hint="remove the file that does not belong to this model",
                )
            homes[name] = header
    return homes


def _check_index(index: Path, weight_map: dict[str, Path], homes: dict[str, Header]) -> list[str]:
    """Each tensor is in the shard that the index names. What the index does not name is a note: it is read anyway."""
    for name, file in weight_map.items():
        if name not in homes or homes[name].path != file:
            where = f"; it is in `{homes[name].path}`" if name in homes else ""
            raise CheckpointError(
                f"tensor {shown(name)} is not in `{file}`, where `{index}` has it{where}",
                hint="fetch the shard and the index again",
            )
    extra = Counter(header.path for name, header in homes.items() if name not in weight_map)
    return [f"`{index.name}` does not name {count} tensors of `{file.name}`" for file, count in extra.items()]


def _no_folder(path: Path) -> CheckpointError:
    if not path.exists():
        return CheckpointError(
            f"`{path}` is a link to `{path.readlink()}`, which does not exist", hint="give the folder itself"
        )
    if path.suffix == ".gguf":
        hint = f"convert it first: `quantkit convert gguf-to-hf {in_shell(path)} OUT`"
        return CheckpointError(f"`{path}` is a GGUF file", hint=hint)
    return CheckpointError(f"`{path}` is a file; a model is a folder", hint=f"give the folder: `{path.parent}`")
