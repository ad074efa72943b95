"""CPU kernels that read bit planes: products of a few rows, and panels of dequantized columns for many.

A vector has 16 lanes of 32 bits, and the lanes are 16 neighbouring output columns, a strip. A kernel walks down the
rows of a strip, a unit of 32 rows after the other, and takes four rows of it at once, a byte for each code.

    integer products  x is rounded to 16-bit integers, a scale for each unit (`rounding.py`), and taken apart into two
                      bytes: X = 256·h + l. Two `vpdpbusd` (AVX-512 VNNI) multiply the codes with h and with l, exactly,
                      and what is summed in float32 is one number for each unit. x is off by at most 1/65024 of the
                      largest of its unit, less than bfloat16 is off (1/512 of each value); weights are not rounded
    float products    value = fp16((code - zero) · scale), exactly the weights of `gptq_dequantize`, for any processor

All sums are float32 fused multiply-adds, in an order that depends on the row's own data alone: a row gets the same
bits in every batch of up to `FEW_ROWS` rows.

Each intrinsic emits LLVM instructions (`lanes.py`). Codes stay 32 bits wide, where plain Numba would widen them to 64.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quantkit.kernels.jit import compiled, targets
from quantkit.kernels.lanes import (
    FLOAT,
    HALF,
    I8,
    I16,
    I32,
    I64,
    VECTOR,
    broadcast,
    call,
    every,
    multiply_add,
    vector_of,
    vectors,
)
from quantkit.kernels.planes import PLANES, STRIP, UNIT
from quantkit.kernels.program import operation
from quantkit.kernels.views import array_at

QUADS = UNIT // 4
# Floats of 16 bits are handled as these: Numba has none on a CPU.
BITS_OF = {16: np.uint16, 32: np.float32}
# A product of 64 unsigned with 64 signed bytes, summed by fours, in one instruction.
HAS_BYTE_PRODUCTS = targets("avx512vnni")


@cache
def integer_product(bits: int, rows: int, scale_bits: int) -> Any:
    """The operation that adds `x · weight` of one section to y, `rows` rows at a time; its scales are float16 or
    float32.

    Operands: codes, scales and sums of x as `rounding.round_rows` makes them, m, units; low, high, scales, zeros of the
    section; strips, its units, groups, whether zeros are one for all; starts, offset; y float32 [m, width], width,
    first column; what y becomes first: 1 zeros, 2 bias, 0 stays; bias float32. m is a multiple of `rows`.
    """
    width, upper = PLANES[bits]
    stored = BITS_OF[scale_bits]

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = array_at(arguments, 20, np.int64)
        m, units, strips, own, groups = a[3], a[4], a[9], a[10], a[11]
        low = array_at(a[5], (strips, own, width, STRIP), np.uint32)
        high = array_at(a[6], (strips, own, upper, STRIP), np.uint32)
        scales = array_at(a[7], (strips, groups, STRIP), stored)
        zeros = array_at(a[8], (1 if a[12] else strips, 1 if a[12] else groups, STRIP), np.uint8)
        starts, offset = array_at(a[13], groups + 1, np.int64), a[14]
        y, column = array_at(a[15], (m, a[16]), np.float32), a[17]
        bias = array_at(a[19], strips * STRIP, np.float32)
        first, last = strips * thread // threads, strips * (thread + 1) // threads
        for row in range(0, m, rows):
            place = row * units
            codes = array_at(a[0] + place * 2 * UNIT, (rows, units, 2 * UNIT), np.int8)
            x_scales = array_at(a[1] + place * 4, (rows, units), np.float32)
            sums = array_at(a[2] + place * 4, (rows, units), np.int32)
            mine = y[row : row + rows]
            for strip in range(first, last):
                if a[18]:
                    for r in range(rows):
                        for lane in range(strip * STRIP, (strip + 1) * STRIP):
                            mine[r, column + lane] = bias[lane] if a[18] == 2 else np.float32(0)
                total = vectors(rows)
                for group in range(groups):
                    scale, zero = grid(scales, zeros, strip, group)
                    part = vectors(rows)
                    for unit in range(starts[group], starts[group + 1]):
                        part = multiply_integers(
                            part, zero, codes, x_scales, sums, offset + unit, low, high, strip, unit, bits
                        )
                    total = scaled(total, part, scale)
                add_to(total, mine, column + strip * STRIP)

    return operation(kernel)


@cache
def float_dot(bits: int, rows: int) -> Callable[..., Any]:
    """The same for float32 x [rows, in].

    Arguments: first, last, x, low and high planes, scales uint16 (float16 bits) or float32 [strips, groups, 16], zeros
    uint8, alike or [1, 1, 16], starts int64 [groups + 1] in units, the first unit of the section in x, y float32.
    """

    @compiled
    def kernel(first, last, x, low, high, scales, zeros, starts, offset, y):  # type: ignore[no-untyped-def]
        for strip in range(first, last):
            total = vectors(rows)
            for group in range(starts.size - 1):
                scale, zero = grid(scales, zeros, strip, group)
                for unit in range(starts[group], starts[group + 1]):
                    for quad in range(QUADS):
                        total = multiply_floats(
                            total, scale, zero, x, offset + unit, low, high, strip, unit, quad, bits
                        )
            add_to(total, y, strip * STRIP)

    return kernel


@cache
def panel(bits: int, value_bits: int, scale_bits: int) -> Any:
    """The operation that dequantizes columns of one section into a panel [in, columns], bfloat16 or float32; scales as
    for `integer_product`.

    Operands: low, high, scales, zeros of the section; strips, its units, groups, whether zeros are one for all; starts,
    offset; int64 [in], the row of the panel for each row of the weight, and in; the panel; int64 [2], the strip of the
    weight at which the panel starts, and its strips.
    """
    width, upper = PLANES[bits]
    kind, stored = BITS_OF[value_bits], BITS_OF[scale_bits]

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = array_at(arguments, 14, np.int64)
        strips, own, groups, rows = a[4], a[5], a[6], a[11]
        low = array_at(a[0], (strips, own, width, STRIP), np.uint32)
        high = array_at(a[1], (strips, own, upper, STRIP), np.uint32)
        scales = array_at(a[2], (strips, groups, STRIP), stored)
        zeros = array_at(a[3], (1 if a[7] else strips, 1 if a[7] else groups, STRIP), np.uint8)
        starts, offset = array_at(a[8], groups + 1, np.int64), a[9]
        order, place = array_at(a[10], rows, np.int64), array_at(a[13], 2, np.int64)
        across = place[1]
        out = array_at(a[12], (rows, across * STRIP), kind)
        for column in range(across * thread // threads, across * (thread + 1) // threads):
            strip = place[0] + column
            for group in range(groups):
                scale, zero = grid(scales, zeros, strip, group)
                for unit in range(starts[group], starts[group + 1]):
                    for quad in range(QUADS):
                        write(scale, zero, out, order, offset + unit, column, low, high, strip, unit, quad, bits)

    return operation(kernel)


# --- LLVM building blocks: plain functions from a builder and values to values


def _load(b: ir.IRBuilder, pointer: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    return b.load(b.bitcast(b.gep(pointer, [index]), kind.as_pointer()), align=1 if kind == vector_of(I8) else 2)


def _round_to_half(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """float32 lanes rounded to what float16 holds, ties to even."""
    return b.fpext(b.fptrunc(value, vector_of(HALF)), vector_of(FLOAT))


def _bfloat_bits(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """float32 lanes as the bits of the nearest bfloat16, ties away from zero; NaN stays NaN."""
    bits = b.bitcast(value, vector_of(I32))
    rounded = b.select(b.fcmp_unordered("uno", value, value), bits, b.add(bits, every(I32, 0x8000)))
    return b.trunc(b.lshr(rounded, every(I32, 16)), vector_of(I16))


def _mask(width: int, place: int = 0) -> ir.Constant:
    """`width` ones from bit `place` on in every byte."""
    return every(I32, (((1 << width) - 1) << place) * 0x01010101)


def _words(b: ir.IRBuilder, plane: Any, width: int, strip: ir.Value, unit: ir.Value, word: ir.Value) -> ir.Value:
    """Word `word` of all lanes of a plane of this width."""
    units = cgutils.unpack_tuple(b, plane.shape)[1]
    place = b.add(b.mul(b.add(b.mul(strip, units), unit), I64(width)), word)
    return _load(b, plane.data, b.mul(place, I64(STRIP)), vector_of(I32))


def _quad(b: ir.IRBuilder, low: Any, high: Any, bits: int, strip: ir.Value, unit: ir.Value, quad: ir.Value) -> ir.Value:
    """Four rows: a byte for the code of each, in a word for each column. A constant `quad` costs no arithmetic."""
    parts = []
    for plane, width, below in zip((low, high), PLANES[bits], (0, PLANES[bits][0]), strict=True):
        if width == 0:
            continue
        each = 8 // width  # fours of rows in a word
        word = _words(b, plane, width, strip, unit, b.udiv(quad, I64(each)))
        if width < 8:
            shift = broadcast(b, b.trunc(b.mul(b.urem(quad, I64(each)), I64(width)), I32))
            word = b.and_(b.lshr(word, shift), _mask(width))
        parts.append(b.shl(word, every(I32, below)) if below else word)
    return parts[0] if len(parts) == 1 else b.or_(*parts)


def _code(b: ir.IRBuilder, quad: ir.Value, row: int) -> ir.Value:
    """The codes of one of the four rows as float32."""
    return b.uitofp(b.and_(b.lshr(quad, every(I32, 8 * row)), every(I32, 255)), vector_of(FLOAT))


def _weight(b: ir.IRBuilder, quad: ir.Value, row: int, scale: ir.Value, zero: ir.Value) -> ir.Value:
    """The weights of one of the four rows, before they are rounded."""
    return b.fmul(b.fsub(_code(b, quad, row), zero), scale)


def _unpacked(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any, indices: tuple[int, ...]) -> list:
    return [cgutils.create_struct_proxy(signature.args[i])(context, b, arguments[i]) for i in indices]


# --- intrinsics


@intrinsic
def grid(typing, scales, zeros, strip, group):  # type: ignore[no-untyped-def]
    """Scales and zero points of one group of a strip, as float32."""
    kind = types.UniTuple(VECTOR, 2)

    def emit(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        scales, zeros = _unpacked(context, b, signature, arguments, (0, 1))
        stored = signature.args[0].dtype
        place = b.add(b.mul(arguments[2], cgutils.unpack_tuple(b, scales.shape)[1]), arguments[3])
        scale = _load(b, scales.data, b.mul(place, I64(STRIP)), vector_of(FLOAT if stored == types.float32 else I16))
        scale = scale if stored == types.float32 else b.fpext(b.bitcast(scale, vector_of(HALF)), vector_of(FLOAT))
        strips, groups, _ = cgutils.unpack_tuple(b, zeros.shape)
        place = b.select(b.icmp_unsigned("==", b.mul(strips, groups), I64(1)), I64(0), place)
        zero = b.uitofp(_load(b, zeros.data, b.mul(place, I64(STRIP)), vector_of(I8)), vector_of(FLOAT))
        return context.make_tuple(b, kind, [scale, zero])

    return kind(scales, zeros, strip, group), emit


@intrinsic(prefer_literal=True)
def multiply_integers(typing, part, zero, codes, x_scales, sums, place, low, high, strip, unit, bits):  # type: ignore[no-untyped-def]
    """`part` plus `x · (code - zero)` of one unit for each row: x at unit `place`, codes of `strip` at `unit`."""
    rows, width = part.count, bits.literal_value

    def emit(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        totals = cgutils.unpack_tuple(b, arguments[0])
        codes, scales, sums, low, high = _unpacked(context, b, signature, arguments, (2, 3, 4, 6, 7))
        units = cgutils.unpack_tuple(b, scales.shape)[1]
        places = [b.add(b.mul(units, I64(row)), arguments[5]) for row in range(rows)]
        inputs = [b.bitcast(b.gep(codes.data, [b.mul(place, I64(2 * UNIT))]), I32.as_pointer()) for place in places]
        products = [[every(I32, 0)] * 2 for _ in range(rows)]
        for index in range(QUADS):
            quad = _quad(b, low, high, width, arguments[8], arguments[9], I64(index))
            for row in range(rows):
                for byte in range(2):
                    four = broadcast(b, b.load(b.gep(inputs[row], [I64(byte * QUADS + index)])))
                    operands = [products[row][byte], quad, four]
                    products[row][byte] = call(b, "llvm.x86.avx512.vpdpbusd.512", vector_of(I32), operands)
        middle = b.fptosi(arguments[1], vector_of(I32))
        for row in range(rows):
            high_bytes, low_bytes = products[row]
            offset = b.mul(middle, broadcast(b, b.load(b.gep(sums.data, [places[row]]))))
            whole = b.sub(b.add(b.shl(high_bytes, every(I32, 8)), low_bytes), offset)
            scale = broadcast(b, b.load(b.gep(scales.data, [places[row]])))
            totals[row] = multiply_add(b, b.sitofp(whole, vector_of(FLOAT)), scale, totals[row])
        return context.make_tuple(b, signature.args[0], totals)

    return part(part, zero, codes, x_scales, sums, place, low, high, strip, unit, bits), emit


@intrinsic(prefer_literal=True)
def multiply_floats(typing, total, scale, zero, x, place, low, high, strip, unit, quad, bits):  # type: ignore[no-untyped-def]
    """`total` plus the products of four rows of a unit: x [rows, in] at unit `place`, weights of `strip` at `unit`."""
    rows, width = total.count, bits.literal_value

    def emit(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        totals = cgutils.unpack_tuple(b, arguments[0])
        x, low, high = _unpacked(context, b, signature, arguments, (3, 5, 6))
        length = cgutils.unpack_tuple(b, x.shape)[1]
        four = _quad(b, low, high, width, arguments[7], arguments[8], arguments[9])
        first = b.add(b.mul(arguments[4], I64(UNIT)), b.mul(arguments[9], I64(4)))
        for n in range(4):
            weight = _round_to_half(b, _weight(b, four, n, arguments[1], arguments[2]))
            for row in range(rows):
                place = b.add(b.add(b.mul(length, I64(row)), first), I64(n))
                value = broadcast(b, b.load(b.gep(x.data, [place])))
                totals[row] = multiply_add(b, weight, value, totals[row])
        return context.make_tuple(b, signature.args[0], totals)

    return total(total, scale, zero, x, place, low, high, strip, unit, quad, bits), emit


@intrinsic(prefer_literal=True)
def write(typing, scale, zero, out, order, place, column, low, high, strip, unit, quad, bits):  # type: ignore[no-untyped-def]
    """Dequantize four rows of one unit of a strip into strip `column` of `out` [in, columns], in the rows that `order`
    has for unit `place`."""
    width = bits.literal_value

    def emit(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        out, order, low, high = _unpacked(context, b, signature, arguments, (2, 3, 6, 7))
        length = cgutils.unpack_tuple(b, out.shape)[1]
        four = _quad(b, low, high, width, arguments[8], arguments[9], arguments[10])
        first = b.add(b.mul(arguments[4], I64(UNIT)), b.mul(arguments[10], I64(4)))
        below = b.fsub(every(FLOAT, 0.0), b.fmul(arguments[0], arguments[1]))
        for n in range(4):
            if signature.args[2].dtype == types.float32:
                weight = _round_to_half(b, _weight(b, four, n, arguments[0], arguments[1]))
            else:
                weight = _bfloat_bits(b, multiply_add(b, _code(b, four, n), arguments[0], below))
            line = b.mul(b.load(b.gep(order.data, [b.add(first, I64(n))])), length)
            target = b.gep(out.data, [b.add(line, b.mul(arguments[5], I64(STRIP)))])
            b.store(weight, b.bitcast(target, weight.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.none(scale, zero, out, order, place, column, low, high, strip, unit, quad, bits), emit


@intrinsic
def scaled(typing, total, part, scale):  # type: ignore[no-untyped-def]
    """`total + part · scale`, row by row."""

    def emit(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        totals, parts = cgutils.unpack_tuple(b, arguments[0]), cgutils.unpack_tuple(b, arguments[1])
        found = [multiply_add(b, part, arguments[2], total) for total, part in zip(totals, parts, strict=True)]
        return context.make_tuple(b, signature.args[0], found)

    return total(total, part, scale), emit


@intrinsic
def add_to(typing, total, y, column):  # type: ignore[no-untyped-def]
    """Add each vector to a row of y [rows, out], from `column` on."""

    def emit(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        (y,) = _unpacked(context, b, signature, arguments, (1,))
        width = cgutils.unpack_tuple(b, y.shape)[1]
        for row, vector in enumerate(cgutils.unpack_tuple(b, arguments[0])):
            index = b.add(b.mul(width, I64(row)), arguments[2])
            target = b.bitcast(b.gep(y.data, [index]), vector.type.as_pointer())
            b.store(b.fadd(b.load(target, align=4), vector), target, align=4)
        return context.get_dummy_value()

    return types.none(total, y, column), emit
