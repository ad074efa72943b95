"""GgufFileWriter: one GGUF file, written tensor by tensor, read back, and put in its place only when it is whole.

    with GgufFileWriter(path, "llama", source=folder, overwrite=False) as file:
        file.set("llama.block_count", 30)
        file.plan("blk.0.attn_q.weight", (576, 576), "Q8_0")       # all tensors first
        file.begin()
        file.add("blk.0.attn_q.weight", blocks(weight, "Q8_0"))    # then their bytes, in the same order
        file.finish()

The container and the block formats are those of the `gguf` library, which is imported when a writer is made.
"""

import errno
import math
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from quantkit.checkpoint.gguf import GgufFile, gguf_library, open_gguf
from quantkit.checkpoint.writer import HINTS
from quantkit.errors import CheckpointError, FormatError, GateError

BLOCK = 32
ROWS_AT_ONCE = 1 << 22
"""Weights that are made into blocks at a time."""


class GgufFileWriter:
    """Leaving the block in any other way than after `finish` leaves nothing behind."""

    def __init__(self, path: Path, architecture: str, *, source: Path, overwrite: bool) -> None:
        self.path = Path(os.path.realpath(path))
        self._part = self.path.with_name(f".{self.path.name}.partial")
        self._library = gguf_library()
        self._architecture = architecture
        self._planned: list[str] = []
        self._digests: dict[str, bytes] = {}
        if self.path.is_dir():
            raise CheckpointError(f"`{path}` is a folder, expected the name of a file", hint=f"use `{path / 'm.gguf'}`")
        if self.path.exists() and not overwrite:
            raise CheckpointError(f"`{path}` exists", hint="use `--overwrite`, or choose another name")
        if self.path.is_relative_to(source.resolve()):
            raise CheckpointError(f"`{path}` is inside the model that is read", hint="choose another folder")

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._part.touch()
        except OSError as error:
            raise self._failed(error) from error
        self._writer = self._library.GGUFWriter(self._part, self._architecture)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(Exception):
            self._writer.close()
        self._part.unlink(missing_ok=True)

    def set(self, key: str, value: Any) -> None:
        """Metadata: bool, int (u32), float (f32), text, or a list of one of them."""
        if isinstance(value, bool):
            self._writer.add_bool(key, value)
        elif isinstance(value, int):
            self._writer.add_uint32(key, value)
        elif isinstance(value, float):
            self._writer.add_float32(key, value)
        elif isinstance(value, str):
            self._writer.add_string(key, value)
        else:
            self._writer.add_array(key, value)

    def plan(self, name: str, shape: tuple[int, ...], kind: str) -> None:
        """A tensor to come: `[out, in]`, and its type as the library calls it."""
        number = self._library.GGMLQuantizationType[kind]
        block, block_bytes = self._library.GGML_QUANT_SIZES[number]
        if shape[-1] % block:
            raise FormatError(f"`{name}` has rows of {shape[-1]}, no whole blocks of {kind}", hint="use `--type F16`")
        size = math.prod(shape) // block * block_bytes
        byte_shape = (*shape[:-1], shape[-1] // block * block_bytes)
        self._writer.add_tensor_info(name, byte_shape, np.dtype(np.uint8), size, number)
        self._planned.append(name)

    def begin(self) -> None:
        """Writes all that comes before the tensors."""
        try:
            self._writer.write_header_to_file()
            self._writer.write_kv_data_to_file()
            self._writer.write_ti_data_to_file()
        except OSError as error:
            raise self._failed(error) from error

    def add(self, name: str, data: np.ndarray) -> None:
        """The bytes of the next tensor, u8."""
        assert self._planned[len(self._digests)] == name, f"{name} is out of turn"
        try:
            self._writer.write_tensor_data(np.ascontiguousarray(data))
        except OSError as error:
            raise self._failed(error) from error
        self._digests[name] = sha256(data.tobytes()).digest()

    def finish(self, check: Any = None) -> int:
        """Compares every tensor with what is read back, lets `check` look at the open file, puts it in its place.
        Returns its bytes. Raises GateError where something differs."""
        try:
            self._writer.close()
            descriptor = os.open(self._part, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            with open_gguf(self._part) as file:
                self._compare(file)
                if check is not None:
                    check(file)
            size = self._part.stat().st_size
            self._part.replace(self.path)
            return size
        except OSError as error:
            raise self._failed(error) from error

    def _compare(self, file: GgufFile) -> None:
        if list(file.tensors) != self._planned or len(self._digests) != len(self._planned):
            raise GateError("read back: the tensors of the file are not those that were written", hint="run it again")
        with self._part.open("rb") as raw:
            for name, tensor in file.tensors.items():
                raw.seek(tensor.offset)
                if sha256(raw.read(tensor.size_bytes)).digest() != self._digests[name]:
                    raise GateError(f"read back: tensor `{name}` is not what was written", hint="run it again")

    def _failed(self, error: OSError) -> CheckpointError:
        reason, hint = error.strerror, HINTS.get(error.errno or 0, "choose another place with `-o`")
        if reason is None:  # numpy writes in pieces of its own, and does not say why one was cut short
            reason, hint = "the disk takes no more of it", f"{HINTS[errno.ENOSPC]}, or raise your `ulimit -f`"
        return CheckpointError(f"`{self.path}` cannot be written: {reason}", hint=hint)


def blocks(weight: Tensor, kind: str) -> np.ndarray:
    """A float weight `[out, in]` or `[n]` as the library rounds it to this type, u8 `[out, bytes]`."""
    found = gguf_library()
    number = found.GGMLQuantizationType[kind]
    rows = weight.reshape(-1, weight.shape[-1])
    step = max(1, ROWS_AT_ONCE // rows.shape[1])
    pieces = [found.quantize(part.to(torch.float32).numpy(), number) for part in rows.split(step)]
    return np.concatenate([piece.view(np.uint8).reshape(len(piece), -1) for piece in pieces])


def expand(data: np.ndarray, kind: str) -> Tensor:
    """What a reader makes of such bytes: float32 `[out, in]`."""
    found = gguf_library()
    return torch.from_numpy(np.array(found.dequantize(data, found.GGMLQuantizationType[kind]), np.float32))


def q4_0(q: Tensor, scales: Tensor) -> np.ndarray:
    """Codes uint8 [out, in] of 0 … 15 about 8, and float16 scales [out, in/32], as blocks of Q4_0, `(q - 8) · d`."""
    halves = q.view(len(q), -1, 2, BLOCK // 2)
    nibbles = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return _joined(scales, nibbles)


def q8_0(q: Tensor, scales: Tensor) -> np.ndarray:
    """Codes uint8 [out, in] about 128, and float16 scales [out, in/32], as blocks of Q8_0, `(q - 128) · d`."""
    return _joined(scales, (q ^ 128).view(len(q), -1, BLOCK))


def _joined(scales: Tensor, codes: Tensor) -> np.ndarray:
    heads = scales.contiguous().view(torch.uint8).view(*scales.shape, 2)
    return torch.cat((heads, codes), dim=2).flatten(1).numpy()
