"""Safetensors headers: everything a file says about its tensors, proven before any tensor is read.

A file is `u64 n` (little-endian) · `n` bytes of JSON · data. The JSON maps each tensor name to `dtype`, `shape` and
`data_offsets` (`[start, stop)` within the data); `__metadata__` maps strings to strings. What is checked here: the
length against the file, the JSON, each dtype, each shape against its bytes, and that the tensors cover the data
from its first byte to its last without an overlap or a hole. No tensor data is touched, and no allocation follows
a number of the file that was not compared with the file's own size first.
"""

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

from quantkit.checkpoint.regular import LFS_HINT, LFS_OPENING, file_stamp, open_regular, read_at
from quantkit.errors import CheckpointError

# A header of this size names about 125 000 tensors; larger ones are refused before they are read.
MAX_HEADER_BYTES = 16 * 2**20
MAX_DIMENSIONS = 64

# Every dtype of the format, in bits; those of TORCH_DTYPES can also be read.
DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}

DAMAGED_HINT = "fetch this file again: it was cut short or damaged on its way"

PICKLE_HINT = "use a safetensors version of this model"
PAGE_HINT = "fetch this file again; the site may ask you to log in first"
# What files that are not safetensors begin with, what that is, and what to do about it.
IMPOSTORS = (
    (
        LFS_OPENING,
        "is a git-LFS pointer, not the weights it points to",
        LFS_HINT,
    ),
    (
        b"PK\x03\x04",
        "is a zip archive, as pickled PyTorch weights are: those can run code when opened and are refused",
        PICKLE_HINT,
    ),
    (b"\x80\x02", "is a Python pickle: those can run code when opened and are refused", PICKLE_HINT),
    (b"GGUF", "is a GGUF file", "run `quantkit convert gguf-to-hf IN.gguf OUT` first"),
    (b"<!DOCTYPE", "is a web page, not weights", PAGE_HINT),
    (b"<html", "is a web page, not weights", PAGE_HINT),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its dtype as the format spells it, and where its bytes are in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The validated header of one file. `stamp` tells whether the file is still the one that was validated."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]
    stamp: tuple[int, ...]


def shown(name: str) -> str:
    """A name from a file, safe to print: escaped, between backticks, not longer than a line."""
    escaped = name.encode("unicode_escape").decode("ascii")
    return f"`{escaped if len(escaped) <= 120 else escaped[:117] + '...'}`"


def read_header(path: Path) -> Header:
    """The header of one safetensors file.

    Raises CheckpointError, naming the file and the tensor, on anything a valid file cannot have.
    """
    with open_regular(path) as (descriptor, status):
        raw = _read_json_bytes(descriptor, path, status.st_size)
    data_start = 8 + len(raw)
    table = _parse(raw, path)
    metadata = _checked_metadata(table.pop("__metadata__", None), path)
    entries = {name: _checked_entry(name, said, data_start, path) for name, said in table.items()}
    _check_cover(entries, data_start, status.st_size, path)
    return Header(path, entries, metadata, file_stamp(status))


def _read_json_bytes(descriptor: int, path: Path, file_bytes: int) -> bytearray:
    opening = bytes(read_at(descriptor, 64, 0))
    size = int.from_bytes(opening[:8], "little")
    if len(opening) < 9 or size > file_bytes - 8 or not opening.startswith(b"{", 8):
        raise _no_header(path, opening, size, file_bytes)
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"`{path}` has a header of {size} bytes; at most {MAX_HEADER_BYTES} are read",
            hint="split the file into shards, or fetch it again if it should not be that large",
        )
    raw = read_at(descriptor, size, 8)
    if len(raw) < size:
        raise CheckpointError(f"`{path}` ended while its header was read", hint=DAMAGED_HINT)
    return raw


def _no_header(path: Path, opening: bytes, size: int, file_bytes: int) -> CheckpointError:
    """What a file is that cannot be safetensors. A valid one may well begin as one of these others does."""
    for prefix, what, hint in IMPOSTORS:
        if opening.startswith(prefix):
            return CheckpointError(f"`{path}` {what}", hint=hint)
    if file_bytes < 10:
        return CheckpointError(f"`{path}` holds {file_bytes} bytes, too few for a safetensors file", hint=DAMAGED_HINT)
    return CheckpointError(
        f"`{path}` is not a safetensors file, or a damaged one: its header should have {size} bytes and begin "
        f"with `{{`; after its length the file has {file_bytes - 8} bytes and begins with {opening[8:12]!r}",
        hint=DAMAGED_HINT,
    )


def parse_json(raw: bytearray) -> dict[str, Any]:
    """A JSON object that says nothing twice. Raises ValueError for anything else.

    Python takes about 70 bytes for each list or object; text that is little but brackets would take many times its
    own size, and no header or config is like that.
    """
    if raw.count(b"[") + raw.count(b"{") > len(raw) // 16 + 4096:
        raise ValueError("it consists of brackets")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"{shown(twice)} is there twice")
    return table


def _parse(raw: bytearray, path: Path) -> dict[str, Any]:
    try:
        return parse_json(raw)
    except ValueError as error:
        raise CheckpointError(f"`{path}` has a header that is not valid JSON: {error}", hint=DAMAGED_HINT) from None


def _checked_metadata(said: Any, path: Path) -> dict[str, str]:
    if said is None:
        return {}
    if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
        raise CheckpointError(f"`{path}` has a `__metadata__` that does not map strings to strings", hint=DAMAGED_HINT)
    return said


def _checked_entry(name: str, said: Any, data_start: int, path: Path) -> Entry:
    def refuse(why: str) -> NoReturn:
        raise CheckpointError(f"tensor {shown(name)} in `{path}` {why}", hint=DAMAGED_HINT)

    if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
        refuse("has a name that is not valid Unicode")
    if not isinstance(said, dict) or not {"dtype", "shape", "data_offsets"} <= said.keys():
        refuse("must have `dtype`, `shape` and `data_offsets`")
    dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        refuse(f"has the unknown dtype {shown(str(dtype))}")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        refuse(f"has the shape {_brief(shape)}; a list of at most {MAX_DIMENSIONS} sizes is expected")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(f"has the data offsets {_brief(offsets)}; `[start, stop]` is expected")
    start, stop = offsets
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (stop - start):
        needed = f"which needs {bits // 8} bytes" if bits < 2**63 else "which no file can hold"
        refuse(f"has {dtype} of shape {_brief(shape)}, {needed}, and {stop - start} bytes of data")
    return Entry(dtype, tuple(shape), data_start + start, stop - start)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _brief(value: Any) -> str:
    """A value of any size, in a line."""
    return shown(str(value[:9] if isinstance(value, list) else value))


def _check_cover(entries: dict[str, Entry], data_start: int, file_bytes: int, path: Path) -> None:
    """Sorted by place, each tensor begins where the one before it ends, and the last ends with the file."""
    reached, before = data_start, None
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size_bytes)):
        if entry.start != reached:
            fault = "overlaps" if entry.start < reached else "leaves a hole after"
            what = "the header" if before is None else shown(before)
            raise CheckpointError(f"tensor {shown(name)} in `{path}` {fault} {what}", hint=DAMAGED_HINT)
        reached, before = entry.start + entry.size_bytes, name
        if reached > file_bytes:
            raise CheckpointError(
                f"`{path}` is cut short: tensor {shown(name)} ends at byte {reached}, the file at byte {file_bytes}",
                hint=DAMAGED_HINT,
            )
    if reached < file_bytes:
        raise CheckpointError(
            f"`{path}` has {file_bytes - reached} bytes after its last tensor that belong to none", hint=DAMAGED_HINT
        )
