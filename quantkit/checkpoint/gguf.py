"""Reader of GGUF files: metadata and dequantized tensors, nothing of what they mean.

    with open_gguf(path) as file:
        file.metadata.integer("llama.block_count"), file.half("blk.0.attn_q.weight")

The block formats are those of the `gguf` library, which is imported here and only when a file is opened.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import numpy as np
import torch

from quantkit.checkpoint.gguf_header import GgufHeader, Metadata, Record, read_header
from quantkit.checkpoint.header import DAMAGED_HINT, shown
from quantkit.checkpoint.regular import open_regular
from quantkit.errors import CheckpointError

CHUNK_WEIGHTS = 1 << 22  # weights dequantized at a time: 16 MiB of float32 however large the tensor


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its row-major shape (`[out, in]` for a linear weight), its block format, and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int
    size_bytes: int


@contextmanager
def open_gguf(path: Path) -> Iterator["GgufFile"]:
    """Read and check the header; tensors are read on demand.

    Raises CheckpointError when the file is missing, damaged, one part of several, or has a type without dequantization.
    """
    if path.is_dir():
        raise CheckpointError(f"`{path}` is a folder, expected one GGUF file", hint="name the `.gguf` file in it")
    library = gguf_library()
    with open_regular(path) as (descriptor, _):
        own = os.dup(descriptor)
    with os.fdopen(own, "rb") as file:
        yield GgufFile(file, path, library)


class GgufFile:
    """An open GGUF file. `metadata` and `tensors` (by GGUF name) are plain data; `half` and `single` read."""

    def __init__(self, file: BinaryIO, path: Path, library: ModuleType) -> None:
        self.path = path
        self._file, self._library = file, library
        header = read_header(file, path)
        self.metadata: Metadata = header.metadata
        _refuse_part(header, path)
        self.tensors: dict[str, GgufTensor] = {}
        for record in header.records:
            if record.name in self.tensors:
                raise CheckpointError(f"`{path}` has tensor {shown(record.name)} twice", hint=DAMAGED_HINT)
            self.tensors[record.name] = _tensor(record, header.file_bytes, path, library)
        self._check_types()

    def half(self, name: str) -> tuple[torch.Tensor, float]:
        """float16 of the file's shape (`[out, in]`), each weight dequantized in float32 and rounded once.

        The number is the largest rounding error over the largest weight, 0 when nothing was rounded.
        Raises CheckpointError when a weight is not finite, or beyond float16.
        """
        tensor = self.tensors[name]
        half = torch.empty(math.prod(tensor.shape), dtype=torch.float16)
        done, error, largest = 0, 0.0, 0.0
        for weights in self._dequantized(tensor):
            piece = half[done : done + len(weights)]
            piece.copy_(weights)
            if not torch.isfinite(piece).all():
                raise CheckpointError(
                    f"tensor {shown(name)} of `{self.path}` holds {weights.abs().max():g}, beyond the range of float16",
                    hint="start from the original Hugging Face checkpoint of this model",
                )
            error = max(error, (weights - piece).abs().max().item())
            largest = max(largest, weights.abs().max().item())
            done += len(weights)
        return half.view(tensor.shape), error / largest if largest else 0.0

    def single(self, name: str) -> torch.Tensor:
        """float32 of the file's shape, dequantized. Raises CheckpointError when a value is not finite."""
        tensor = self.tensors[name]
        return torch.cat(list(self._dequantized(tensor))).view(tensor.shape)

    def _dequantized(self, tensor: GgufTensor) -> Iterator[torch.Tensor]:
        """Consecutive finite float32 pieces `[weights]` of the flattened tensor, whole rows each."""
        kind = self._library.GGMLQuantizationType(tensor.type_id)
        rows_left = math.prod(tensor.shape[:-1])
        row_bytes = tensor.size_bytes // rows_left
        self._file.seek(tensor.offset)
        while rows_left:
            rows = min(rows_left, max(1, CHUNK_WEIGHTS // tensor.shape[-1]))
            data = self._file.read(rows * row_bytes)
            if len(data) != rows * row_bytes:
                raise CheckpointError(f"`{self.path}` ends inside tensor {shown(tensor.name)}", hint=DAMAGED_HINT)
            weights = self._expand(np.frombuffer(data, np.uint8).reshape(rows, row_bytes), kind)
            if not torch.isfinite(weights).all():
                where = f"tensor {shown(tensor.name)} of `{self.path}`"
                raise CheckpointError(f"{where} holds values that are not finite", hint=DAMAGED_HINT)
            yield weights
            rows_left -= rows

    def _expand(self, rows: np.ndarray, kind: int) -> torch.Tensor:
        """float32 `[weights]` of u8 `[rows, row_bytes]`; NotImplementedError when the library cannot."""
        with np.errstate(all="ignore"):  # non-finite block scales are reported by the caller, with the tensor's name
            weights = self._library.dequantize(rows, kind)
        return torch.from_numpy(np.array(weights, np.float32).reshape(-1))

    def _check_types(self) -> None:
        """Dequantize one zero block of each type in use, so that a type without code is refused before any work."""
        for tensor in {tensor.type_id: tensor for tensor in self.tensors.values()}.values():
            kind = self._library.GGMLQuantizationType(tensor.type_id)
            block_bytes = self._library.GGML_QUANT_SIZES[kind][1]
            try:
                self._expand(np.zeros((1, block_bytes), np.uint8), kind)
            except NotImplementedError as error:
                where = f"tensor {shown(tensor.name)} of `{self.path}`"
                raise CheckpointError(
                    f"{where} has type {tensor.type_name}, which cannot be dequantized",
                    hint="use a file with weights of type F16, BF16, Q8_0, Q6_K, Q4_K or the like",
                ) from error


def gguf_library() -> ModuleType:
    """The `gguf` library. Raises CheckpointError where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError("the `gguf` library is not installed", hint="pip install gguf") from error
    return gguf


def _refuse_part(header: GgufHeader, path: Path) -> None:
    parts = header.metadata.get("split.count", 1)
    if parts != 1:
        raise CheckpointError(
            f"`{path}` is one of {parts} parts, expected a whole model",
            hint=f"llama-gguf-split --merge {path} JOINED.gguf",
        )


def _tensor(record: Record, file_bytes: int, path: Path, library: ModuleType) -> GgufTensor:
    """Check one record against the sizes of its type and of the file."""
    where = f"tensor {shown(record.name)} of `{path}`"
    try:
        kind = library.GGMLQuantizationType(record.type_id)
    except ValueError as error:
        raise CheckpointError(
            f"{where} has type number {record.type_id}, which is not known", hint="pip install --upgrade gguf"
        ) from error
    block, block_bytes = library.GGML_QUANT_SIZES[kind]
    weights = math.prod(record.dimensions)
    if weights == 0 or record.dimensions[0] % block:
        dimensions = list(record.dimensions)
        raise CheckpointError(
            f"{where} has dimensions {dimensions}, expected rows of whole {kind.name} blocks of {block}",
            hint=DAMAGED_HINT,
        )
    size_bytes = weights // block * block_bytes
    if record.offset + size_bytes > file_bytes:
        raise CheckpointError(
            f"{where} ends at byte {record.offset + size_bytes}, but the file has {file_bytes} bytes", hint=DAMAGED_HINT
        )
    return GgufTensor(record.name, record.dimensions[::-1], record.type_id, kind.name, record.offset, size_bytes)
