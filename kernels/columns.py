"""CPU kernels whose vector lanes are output columns: packing, dequantizing, rounding.

They are plain loops over rows, with an innermost loop over columns that LLVM turns into vector instructions. Every
kernel takes the columns first … last - 1, so that threads share the work. Words and codes stay 32 bits wide through
small intrinsics, where plain Numba would widen them to 64 and halve the speed.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from quantkit.kernels.jit import compiled
from quantkit.kernels.views import room

# Columns whose running sums and errors stay in the nearest cache.
PANEL = 64


@intrinsic
def shift_left(typing, word, count):  # type: ignore[no-untyped-def]
    """uint32 << count, in 32 bits."""
    return types.uint32(types.uint32, types.uint32), lambda context, b, signature, args: b.shl(*args)


@intrinsic
def shift_right(typing, word, count):  # type: ignore[no-untyped-def]
    """uint32 >> count, in 32 bits."""
    return types.uint32(types.uint32, types.uint32), lambda context, b, signature, args: b.lshr(*args)


@intrinsic
def either(typing, a, b):  # type: ignore[no-untyped-def]
    """uint32 | uint32, in 32 bits."""
    return types.uint32(types.uint32, types.uint32), lambda context, b, signature, args: b.or_(*args)


@intrinsic
def masked(typing, word, mask):  # type: ignore[no-untyped-def]
    """uint32 & uint32, in 32 bits."""
    return types.uint32(types.uint32, types.uint32), lambda context, b, signature, args: b.and_(*args)


@intrinsic
def nearest(typing, value):  # type: ignore[no-untyped-def]
    """float32 → the nearest whole number, ties to even."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return b.call(b.module.declare_intrinsic("llvm.rint", [ir.FloatType()]), args)

    return types.float32(types.float32), emit


@intrinsic
def half_bits(typing, value):  # type: ignore[no-untyped-def]
    """float32 → the bits of the nearest float16, uint16."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return b.bitcast(b.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), emit


@intrinsic
def as_float(typing, value):  # type: ignore[no-untyped-def]
    """float16 bits (uint16) or float32 → float32."""
    if value == types.float32:
        return types.float32(value), lambda context, b, signature, args: args[0]
    if value != types.uint16:
        raise TypingError("scales are float32, or float16 seen as uint16")

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return b.fpext(b.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(value), emit


@compiled
def pack(first, last, codes, bits, unit_codes, unit_words, words):  # type: ignore[no-untyped-def]
    """uint8 [in, out] → uint32 [in·bits/32, out]."""
    for word in range(words.shape[0]):
        line = words[word, first:last]
        for n in range(line.size):
            line[n] = 0
    for row in range(codes.shape[0]):
        unit, k = divmod(row, unit_codes)
        word, shift = unit * unit_words + k * bits // 32, k * bits % 32
        code, low = codes[row, first:last], words[word, first:last]
        for n in range(code.size):
            low[n] = either(low[n], shift_left(code[n], shift))
        if shift + bits > 32:
            high = words[word + 1, first:last]
            for n in range(code.size):
                high[n] = either(high[n], shift_right(code[n], 32 - shift))


@compiled
def unpack(first, last, words, bits, unit_codes, unit_words, codes):  # type: ignore[no-untyped-def]
    """uint32 [in·bits/32, out] → uint8 [in, out]."""
    mask = (1 << bits) - 1
    for row in range(codes.shape[0]):
        unit, k = divmod(row, unit_codes)
        word, shift = unit * unit_words + k * bits // 32, k * bits % 32
        code, low = codes[row, first:last], words[word, first:last]
        if shift + bits <= 32:
            for n in range(code.size):
                code[n] = masked(shift_right(low[n], shift), mask)
        else:
            high = words[word + 1, first:last]
            for n in range(code.size):
                code[n] = masked(either(shift_right(low[n], shift), shift_left(high[n], 32 - shift)), mask)


@compiled
def dequantize(first, last, words, bits, unit_codes, unit_words, scales, zeros, group, place, out):  # type: ignore[no-untyped-def]
    """Rows of one width, uint32 words → float16 bits `out[place[row]]`, with scales and zeros of `group[row]`."""
    mask = (1 << bits) - 1
    codes = np.empty(last - first, np.uint32)
    for row in range(group.size):
        unit, k = divmod(row, unit_codes)
        word, shift = unit * unit_words + k * bits // 32, k * bits % 32
        low = words[word, first:last]
        for n in range(codes.size):
            codes[n] = shift_right(low[n], shift)
        if shift + bits > 32:
            high = words[word + 1, first:last]
            for n in range(codes.size):
                codes[n] = either(codes[n], shift_left(high[n], 32 - shift))
        scale, zero = scales[group[row], first:last], zeros[group[row], first:last]
        weight = out[place[row], first:last]
        for n in range(codes.size):
            step = np.float32(masked(codes[n], mask)) - np.float32(zero[n])
            weight[n] = half_bits(step * as_float(scale[n]))


@compiled
def split(first, last, codes, below, plane):  # type: ignore[no-untyped-def]
    """Bits `below …` of uint8 codes [in, out] → strips first … last - 1 of a plane (`planes.py`)."""
    width = plane.shape[2]
    mask, each = (1 << width) - 1, 8 // width
    words = room(16, np.uint32)
    for strip in range(first, last):
        for unit in range(plane.shape[1]):
            for word in range(width):
                for lane in range(16):
                    words[lane] = 0
                for k in range(4 * each):
                    row, shift = 32 * unit + 4 * each * word + k, 8 * (k % 4) + width * (k // 4)
                    for lane in range(16):
                        part = masked(shift_right(codes[row, 16 * strip + lane], below), mask)
                        words[lane] = either(words[lane], shift_left(part, shift))
                for lane in range(16):
                    plane[strip, unit, word, lane] = words[lane]


@compiled
def join(first, last, plane, below, codes):  # type: ignore[no-untyped-def]
    """The inverse of `split`: sets those bits of codes [in, out], which must be 0 before."""
    width = plane.shape[2]
    mask, each = (1 << width) - 1, 8 // width
    for strip in range(first, last):
        for unit in range(plane.shape[1]):
            for word in range(width):
                for k in range(4 * each):
                    row, shift = 32 * unit + 4 * each * word + k, 8 * (k % 4) + width * (k // 4)
                    for lane in range(16):
                        part = masked(shift_right(plane[strip, unit, word, lane], shift), mask)
                        column = 16 * strip + lane
                        codes[row, column] = either(codes[row, column], shift_left(part, below))


@compiled
def grid_error(first, last, rows, importance, scales, zeros, top, errors):  # type: ignore[no-untyped-def]
    """See `Backend.grid_error`. The quotient is a product with the inverse: near a tie both codes cost the same."""
    lowest, highest = np.float32(0), np.float32(top)
    inverse = np.empty(PANEL, np.float32)
    zero = np.empty(PANEL, np.float32)
    for start in range(first, last, PANEL):
        end = min(start + PANEL, last)
        for n in range(scales.shape[0]):
            scale, error = scales[n, start:end], errors[n, start:end]
            for c in range(scale.size):
                inverse[c], zero[c], error[c] = np.float32(1) / scale[c], np.float32(zeros[n, start + c]), 0
            for row in range(rows.shape[0]):
                weight, value = importance[row], rows[row, start:end]
                for c in range(scale.size):
                    code = min(max(nearest(value[c] * inverse[c]) + zero[c], lowest), highest)
                    miss = value[c] - (code - zero[c]) * scale[c]
                    error[c] += weight * miss * miss


@compiled
def solve_rows(first, last, weight, target, factor, group, scales, zeros, top, codes, errors):  # type: ignore[no-untyped-def]
    """See `Backend.solve_rows`. A panel of columns at a time, so that its errors stay in the nearest cache."""
    lowest, highest = np.float32(0), np.float32(top)
    count = weight.shape[0]
    missed = np.zeros((count, PANEL), np.float32)
    t = np.zeros(PANEL, np.float32)
    for start in range(first, last, PANEL):
        end = min(start + PANEL, last)
        for row in range(count):
            fed = target[row, start:end]
            for c in range(fed.size):
                t[c] = fed[c]
            for before in range(row):
                share = factor[row, before]
                for c in range(PANEL):
                    t[c] += share * missed[before, c]
            scale, zero = scales[group[row], start:end], zeros[group[row], start:end]
            value, code, error = weight[row, start:end], codes[row, start:end], errors[row, start:end]
            for c in range(code.size):
                middle = np.float32(zero[c])
                steps = nearest(t[c] / scale[c]) if scale[c] != lowest else lowest
                level = min(max(steps + middle, lowest), highest)
                code[c] = np.uint8(level)
                error[c] = value[c] - (level - middle) * scale[c]
                missed[row, c] = error[c]
