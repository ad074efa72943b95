"""Products of pairs of bfloat16: what `vdpbf16ps` (AVX-512 BF16) adds to each of 16 float32 in one instruction.

A word of 32 bits holds two bfloat16 that are neighbours in the sum: elements of a head, positions, tokens.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quantkit.kernels.jit import targets
from quantkit.kernels.lanes import FLOAT, I32, I64, LANES, broadcast, call, element, vector_of

HAS_PAIR_PRODUCTS = targets("avx512bf16")
# Sums in registers: eight rows times two vectors.
TILE, ACROSS = 8, 2 * LANES


@intrinsic
def add_pairs(typing, total, rows, apart, words, beside):  # type: ignore[no-untyped-def]
    """Adds products of one pair of bfloat16 in each of eight rows with those in two vectors of words to 16 sums, two
    for each row. By address: the pair of the first row, bytes to that of the next, the first vector, bytes to the
    other."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        sums, kind = cgutils.unpack_tuple(b, args[0]), vector_of(FLOAT)
        both = [b.load(element(b, at, vector_of(I32)), align=4) for at in (args[3], b.add(args[3], args[4]))]
        for row in range(TILE):
            pair = b.load(element(b, b.add(args[1], b.mul(args[2], I64(row))), I32), align=4)
            for side, word in enumerate(both):
                operands = [sums[2 * row + side], broadcast(b, pair), word]
                sums[2 * row + side] = call(b, "llvm.x86.avx512bf16.dpbf16ps.512", kind, operands)
        return context.make_tuple(b, signature.args[0], sums)

    return total(total, types.int64, types.int64, types.int64, types.int64), emit


@intrinsic
def keep(typing, total, target, apart):  # type: ignore[no-untyped-def]
    """Stores two vectors in each of eight rows, `apart` bytes from one to the next."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        for index, vector in enumerate(cgutils.unpack_tuple(b, args[0])):
            row = b.add(args[1], b.mul(args[2], I64(index // 2)))
            b.store(vector, element(b, row, vector.type, index % 2), align=4)
        return context.get_dummy_value()

    return types.none(total, types.int64, types.int64), emit
