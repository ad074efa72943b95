"""What a decode step on the CPU needs besides integer products, as operations of a `Program`: `Steps` in float32.

Activations stay float32 from one operation to the next and are rounded nowhere but in the pages of the cache and where
integer products begin; a step of `ReferenceSteps` rounds to halves between its operations. Rows and heads are shared
out over the threads, and every sum runs in an order of its own row, so that neither threads nor batch change a bit.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from quantkit.kernels.program import operation
from quantkit.kernels.views import array_at, exponential

# Sums may be taken in any order that the compiler chooses, the same for all rows.
REORDERED = {"fastmath": {"contract", "reassoc", "nsz"}}


@intrinsic
def wide(typing, half):  # type: ignore[no-untyped-def]
    """bfloat16 bits, uint16 → float32."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        word = b.zext(args[0], ir.IntType(32))
        return b.bitcast(b.shl(word, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(types.uint16), emit


@intrinsic
def narrow(typing, value):  # type: ignore[no-untyped-def]
    """float32 → the bits of the nearest bfloat16, uint16, ties to even; NaN stays NaN."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        word, number = ir.IntType(32), args[0]
        bits = b.bitcast(number, word)
        odd = b.and_(b.lshr(bits, word(16)), word(1))
        rounded = b.add(bits, b.add(odd, word(0x7FFF)))
        is_nan = b.fcmp_unordered("uno", number, number)
        return b.trunc(b.lshr(b.select(is_nan, b.or_(bits, word(0x400000)), rounded), word(16)), ir.IntType(16))

    return types.uint16(types.float32), emit


@register_jitable
def normalised(values, weight, epsilon, out):  # type: ignore[no-untyped-def]
    """`values / rms(values) · weight`, float32 [width]."""
    squares = np.float32(0)
    for k in range(values.size):
        squares += values[k] * values[k]
    inverse = np.float32(1) / math.sqrt(squares / np.float32(values.size) + epsilon)
    for k in range(values.size):
        out[k] = values[k] * inverse * weight[k]


@cache
def rms_norm() -> Any:
    """Adds update to hidden, and normalises it; rows are shared out.

    Operands: hidden float32 [m, width], update alike or 0, weight float32 [width], epsilon float32 [1], y float32
    [m, width], m, width.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = array_at(arguments, 7, np.int64)
        m, width = a[5], a[6]
        hidden, update = array_at(a[0], (m, width), np.float32), array_at(a[1], (m, width), np.float32)
        weight, epsilon = array_at(a[2], width, np.float32), array_at(a[3], 1, np.float32)[0]
        y = array_at(a[4], (m, width), np.float32)
        for row in range(thread, m, threads):
            values = hidden[row]
            if a[1]:
                for k in range(width):
                    values[k] += update[row, k]
            normalised(values, weight, epsilon, y[row])

    return operation(kernel, **REORDERED)


@cache
def silu_mul() -> Any:
    """`y = gate · sigmoid(gate) · up`, columns are shared out.

    Operands: gate and up side by side float32 [m, 2·width], y float32 [m, width], m, width.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = array_at(arguments, 4, np.int64)
        m, width = a[2], a[3]
        both, y = array_at(a[0], (m, 2 * width), np.float32), array_at(a[1], (m, width), np.float32)
        first, last = width * thread // threads, width * (thread + 1) // threads
        for row in range(m):
            gate, up, out = both[row, first:last], both[row, width + first : width + last], y[row, first:last]
            for k in range(last - first):
                out[k] = gate[k] * up[k] / (np.float32(1) + exponential(-gate[k]))

    return operation(kernel)


@cache
def dense_product() -> Any:
    """`y = x · weightᵀ + bias`; outputs are shared out.

    Operands: x float32 [m, width], weight bfloat16 [out, width of it], bias float32 [out] or 0, y float32 [m, total],
    first column of y, m, width of x, width, out, total.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = array_at(arguments, 10, np.int64)
        m, width, out = a[5], a[7], a[8]
        x, weight = array_at(a[0], (m, a[6]), np.float32), array_at(a[1], (out, width), np.uint16)
        bias, y = array_at(a[2], out, np.float32), array_at(a[3], (m, a[9]), np.float32)
        for column in range(out * thread // threads, out * (thread + 1) // threads):
            weights = weight[column]
            for row in range(m):
                values, total = x[row], np.float32(0)
                for k in range(width):
                    total += values[k] * wide(weights[k])
                y[row, a[4] + column] = total + bias[column] if a[2] else total

    return operation(kernel, **REORDERED)
