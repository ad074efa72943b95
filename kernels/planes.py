"""Bit planes: the layout that the CPU kernels read.

A code of b bits is split into planes whose widths divide 32 (3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2), so that no code
straddles a word and every width is read by the same few instructions. A plane of width p is

    uint32 [out/C, in/32, 16]    C = 16/p columns to a word

and word [run, unit, lane] holds, at bits p·(2c + h) … p·(2c + h) + p - 1, the bits of row `32·unit + 16·h + lane` and
column `C·run + c`, for h = 0, 1. So 16 neighbouring words are 16 neighbouring rows of the same columns, the rows of a
strip of columns follow each other in memory, and any multiple of 32 rows and 32 columns fits without padding.

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
HUGE_PAGE = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Consecutive rows of one width, as arrays that Numba takes.

    low, high  uint32 planes; `high` is empty where the width needs one plane
    scales     float32, or float16 as uint16, [groups, out]
    zeros      uint8 [groups, out]
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
        return self.low.shape[1] * 32

    @property
    def out_features(self) -> int:
        return self.scales.shape[1]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the kernels of `multiply.py` take of it, in their order."""
        return self.low, self.high, self.scales, self.zeros, self.starts, self.offset


@dataclass(frozen=True, slots=True, eq=False)
class Planes:
    """A weight in bit planes. `rest` is the weight as stored, without its words; `order` None is the model's own."""

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
        return sum(s.low.nbytes + s.high.nbytes + s.scales.nbytes + s.zeros.nbytes for s in self.sections)


def empty_plane(width: int, rows: int, out_features: int) -> np.ndarray:
    """An uninitialised plane, uint32; of no width, an empty one."""
    if width == 0:
        return np.empty((1, 1, 0), np.uint32)
    return _in_huge_pages((out_features * width // 16, rows // 32, 16))


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
