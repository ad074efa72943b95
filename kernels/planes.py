"""Bit planes: the layout that the CPU kernels read.

A code of b bits is split into planes whose widths divide 8 (3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2), so that no code straddles
a byte and every width is read by the same few instructions. A plane of width p is

    uint32 [out/16, in/32, p, 16]

and byte n of word [strip, unit, j, lane] holds, at bits p·s … p·s + p - 1, the bits of column `16·strip + lane` and row
`32·unit + 4·(j·8/p + s) + n`. So 16 neighbouring words are 16 neighbouring columns, one shift and one mask give four
rows of each, a byte for every code, which is what an instruction for products of bytes takes; and the rows of a strip
follow each other in memory.

Rows stand in the order of their groups: where a file's groups are scattered, `order` says which input feature each
row holds, and the kernels' input is gathered instead of the weight.
"""

import math
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from quantkit.kernels.protocol import Exl2Weight, GptqWeight

# Widths of the two planes of each code; 0 is no second plane.
PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}
STRIP, UNIT = 16, 32
HUGE_PAGE = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Consecutive rows of one width, as arrays that Numba takes.

    low, high  uint32 planes; `high` is empty where the width needs one plane
    scales     float32, or float16 as uint16, [strips, groups, 16]
    zeros      uint8, alike; or [1, 1, 16] where all zero points are the same
    starts     int64 [groups + 1]: first unit (32 rows) of each group within the section, and the end
    offset     first unit of the section within the weight
    """

    bits: int
    low: np.ndarray
    high: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    starts: np.ndarray
    offset: int

    @property
    def rows(self) -> int:
        return self.low.shape[1] * UNIT

    @property
    def out_features(self) -> int:
        return self.scales.shape[0] * STRIP

    @property
    def size_bytes(self) -> int:
        return self.low.nbytes + self.high.nbytes + self.scales.nbytes + self.zeros.nbytes

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What `multiply.float_dot` takes of it, in its order."""
        return self.low, self.high, self.scales, self.zeros, self.starts, self.offset

    @property
    def scale_bits(self) -> int:
        """16 or 32."""
        return 8 * self.scales.itemsize

    @property
    def operands(self) -> tuple[np.ndarray | int, ...]:
        """What the operations of `multiply.py` take of it, in their order."""
        strips, units, groups = *self.low.shape[:2], self.scales.shape[1]
        common = int(self.zeros.shape[:2] == (1, 1))
        planes = self.low, self.high, self.scales, self.zeros
        return *planes, strips, units, groups, common, self.starts, self.offset


@dataclass(frozen=True, slots=True, eq=False)
class Planes:
    """A weight in bit planes. `rest` is the weight as stored, without what the sections have of it; `order` None is the
    model's own."""

    sections: tuple[Section, ...]
    order: Tensor | None
    rest: GptqWeight | Exl2Weight

    @property
    def in_features(self) -> int:
        return sum(section.rows for section in self.sections)

    @property
    def out_features(self) -> int:
        return self.sections[0].out_features

    @property
    def size_bytes(self) -> int:
        return sum(section.size_bytes for section in self.sections)


def empty_plane(width: int, rows: int, out_features: int) -> np.ndarray:
    """An uninitialised plane, uint32; of no width, an empty one."""
    if width == 0:
        return np.empty((1, 1, 0, STRIP), np.uint32)
    return _in_huge_pages((out_features // STRIP, rows // UNIT, width, STRIP))


def by_strip(values: Tensor) -> Tensor:
    """[groups, out] → [strips, groups, 16], contiguous."""
    return values.view(len(values), -1, STRIP).transpose(0, 1).contiguous()


def by_group(values: Tensor) -> Tensor:
    """The inverse of `by_strip`."""
    return values.transpose(0, 1).flatten(1).contiguous()


def zeros_by_strip(zeros: Tensor) -> Tensor:
    """uint8 [groups, out] → what `Section.zeros` is."""
    first = zeros.flatten()[:1]
    if bool((zeros == first).all()):
        return first.expand(1, 1, STRIP).contiguous()
    return by_strip(zeros)


def zeros_by_group(zeros: Tensor, groups: int, out_features: int) -> Tensor:
    """The inverse of `zeros_by_strip`."""
    return by_group(zeros.expand(out_features // STRIP, groups, STRIP))


def _in_huge_pages(shape: tuple[int, ...]) -> np.ndarray:
    """An uninitialised uint32 array in pages of 2 MiB where the system has them, for fewer translations of addresses.

    The part of a page at the end stays in small pages, so that no memory is lost.
    """
    size_bytes = 4 * math.prod(shape)
    if size_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(shape, np.uint32)
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, size_bytes // HUGE_PAGE * HUGE_PAGE)
    return np.ndarray(shape, np.uint32, memory, start)
