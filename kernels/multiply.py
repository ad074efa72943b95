"""CPU kernels that read bit planes: products of a few rows, and panels of dequantized columns for many.

A vector has 16 float32 lanes, and the lanes are 16 consecutive input rows of one output column. A kernel works on a
strip of 4 columns. For each unit of 32 rows it loads the words of the strip once and decodes 8 vectors of weights:

    up to 4 bits  the 16 values of a column and group, each already rounded to float16, lie in one register; the
                  code picks one of them (`vpermps`, AVX-512), at no cost for zero point, scale and rounding
    else          value = fp16((code - zero) · scale) by arithmetic, which LLVM lowers for any processor

so the weights are exactly those of `gptq_dequantize`. All sums are float32 fused multiply-adds, in an order that
depends on the row's own data alone: a row gets the same bits in every batch of up to `FEW_ROWS` rows.

Numba has no vectors: `Vector` is a type of its own, and each intrinsic emits LLVM instructions. Codes stay 32 bits
wide, where plain Numba would widen them to 64.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from quantkit.kernels.jit import compiled, targets
from quantkit.kernels.planes import PLANES

LANES, STRIP, UNIT = 16, 4, 32
# `vpermps` with 16 floats: a table lookup in one instruction.
HAS_PERMUTE = targets("avx512f")
FLOAT, HALF, I32, I64 = ir.FloatType(), ir.HalfType(), ir.IntType(32), ir.IntType(64)


def dot(bits: int, rows: int) -> Callable[..., Any]:
    """The kernel that adds `x [rows, in] · weight` of one section to `y [rows, out]`, for strips first … last - 1.

    Arguments: first, last, x float32, low and high planes, scales uint16 (float16 bits) or float32 [groups, out],
    zeros uint8 [groups, out], starts int64 [groups + 1] in units, the first unit of the section in x, y float32.
    """
    return _dot(bits, rows, HAS_PERMUTE and bits <= 4)


def panel(bits: int) -> Callable[..., Any]:
    """The kernel that writes columns of one section, dequantized, as rows of `out` float32 [columns, in].

    Arguments: first, last (strips of the panel), low, high, scales, zeros, starts, offset as for `dot`, the strip of
    the weight at which the panel starts, out.
    """
    return _panel(bits, HAS_PERMUTE and bits <= 4)


@cache
def _dot(bits: int, rows: int, by_table: bool) -> Callable[..., Any]:
    sums = rows * STRIP

    @compiled
    def kernel(first, last, x, low, high, scales, zeros, starts, offset, y):  # type: ignore[no-untyped-def]
        width = y.shape[1]
        for strip in range(first, last):
            total = vectors(sums)
            for group in range(starts.size - 1):
                grid = grids(scales, zeros, group * width + strip * STRIP, bits, by_table)
                for unit in range(starts[group], starts[group + 1]):
                    total = accumulate(total, grid, x, offset + unit, low, high, strip, unit, bits, by_table)
            add_lanes(total, y, strip)

    return kernel


@cache
def _panel(bits: int, by_table: bool) -> Callable[..., Any]:
    @compiled
    def kernel(first, last, low, high, scales, zeros, starts, offset, origin, out):  # type: ignore[no-untyped-def]
        width = scales.shape[1]
        for row in range(first, last):
            strip = origin + row
            for group in range(starts.size - 1):
                grid = grids(scales, zeros, group * width + strip * STRIP, bits, by_table)
                for unit in range(starts[group], starts[group + 1]):
                    write(grid, out, row, offset + unit, low, high, strip, unit, bits, by_table)

    return kernel


# --- LLVM building blocks: plain functions from a builder and values to values


def _vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def _every(element: ir.Type, value: Any) -> ir.Constant:
    """A constant with the same value in every lane."""
    return ir.Constant(_vector(element), [value] * LANES)


def _broadcast(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A scalar in every lane."""
    undefined = ir.Constant(_vector(value.type), ir.Undefined)
    return b.shuffle_vector(b.insert_element(undefined, value, I32(0)), undefined, _every(I32, 0))


def _load(b: ir.IRBuilder, pointer: ir.Value, index: ir.Value, kind: ir.VectorType) -> ir.Value:
    return b.load(b.bitcast(b.gep(pointer, [index]), kind.as_pointer()), align=4)


def _call(b: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def _round_to_half(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """float32 lanes rounded to what float16 holds, ties to even."""
    return b.fpext(b.fptrunc(value, _vector(HALF)), _vector(FLOAT))


def _half_to_float(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """float16 bits, four as i16 → four float32."""
    return b.fpext(b.bitcast(value, _vector(HALF, STRIP)), _vector(FLOAT, STRIP))


def _words(b: ir.IRBuilder, pointer: ir.Value, width: int, strip: ir.Value, unit: ir.Value, units: ir.Value) -> list:
    """The words of one strip and unit from a plane of this width, shifted so that the strip's first bits are lowest."""
    columns = LANES // width
    runs = max(1, STRIP // columns)  # an 8-bit strip lies in two runs
    sharing = max(1, columns // STRIP)  # strips that share a run in 1- and 2-bit planes
    words = []
    for i in range(runs):
        run = b.add(b.mul(strip, I64(runs)), I64(i)) if sharing == 1 else b.udiv(strip, I64(sharing))
        word = _load(b, pointer, b.mul(b.add(b.mul(run, units), unit), I64(LANES)), _vector(I32))
        if sharing > 1:
            shift = b.mul(b.urem(strip, I64(sharing)), I64(2 * width * STRIP))
            word = b.lshr(word, _broadcast(b, b.trunc(shift, I32)))
        words.append(word)
    return words


def _codes(b: ir.IRBuilder, low: list, high: list, bits: int, column: int, half: int, clean: bool) -> ir.Value:
    """The codes of 16 rows. Bits above the code are cleared only if `clean`: a table lookup does not see them."""
    width, upper = PLANES[bits]
    columns = min(STRIP, LANES // width)
    field = 2 * (column % columns) + half
    code = b.lshr(low[column // columns], _every(I32, field * width))
    below = _every(I32, (1 << width) - 1)
    if upper == 0:
        return b.and_(code, below) if clean else code
    shift = (2 * column + half) * upper - width
    top = b.lshr(high[0], _every(I32, shift)) if shift >= 0 else b.shl(high[0], _every(I32, -shift))
    above = ((1 << upper) - 1) << width if clean else 0xFFFFFFFF - ((1 << width) - 1)
    return b.or_(b.and_(code, below), b.and_(top, _every(I32, above)))


def _weights(b: ir.IRBuilder, grid: list, codes: ir.Value, column: int, by_table: bool) -> ir.Value:
    """The dequantized weights of 16 rows of one column."""
    if by_table:
        return _call(b, "llvm.x86.avx512.permvar.sf.512", _vector(FLOAT), [grid[column], codes])
    scale, zero = grid[2 * column], grid[2 * column + 1]
    return _round_to_half(b, b.fmul(b.fsub(b.uitofp(codes, _vector(FLOAT)), zero), scale))


def _unpacked(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any, indices: tuple[int, ...]) -> list:
    return [cgutils.create_struct_proxy(signature.args[i])(context, b, arguments[i]) for i in indices]


# --- Numba types and intrinsics


class Vector(types.Type):
    """16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="Float32x16")


VECTOR = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _vector(FLOAT))


@intrinsic(prefer_literal=True)
def vectors(typing, count):  # type: ignore[no-untyped-def]
    """`count` vectors of zeros."""
    kind = types.UniTuple(VECTOR, count.literal_value)

    def emit(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        return context.make_tuple(b, kind, [_every(FLOAT, 0.0)] * kind.count)

    return kind(count), emit


@intrinsic(prefer_literal=True)
def grids(typing, scales, zeros, index, bits, by_table):  # type: ignore[no-untyped-def]
    """What decodes the 4 columns at `index` of scales and zeros: a table for each, or its scale and zero point."""
    kind = types.UniTuple(VECTOR, STRIP if by_table.literal_value else 2 * STRIP)
    levels = 1 << bits.literal_value

    def emit(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        scales, zeros = _unpacked(context, b, signature, arguments, (0, 1))
        stored = signature.args[0].dtype
        four = _load(b, scales.data, arguments[2], _vector(FLOAT if stored == types.float32 else ir.IntType(16), STRIP))
        four = four if stored == types.float32 else _half_to_float(b, four)
        middle = b.uitofp(_load(b, zeros.data, arguments[2], _vector(ir.IntType(8), STRIP)), _vector(FLOAT, STRIP))
        result = []
        for column in range(STRIP):
            scale = _broadcast(b, b.extract_element(four, I32(column)))
            zero = _broadcast(b, b.extract_element(middle, I32(column)))
            if by_table.literal_value:
                # The lookup takes four bits of a word: repeated, the table ignores those above the code.
                codes = ir.Constant(_vector(FLOAT), [float(lane % levels) for lane in range(LANES)])
                result.append(_round_to_half(b, b.fmul(b.fsub(codes, zero), scale)))
            else:
                result += [scale, zero]
        return context.make_tuple(b, kind, result)

    return kind(scales, zeros, index, bits, by_table), emit


@intrinsic(prefer_literal=True)
def accumulate(typing, total, grid, x, place, low, high, strip, unit, bits, by_table):  # type: ignore[no-untyped-def]
    """`total` plus the products of one unit: x [rows, in] at unit `place`, weights of `strip` at `unit`."""
    rows, width, table = total.count // STRIP, bits.literal_value, by_table.literal_value

    def emit(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        sums, grid = cgutils.unpack_tuple(b, arguments[0]), cgutils.unpack_tuple(b, arguments[1])
        x, low, high = _unpacked(context, b, signature, arguments, (2, 4, 5))
        length = cgutils.unpack_tuple(b, x.shape)[1]
        lows, highs = _planes(b, low, high, width, arguments[6], arguments[7])
        for half in range(2):
            start = b.add(b.mul(arguments[3], I64(UNIT)), I64(half * LANES))
            inputs = [_load(b, x.data, b.add(b.mul(length, I64(row)), start), _vector(FLOAT)) for row in range(rows)]
            for column in range(STRIP):
                weights = _weights(b, grid, _codes(b, lows, highs, width, column, half, not table), column, table)
                for row in range(rows):
                    i = row * STRIP + column
                    sums[i] = _call(b, "llvm.fma.v16f32", _vector(FLOAT), [weights, inputs[row], sums[i]])
        return context.make_tuple(b, signature.args[0], sums)

    return total(total, grid, x, place, low, high, strip, unit, bits, by_table), emit


@intrinsic(prefer_literal=True)
def write(typing, grid, out, row, place, low, high, strip, unit, bits, by_table):  # type: ignore[no-untyped-def]
    """Dequantize one unit of a strip into rows 4·row … of out [columns, in], at unit `place`."""
    width, table = bits.literal_value, by_table.literal_value

    def emit(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        grid = cgutils.unpack_tuple(b, arguments[0])
        out, low, high = _unpacked(context, b, signature, arguments, (1, 4, 5))
        length = cgutils.unpack_tuple(b, out.shape)[1]
        lows, highs = _planes(b, low, high, width, arguments[6], arguments[7])
        for column in range(STRIP):
            line = b.mul(b.add(b.mul(arguments[2], I64(STRIP)), I64(column)), length)
            for half in range(2):
                start = b.add(b.mul(arguments[3], I64(UNIT)), I64(half * LANES))
                weights = _weights(b, grid, _codes(b, lows, highs, width, column, half, not table), column, table)
                target = b.bitcast(b.gep(out.data, [b.add(line, start)]), _vector(FLOAT).as_pointer())
                b.store(weights, target, align=4)
        return context.get_dummy_value()

    return types.none(grid, out, row, place, low, high, strip, unit, bits, by_table), emit


@intrinsic(prefer_literal=True)
def add_lanes(typing, total, y, strip):  # type: ignore[no-untyped-def]
    """Add the sum over the lanes of each vector to its place in y [rows, out]."""

    def emit(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        (y,) = _unpacked(context, b, signature, arguments, (1,))
        width = cgutils.unpack_tuple(b, y.shape)[1]
        for i, vector in enumerate(cgutils.unpack_tuple(b, arguments[0])):
            row, column = divmod(i, STRIP)
            index = b.add(b.mul(width, I64(row)), b.add(b.mul(arguments[2], I64(STRIP)), I64(column)))
            target = b.gep(y.data, [index])
            b.store(b.fadd(b.load(target), _sum_of_lanes(b, vector)), target)
        return context.get_dummy_value()

    return types.none(total, y, strip), emit


def _planes(b: ir.IRBuilder, low: Any, high: Any, bits: int, strip: ir.Value, unit: ir.Value) -> tuple[list, list]:
    width, upper = PLANES[bits]
    units = cgutils.unpack_tuple(b, low.shape)[1]
    lows = _words(b, low.data, width, strip, unit, units)
    return lows, _words(b, high.data, upper, strip, unit, units) if upper else []


def _sum_of_lanes(b: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Halves added to halves, so that the order is fixed."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        near, far = (ir.Constant(_vector(I32, lanes), list(range(s, s + lanes))) for s in (0, lanes))
        vector = b.fadd(b.shuffle_vector(vector, undefined, near), b.shuffle_vector(vector, undefined, far))
    return b.extract_element(vector, I32(0))
