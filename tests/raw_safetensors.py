"""Safetensors files written by hand, right or wrong: whatever header over whatever data."""

import json
from pathlib import Path
from typing import Any


def entry(start: int, stop: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    """What a header says of one tensor; one row of bytes unless told otherwise."""
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


def write(path: Path, header: dict[str, Any] | str | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """`length` is what the file says of its header, if not the truth."""
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path
