"""CacheFormat: how keys and values are written down in the cache, and what that takes, to the byte.

    form = cache_format("k8v4", config.head_dim, compute=torch.float32)
    stored = form.keys.encode(heads)                # heads [kv_heads, n, head_dim]
    form.keys.decode(stored, torch.float32)         # what attention sees

Quantized rows are those of `kernels.steps`: codes, and a float16 scale for each 32 of them. Where a side is rotated, a
normalised Hadamard matrix spreads outliers over the row before it is rounded: queries are turned like keys, which
leaves scores as they are, and what attention mixes of turned values is turned back. (Ashkboos et al. 2024, QuaRot,
section 4)

Errors of keys cost several times what errors of values do: they move what a query looks at. So `int8` gives a key a
ninth bit, which halves its error and takes a sixteenth of a key and value.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.errors import RequestError, UsageError
from quantkit.kernels.steps import GROUP, decode, encode, row_width
from quantkit.memory import KV_FORMATS
from quantkit.models.rotation import hadamard


class Rows(NamedTuple):
    """Stored rows of several heads: codes `[kv_heads, n, width]`, float16 scales `[kv_heads, n, groups]` or None."""

    codes: Tensor
    scales: Tensor | None

    def cut(self, start: int, count: int) -> "Rows":
        """`count` rows from `start` on, without a copy."""
        scales = self.scales
        if not start and count == self.codes.shape[1]:
            return self
        return Rows(self.codes.narrow(1, start, count), None if scales is None else scales.narrow(1, start, count))

    @classmethod
    def join(cls, parts: "Many[Rows]") -> "Rows":
        scales = [part.scales for part in parts if part.scales is not None]
        return cls(torch.cat([part.codes for part in parts], dim=1), torch.cat(scales, dim=1) if scales else None)

    def to(self, device: torch.device) -> "Rows":
        return Rows(self.codes.to(device), None if self.scales is None else self.scales.to(device))


@dataclass(frozen=True, slots=True)
class Side:
    """Keys, or values. bits 9, 8 and 4 are codes; with 16 and 32 numbers stand there as they are, in `dtype`."""

    head_dim: int
    bits: int
    dtype: torch.dtype
    rotated: bool

    @property
    def width(self) -> int:
        """Elements of a stored row."""
        return row_width(self.head_dim, self.bits) if self.bits < 16 else self.head_dim

    @property
    def groups(self) -> int:
        """Scales of a stored row."""
        return -(-self.head_dim // GROUP) if self.bits < 16 else 0

    @property
    def block(self) -> int:
        """Neighbours of a row that the rotation mixes; 1 where there is none."""
        return _block(self.head_dim) if self.rotated else 1

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize + 2 * self.groups

    def turn(self, heads: Tensor) -> Tensor:
        """`[…, head_dim]` in the base of this side, in the same dtype. The rotation is its own inverse."""
        if not self.rotated:
            return heads
        matrix = _rotation(_block(self.head_dim), heads.device)
        wide = heads.to(torch.float32).unflatten(-1, (-1, matrix.shape[0]))
        return (wide @ matrix).flatten(-2).to(heads.dtype)

    def encode(self, heads: Tensor) -> Rows:
        """Rows `[kv_heads, n, head_dim]` of this base as they are stored."""
        return Rows(*encode(heads, self.bits)) if self.groups else Rows(heads.to(self.dtype), None)

    def decode(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """`[kv_heads, n, head_dim]` in `dtype`; the stored numbers themselves where they have it."""
        if rows.scales is None:
            return rows.codes.to(dtype)
        return decode(rows.codes, rows.scales, self.bits, dtype)


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """A format by name, and what it does to keys and to values."""

    name: str
    keys: Side
    values: Side

    @property
    def row_bytes(self) -> int:
        """Key and value of one position in one head of one layer."""
        return self.keys.row_bytes + self.values.row_bytes


def cache_format(name: str | None, head_dim: int, compute: torch.dtype) -> CacheFormat:
    """The format called `name`; None keeps numbers in `compute`, the dtype of the multiplications.

    Raises UsageError for a name that there is not, RequestError for heads that the format cannot hold.
    """
    if name is None:
        side = Side(head_dim, 8 * compute.itemsize, compute, rotated=False)
        return CacheFormat({torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[compute], side, side)
    if name not in KV_FORMATS:
        raise UsageError(
            f"there is no cache format `{name}`, expected one of {', '.join(KV_FORMATS)}", hint="--kv int8"
        )
    kv = KV_FORMATS[name]
    if min(kv.key_bits, kv.value_bits) == 4 and head_dim % 2:
        raise RequestError(
            f"cache format `{name}` packs two values in a byte, and heads of {head_dim} are odd", hint="--kv int8"
        )
    return CacheFormat(name, *(_side(head_dim, bits) for bits in (kv.key_bits, kv.value_bits)))


def require_distinct(names: Many[str | None]) -> None:
    """Raises UsageError where a format is asked for twice: it would be measured twice."""
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise UsageError(
            f"`--kv` names the cache format `{twice}` twice",
            hint=f"--kv {','.join(dict.fromkeys(str(name) for name in names))}",
        )


def _side(head_dim: int, bits: int) -> Side:
    if bits == 16:
        return Side(head_dim, 16, torch.float16, rotated=False)
    return Side(head_dim, bits, torch.uint8, rotated=_block(head_dim) >= 8)


def _block(head_dim: int) -> int:
    """The largest power of two that divides a head: the size of the Hadamard matrix that turns it."""
    return head_dim & -head_dim


@cache
def _rotation(size: int, device: torch.device) -> Tensor:
    """A Hadamard matrix in float32: symmetric, and its own inverse."""
    return hadamard(size).to(device, torch.float32)
