"""ShardWriter: one safetensors file, written as its tensors arrive.

The header comes first in the file but is known last, so room is left for it. What is left of the room is filled with
spaces, as the format allows; a small file is closed up instead, so that it has none. Tensors whose size is no multiple
of eight bytes go to the end, widest elements first: then every tensor is aligned to its elements, without a hole.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.durable import write_at
from quantkit.checkpoint.header import TORCH_DTYPES, shown
from quantkit.checkpoint.regular import read_at
from quantkit.errors import CheckpointError

# About 8000 tensors; a shard that has more is closed before it is full.
HEADER_ROOM = 2**20
# Files with less data are closed up: the room would be a visible part of them.
COMPACT_BYTES = 32 * 2**20
CHUNK_BYTES = 2**20
# Offsets, dtype, punctuation and the names of the fields, for one tensor.
ENTRY_BYTES = 120

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
METADATA = {"format": "pt"}


class ShardWriter:
    """Raises OSError where the disk does; its owner turns that into an error for people."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._table: dict[str, object] = {"__metadata__": METADATA}
        self._header_bytes = ENTRY_BYTES
        self._data_bytes = 0
        self._held: list[tuple[str, Tensor]] = []
        self._held_bytes = 0

    def has_room(self, name: str, tensor: Tensor, limit_bytes: int) -> bool:
        """Whether one more tensor fits; a first one always does."""
        fits = self._data_bytes + self._held_bytes + _size_bytes(tensor) <= limit_bytes
        return len(self._table) == 1 or (fits and self._header_bytes + _entry_bytes(name, tensor) <= HEADER_ROOM)

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes the tensor, or keeps a copy of it when it has to go to the end."""
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"tensor {shown(name)} is {tensor.dtype}, which cannot be stored")
        self._header_bytes += _entry_bytes(name, tensor)
        self._table[name] = None
        if _size_bytes(tensor) % 8:
            self._held.append((name, tensor.detach().cpu().clone()))
            self._held_bytes += _size_bytes(tensor)
        else:
            self._write(name, tensor)

    def close(self) -> None:
        """Writes what was kept and the header, and waits until all of it is on the disk."""
        for name, tensor in sorted(self._held, key=lambda held: -held[1].element_size()):
            self._write(name, tensor)
        header = json.dumps(self._table, ensure_ascii=False, separators=(",", ":")).encode()
        if self._data_bytes < COMPACT_BYTES:
            room = -(-len(header) // 8) * 8
            self._close_up(room)
        else:
            room = HEADER_ROOM
        write_at(self._file, memoryview(room.to_bytes(8, "little") + header.ljust(room)), 0)
        os.fsync(self._file)
        os.close(self._file)

    def abandon(self) -> None:
        """Lets go of the file, whatever is in it."""
        with suppress(OSError):
            os.close(self._file)

    def _close_up(self, room: int) -> None:
        """Moves the data to where it begins when the header has just this room."""
        for start in range(0, self._data_bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, self._data_bytes - start)
            write_at(self._file, memoryview(read_at(self._file, size, 8 + HEADER_ROOM + start)), 8 + room + start)
        os.ftruncate(self._file, 8 + room + self._data_bytes)

    def _write(self, name: str, tensor: Tensor) -> None:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        start, stop = self._data_bytes, self._data_bytes + raw.size
        write_at(self._file, raw.data, 8 + HEADER_ROOM + start)
        self._table[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        self._data_bytes = stop


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _entry_bytes(name: str, tensor: Tensor) -> int:
    """No less than the header takes for one tensor."""
    return len(json.dumps([name, list(tensor.shape)])) + ENTRY_BYTES
