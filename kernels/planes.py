"""Bit planes: the layout that the CPU kernels read.

A code of b bits is split into planes whose widths divide 32 (3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2), so that no code
straddles a word and every width is read by the same few instructions. A plane of width p is

    int32 [out/C, in/32, 16]    C = 16/p columns to a word

and word [run, unit, lane] holds, at bits p·(2c + h) … p·(2c + h) + p - 1, the bits of row `32·unit + 16·h + lane` and
column `C·run + c`, for h = 0, 1. So 16 neighbouring words are 16 neighbouring rows of the same columns, the rows of a
strip of columns follow each other in memory, and any multiple of 32 rows and 32 columns fits without padding.

Rows stand in the order of their groups: where a file's groups are scattered, `order` says which input feature each
row holds, and the kernels' input is gathered instead of the weight.
"""

import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.protocol import Exl2Weight, GptqWeight

# Widths of the two planes of each code; 0 is no second plane.
PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}
HUGE_PAGE = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Consecutive rows of one width.

    low, high  int32 planes; `high` is empty where the width needs one plane
    scales     float16 or float32 [groups, out]
    zeros      uint8 [groups, out]
    starts     int64 [groups + 1]: first unit of each group within the section, and the end
    offset     first unit of the section within the weight
    """

    bits: int
    low: Tensor
    high: Tensor
    scales: Tensor
    zeros: Tensor
    starts: Tensor
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Planes:
    """A weight in bit planes. `rest` is the weight as stored, without its words; `order` None is the model's own."""

    sections: tuple[Section, ...]
    order: Tensor | None
    rest: GptqWeight | Exl2Weight

    @property
    def out_features(self) -> int:
        return self.sections[0].scales.shape[1]

    @property
    def size_bytes(self) -> int:
        return sum(s.low.nbytes + s.high.nbytes + s.scales.nbytes + s.zeros.nbytes for s in self.sections)


def empty_plane(width: int, rows: int, out_features: int) -> Tensor:
    """An uninitialised plane; of no width, an empty one."""
    if width == 0:
        return torch.empty(1, 1, 0, dtype=torch.int32)
    return _in_huge_pages(out_features * width // 16, rows // 32, 16)


def _in_huge_pages(*shape: int) -> Tensor:
    """An int32 tensor in pages of 2 MiB where the system has them: one thread reads it some 40 % faster.

    The part of a page at the end stays in small pages, so that no memory is lost.
    """
    count = int(np.prod(shape))
    if count * 4 < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=torch.int32)
    memory = mmap.mmap(-1, count * 4 + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -np.frombuffer(memory, dtype=np.uint8).ctypes.data % HUGE_PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, count * 4 // HUGE_PAGE * HUGE_PAGE)
    return torch.frombuffer(memory, dtype=torch.int32, count=count, offset=start).view(*shape)
