"""What a decode step on the CPU needs besides integer products, as operations of a `Program`: `Steps` in float32.

Activations stay float32 from one operation to the next and are rounded nowhere but in the pages of the cache and where
integer products begin; a step of `ReferenceSteps` rounds to halves between its operations. Rows and heads are shared
out over the threads, and every sum runs in an order of its own row, so that neither threads nor batch change a bit.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic, register_jitable

from quantkit.kernels.program import operation, pointer

PAGE = 256
# Sums may be taken in any order that the compiler chooses, the same for all rows.
REORDERED = {"fastmath": {"contract", "reassoc", "nsz"}}
LANES = 16


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


@intrinsic
def power_of_two(typing, exponent):  # type: ignore[no-untyped-def]
    """float32 2^exponent of a whole float32 from -126 to 127."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        word = ir.IntType(32)
        return b.bitcast(b.shl(b.add(b.fptosi(args[0], word), word(127)), word(23)), ir.FloatType())

    return types.float32(types.float32), emit


@register_jitable
def exponential(x):  # type: ignore[no-untyped-def]
    """exp(x) in float32 to about 2^-22, held to 2^±126: 2^n · 2^f, n whole, |f| <= 1/2, 2^f by its Taylor series."""
    t = x * np.float32(1.4426950408889634)
    t = min(max(t, np.float32(-126)), np.float32(126))
    n = np.rint(t)
    f = (t - n) * np.float32(0.6931471805599453)
    p = np.float32(1 / 720)
    p = p * f + np.float32(1 / 120)
    p = p * f + np.float32(1 / 24)
    p = p * f + np.float32(1 / 6)
    p = p * f + np.float32(0.5)
    p = p * f + np.float32(1)
    p = p * f + np.float32(1)
    return p * power_of_two(n)


@register_jitable
def normalised(values, weight, epsilon, out):  # type: ignore[no-untyped-def]
    """`values / rms(values) · weight`, float32 [width]."""
    squares = np.float32(0)
    for k in range(values.size):
        squares += values[k] * values[k]
    inverse = np.float32(1) / np.sqrt(squares / np.float32(values.size) + epsilon)
    for k in range(values.size):
        out[k] = values[k] * inverse * weight[k]


@cache
def rms_norm() -> Any:
    """Adds update to hidden, and normalises it; rows are shared out.

    Operands: hidden float32 [m, width], update alike or 0, weight float32 [width], epsilon float32 [1], y float32
    [m, width], m, width.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = carray(pointer(arguments), 7, np.int64)
        m, width = a[5], a[6]
        hidden, update = carray(pointer(a[0]), (m, width), np.float32), carray(pointer(a[1]), (m, width), np.float32)
        weight, epsilon = carray(pointer(a[2]), width, np.float32), carray(pointer(a[3]), 1, np.float32)[0]
        y = carray(pointer(a[4]), (m, width), np.float32)
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
        a = carray(pointer(arguments), 4, np.int64)
        m, width = a[2], a[3]
        both, y = carray(pointer(a[0]), (m, 2 * width), np.float32), carray(pointer(a[1]), (m, width), np.float32)
        first, last = width * thread // threads, width * (thread + 1) // threads
        for row in range(m):
            gate, up, out = both[row, first:last], both[row, width + first : width + last], y[row, first:last]
            for k in range(last - first):
                out[k] = gate[k] * up[k] / (np.float32(1) + exponential(-gate[k]))

    return operation(kernel)


@cache
def rope_append() -> Any:
    """Normalises heads where the model does, rotates queries and keys, stores keys and values; heads are shared out.

    Operands: qkv float32 [m, (heads + 2·kv_heads)·dim], rotated in place; cos, sin float32 [m, pairs]; weights float32
    [dim] of the norms of q and k or 0, their epsilon float32 [1]; slots int64 [m]; pages of keys and of values in
    bfloat16; elements from a page to the next of keys, of values, from a head to the next of keys, of values; m, heads,
    kv_heads, dim, pairs.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = carray(pointer(arguments), 18, np.int64)
        m, heads, kv_heads, dim, pairs = a[13], a[14], a[15], a[16], a[17]
        each = heads + 2 * kv_heads
        qkv = carray(pointer(a[0]), (m, each, dim), np.float32)
        cos, sin = carray(pointer(a[1]), (m, pairs), np.float32), carray(pointer(a[2]), (m, pairs), np.float32)
        epsilon = carray(pointer(a[5]), 1, np.float32)[0]
        slots = carray(pointer(a[6]), m, np.int64)
        for job in range(m * each * thread // threads, m * each * (thread + 1) // threads):
            row, head = job // each, job % each
            values = qkv[row, head]
            if head < heads + kv_heads:
                weight = a[3] if head < heads else a[4]
                if weight:
                    normalised(values, carray(pointer(weight), dim, np.float32), epsilon, values)
                for i in range(pairs):
                    one, other = values[i], values[i + pairs]
                    values[i] = one * cos[row, i] - other * sin[row, i]
                    values[i + pairs] = other * cos[row, i] + one * sin[row, i]
            if head >= heads:
                side = (head - heads) // kv_heads
                place = slots[row] // PAGE * a[9 + side] + (head - heads) % kv_heads * a[11 + side]
                place += slots[row] % PAGE * dim
                stored = carray(pointer(a[7 + side] + 2 * place), dim, np.uint16)
                for k in range(dim):
                    stored[k] = narrow(values[k])

    return operation(kernel)


@cache
def attend() -> Any:
    """One new token of each row over its whole past, itself included; heads of rows are shared out.

    Operands: qkv as `rope_append` leaves it; y float32 [m, heads·dim]; pages and their distances as there; table int32
    [m, most], lengths int32 [m]; scratch float32 [threads at most, most·256]; scale float32 [1]; window, 0 for none; m,
    heads, kv_heads, dim, most.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = carray(pointer(arguments), 18, np.int64)
        m, heads, kv_heads, dim, most = a[13], a[14], a[15], a[16], a[17]
        qkv = carray(pointer(a[0]), (m, heads + 2 * kv_heads, dim), np.float32)
        y = carray(pointer(a[1]), (m, heads, dim), np.float32)
        table, lengths = carray(pointer(a[8]), (m, most), np.int32), carray(pointer(a[9]), m, np.int32)
        scores = carray(pointer(a[10] + 4 * thread * most * PAGE), most * PAGE, np.float32)
        scale = carray(pointer(a[11]), 1, np.float32)[0]
        for job in range(m * heads * thread // threads, m * heads * (thread + 1) // threads):
            row, head = job // heads, job % heads
            group, query, length = head // (heads // kv_heads), qkv[row, head], np.int64(lengths[row])
            start = max(0, length - a[12]) if a[12] else 0
            top = np.float32(-np.inf)
            for first in range(start // PAGE * PAGE, length, PAGE):
                place = table[row, first // PAGE] * a[4] + group * a[6]
                keys = carray(pointer(a[2] + 2 * place), (PAGE, dim), np.uint16)
                for position in range(max(start, first), min(first + PAGE, length)):
                    key, score = keys[position - first], np.float32(0)
                    for k in range(dim):
                        score += query[k] * wide(key[k])
                    score *= scale
                    scores[position] = score
                    top = max(top, score)
            total, wrong = np.float32(0), np.float32(0)
            for position in range(start, length):
                wrong += scores[position] * np.float32(0)
                scores[position] = exponential(scores[position] - top)
                total += scores[position]
            mixed = y[row, head]
            for k in range(dim):
                mixed[k] = 0
            for first in range(start // PAGE * PAGE, length, PAGE):
                place = table[row, first // PAGE] * a[5] + group * a[7]
                values = carray(pointer(a[3] + 2 * place), (PAGE, dim), np.uint16)
                for position in range(max(start, first), min(first + PAGE, length)):
                    share, value = scores[position], values[position - first]
                    for k in range(dim):
                        mixed[k] += share * wide(value[k])
            for k in range(dim):
                mixed[k] = mixed[k] / total + wrong

    return operation(kernel, **REORDERED)


@cache
def dense_product() -> Any:
    """`y = x · weightᵀ + bias`; outputs are shared out.

    Operands: x float32 [m, width], weight bfloat16 [out, width of it], bias float32 [out] or 0, y float32 [m, total],
    first column of y, m, width of x, width, out, total.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = carray(pointer(arguments), 10, np.int64)
        m, width, out = a[5], a[7], a[8]
        x, weight = carray(pointer(a[0]), (m, a[6]), np.float32), carray(pointer(a[1]), (out, width), np.uint16)
        bias, y = carray(pointer(a[2]), out, np.float32), carray(pointer(a[3]), (m, a[9]), np.float32)
        for column in range(out * thread // threads, out * (thread + 1) // threads):
            weights = weight[column]
            for row in range(m):
                values, total = x[row], np.float32(0)
                for k in range(width):
                    total += values[k] * wide(weights[k])
                y[row, a[4] + column] = total + bias[column] if a[2] else total

    return operation(kernel, **REORDERED)
