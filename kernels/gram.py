"""Products of bfloat16 rows with themselves on the CPU, as operations of a `Program`: x^T diag(f²) x, in float32.

    add(total, rows, factors, threads=2)          # [n, n] += [m, n], [m]

Two neighbouring tokens stand side by side in words (`pairs.py`), in strips of 32 columns, so that the columns of one
strip and those of another come from the same words. Only tiles on and above the diagonal are multiplied. Every sum of
a call runs over its tokens in order, whoever adds it: threads change no bit.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.lanes import LANES, vectors
from quantkit.kernels.operations import narrow, wide
from quantkit.kernels.pairs import ACROSS, TILE, add_pairs, keep
from quantkit.kernels.program import Program, operation
from quantkit.kernels.views import array_at, smaller


def add(total: Tensor, rows: Tensor, factors: Tensor, *, threads: int) -> None:
    """total float32 [n, n], rows bfloat16 [m, n], factors float32 [m]: entries on and above the diagonal grow by the
    sums of factor² · x · x, of rows times their factors rounded to bfloat16. Some of those below change too."""
    (tokens, features), pairs = rows.shape, -(-len(rows) // 2)
    assert total.shape == (features, features) and factors.shape == (tokens,)
    assert (total.dtype, rows.dtype, factors.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    words = torch.empty(-(-features // ACROSS), pairs, ACROSS, dtype=torch.int32)
    tiles = torch.empty(threads, TILE, ACROSS)
    program = Program()
    program.add(lay(), (rows.contiguous(), factors, words, tokens, features))
    program.add(multiply(), (words, total, tiles, pairs, features))
    program.run(threads)


@cache
def lay() -> Any:
    """The operation that scales rows and lays them out in words; pairs of tokens are shared out.

    Operands: rows bfloat16 [m, n], factors float32 [m], words int32 [⌈n/32⌉, ⌈m/2⌉, 32], m, n. Zeros are where there is
    no column, and beside a last token that is alone.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = array_at(arguments, 5, np.int64)
        tokens, features = a[3], a[4]
        pairs, strips = (tokens + 1) // 2, (features + ACROSS - 1) // ACROSS
        factors = array_at(a[1], tokens, np.float32)
        for pair in range(pairs * thread // threads, pairs * (thread + 1) // threads):
            even, odd = 2 * pair, smaller(2 * pair + 1, tokens - 1)
            one = factors[even]
            other = factors[odd] if odd > even else np.float32(0)
            for strip in range(strips):
                first = strip * ACROSS
                count = smaller(ACROSS, features - first)
                here = array_at(a[0] + 2 * (even * features + first), count, np.uint16)
                beside = array_at(a[0] + 2 * (odd * features + first), count, np.uint16)
                word = array_at(a[2] + 4 * (strip * pairs + pair) * ACROSS, ACROSS, np.uint32)
                for c in range(count):
                    low = np.uint32(narrow(wide(here[c]) * one))
                    word[c] = low | np.uint32(narrow(wide(beside[c]) * other)) << np.uint32(16)
                for c in range(count, ACROSS):
                    word[c] = 0

    return operation(kernel)


@cache
def multiply() -> Any:
    """The operation that multiplies words; tiles of 32 times 32 sums are shared out.

    Operands: words int32 [⌈n/32⌉, pairs, 32], total float32 [n, n], scratch float32 [threads, 8, 32], pairs, n.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = array_at(arguments, 5, np.int64)
        pairs, features = a[3], a[4]
        strips = (features + ACROSS - 1) // ACROSS
        tile_at = a[2] + 4 * thread * TILE * ACROSS
        number = 0
        for down in range(strips):
            for across in range(down, strips):
                number += 1
                if number % threads != thread:
                    continue
                beside = a[0] + 4 * across * pairs * ACROSS
                first = across * ACROSS
                width = smaller(ACROSS, features - first)
                for row in range(down * ACROSS, smaller((down + 1) * ACROSS, features), TILE):
                    own = a[0] + 4 * (down * pairs * ACROSS + row - down * ACROSS)
                    sums = vectors(16)
                    for pair in range(pairs):
                        at = 4 * pair * ACROSS
                        sums = add_pairs(sums, own + at, 4, beside + at, 4 * LANES)
                    keep(sums, tile_at, 4 * ACROSS)
                    for r in range(smaller(TILE, features - row)):
                        total = array_at(a[1] + 4 * ((row + r) * features + first), width, np.float32)
                        tile = array_at(tile_at + 4 * r * ACROSS, width, np.float32)
                        for c in range(width):
                            total[c] += tile[c]

    return operation(kernel)
