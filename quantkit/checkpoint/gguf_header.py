"""Headers of GGUF files: metadata and the list of tensors, every length proven before anything is read.

Little-endian throughout (GGUF specification, versions 2 and 3): magic `GGUF` · version u32 · tensor count u64 ·
metadata count u64 · metadata (key, type u32, value) · tensor records (name, rank u32, dimensions u64 fastest first,
type u32, offset u64) · padding to `general.alignment` · data. Strings are u64 length and UTF-8; an array is type u32,
count u64 and its values. No allocation follows a count that was not held against the bytes left in the file.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from quantkit.checkpoint.header import DAMAGED_HINT, shown
from quantkit.checkpoint.regular import LFS_HINT, LFS_OPENING
from quantkit.errors import CheckpointError

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]
T = TypeVar("T", int, float, bool, str, list)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
LEAST_ENTRY_BYTES = 8 + 4 + 1  # an empty key, a type and one byte of value
LEAST_RECORD_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, a rank, one dimension, a type and an offset

OUTDATED = "convert the model to GGUF again with a current tool"
ORIGINAL = "start from the original Hugging Face checkpoint of this model"


class Metadata(Mapping[str, Value]):
    """The metadata of one file. Typed access raises CheckpointError naming the key, both types and the file."""

    def __init__(self, values: dict[str, Value], path: Path) -> None:
        self._values, self._path = values, path

    def at(self, key: str) -> str:
        """An entry and its file, as errors name them."""
        return f"metadata {shown(key)} of `{self._path}`"

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, str, default)

    def integer(self, key: str, default: int | None = None) -> int:
        return self._typed(key, int, default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._typed(key, bool, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A float; an integer is taken as one."""
        value = self._values.get(key)
        return float(value) if type(value) is int else self._typed(key, float, default)

    def texts(self, key: str) -> list[str]:
        return self._items(key, str)

    def integers(self, key: str) -> list[int]:
        return self._items(key, int)

    def numbers(self, key: str) -> list[float]:
        return self._items(key, float)

    def _typed(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError(f"`{self._path}` has no metadata {shown(key)}", hint=OUTDATED)
        if type(value) is not kind:
            raise self._mistyped(key, f"a {kind.__name__}", f"a {type(value).__name__}")
        return value

    def _items(self, key: str, kind: type[T]) -> list[T]:
        items = self._typed(key, list)
        if any(type(item) is not kind for item in items):
            raise self._mistyped(key, f"a list of {kind.__name__}", f"a list of {type(items[0]).__name__}")
        return items

    def _mistyped(self, key: str, expected: str, found: str) -> CheckpointError:
        return CheckpointError(f"{self.at(key)} is {found}, expected {expected}", hint=OUTDATED)


@dataclass(frozen=True, slots=True)
class Record:
    """A tensor as the header lists it: dimensions fastest first, offset from the start of the file."""

    name: str
    dimensions: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: Metadata
    records: tuple[Record, ...]
    file_bytes: int


def read_header(file: BinaryIO, path: Path) -> GgufHeader:
    """The header of one file, open at its beginning. Raises CheckpointError on anything a valid file cannot have."""
    fields = _Fields(file, path)
    _check_magic(fields, path)
    record_count, entry_count = fields.number("Q"), fields.number("Q")
    fields.check_count(entry_count, LEAST_ENTRY_BYTES, "metadata entries")
    values: dict[str, Value] = {}
    for _ in range(entry_count):
        key = fields.string("a metadata key")
        if key in values:
            raise CheckpointError(f"`{path}` has metadata {shown(key)} twice", hint=DAMAGED_HINT)
        values[key] = fields.value(f"metadata {shown(key)}")
    metadata = Metadata(values, path)

    fields.check_count(record_count, LEAST_RECORD_BYTES, "tensors")
    relative = [fields.record() for _ in range(record_count)]
    alignment = metadata.integer("general.alignment", 32)
    if alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(
            f"`general.alignment` of `{path}` is {alignment}, expected a power of two",
            hint=DAMAGED_HINT,
        )
    start = -(-file.tell() // alignment) * alignment
    records = tuple(Record(item.name, item.dimensions, item.type_id, start + item.offset) for item in relative)
    return GgufHeader(metadata, records, fields.file_bytes)


def _check_magic(fields: "_Fields", path: Path) -> None:
    magic = fields.read(min(4, fields.file_bytes), "its magic")
    if magic != MAGIC:
        pointer = magic == LFS_OPENING[:4]
        found = "a git-LFS pointer, not the file it points to" if pointer else f"no GGUF file: it begins with {magic!r}"
        hint = LFS_HINT if pointer else "the input is one `.gguf` file"
        raise CheckpointError(f"`{path}` is {found}", hint=hint)
    version = fields.number("I")
    if version in VERSIONS:
        return
    big_endian = int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS
    found = "is written for big-endian machines" if big_endian else f"has GGUF version {version}"
    raise CheckpointError(f"`{path}` {found}, expected little-endian version 2 or 3", hint=OUTDATED)


class _Fields:
    """Reads a header front to back, never past the end of the file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self.file_bytes = os.fstat(file.fileno()).st_size

    def read(self, count: int, what: str) -> bytes:
        if count > self.file_bytes - self._file.tell():
            raise CheckpointError(f"`{self._path}` ends inside {what}", hint=DAMAGED_HINT)
        return self._file.read(count)

    def check_count(self, count: int, least_bytes: int, of: str) -> None:
        """Refuse a count that could not fit into the rest of the file."""
        left = self.file_bytes - self._file.tell()
        if count * least_bytes > left:
            raise CheckpointError(f"`{self._path}` announces {count} {of}, but {left} bytes follow", hint=DAMAGED_HINT)

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.read(struct.calcsize("<" + code), "its header"))[0]

    def string(self, what: str) -> str:
        data = self.read(self.number("Q"), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{what} of `{self._path}` is not UTF-8", hint=DAMAGED_HINT) from error

    def value(self, what: str) -> Value:
        type_id = self.number("I")
        if type_id == ARRAY:
            return self._array(what)
        if type_id == STRING:
            return self.string(what)
        value = self.number(self._code(type_id, what))
        # A float32 such as 1e-5 began as decimals: give back the shortest that means the same float32.
        return float(str(np.float32(value))) if SCALARS[type_id] == "f" else value

    def _array(self, what: str) -> list[Scalar]:
        type_id, count = self.number("I"), self.number("Q")
        if type_id == STRING:
            self.check_count(count, 8, f"strings in {what}")
            return [self.string(what) for _ in range(count)]
        code = self._code(type_id, what)
        size = struct.calcsize("<" + code)
        self.check_count(count, size, f"numbers in {what}")
        return list(struct.unpack(f"<{count}{code}", self.read(count * size, what)))

    def _code(self, type_id: int, what: str) -> str:
        if type_id not in SCALARS:
            raise CheckpointError(f"{what} of `{self._path}` has unknown type number {type_id}", hint=DAMAGED_HINT)
        return SCALARS[type_id]

    def record(self) -> Record:
        """One tensor record, its offset still from the start of the data."""
        name = self.string("a tensor name")
        rank = self.number("I")
        if not 1 <= rank <= MAX_DIMENSIONS:
            where = f"tensor {shown(name)} of `{self._path}`"
            raise CheckpointError(f"{where} has {rank} dimensions, expected 1 to {MAX_DIMENSIONS}", hint=DAMAGED_HINT)
        dimensions = tuple(self.number("Q") for _ in range(rank))
        return Record(name, dimensions, self.number("I"), self.number("Q"))
