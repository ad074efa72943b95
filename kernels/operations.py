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
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from quantkit.kernels.multiply import VECTOR
from quantkit.kernels.program import Operand, operation, pointer
from quantkit.kernels.steps import GROUP, PAGE, Pages

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
def from_half(typing, half):  # type: ignore[no-untyped-def]
    """float16 bits, uint16 → float32."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return b.fpext(b.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), emit


@intrinsic
def as_half(typing, value):  # type: ignore[no-untyped-def]
    """float32 → the bits of the nearest float16, uint16."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return b.bitcast(b.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), emit


@intrinsic
def power_of_two(typing, exponent):  # type: ignore[no-untyped-def]
    """float32 2^exponent of a whole float32 from -126 to 127."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        word = ir.IntType(32)
        return b.bitcast(b.shl(b.add(b.fptosi(args[0], word), word(127)), word(23)), ir.FloatType())

    return types.float32(types.float32), emit


def place(pages: Pages) -> tuple[Operand, ...]:
    """Pages as operations find them: codes, scales or 0, bytes from a page to the next of codes and from a head to the
    next, the same of scales, and the neighbours of a row that are turned together."""
    codes, scales = pages.codes, pages.scales
    assert codes.stride()[2:] == (codes.shape[3], 1), "the rows of one page and head lie together"
    apart = [codes.stride(axis) * codes.itemsize for axis in (0, 1)]
    if scales is None:
        return codes.data_ptr(), 0, *apart, 0, 0, pages.block
    assert scales.stride()[2:] == (scales.shape[3], 1)
    return codes.data_ptr(), scales.data_ptr(), *apart, *(2 * scales.stride(axis) for axis in (0, 1)), pages.block


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


@register_jitable
def turn(values, block):  # type: ignore[no-untyped-def]
    """`steps.turn` of one row in place."""
    step = 1
    while step < block:
        for first in range(0, values.size, 2 * step):
            for k in range(first, first + step):
                one, other = values[k], values[k + step]
                values[k], values[k + step] = one + other, one - other
        step *= 2
    if block > 1:
        factor = np.float32(1) / np.sqrt(np.float32(block))
        for k in range(values.size):
            values[k] *= factor


@register_jitable
def store(values, codes, scales, bits):  # type: ignore[no-untyped-def]
    """`steps.encode` of one row: into bytes, and scales as float16 bits where there are groups."""
    half = np.float32(((1 << bits) - 1) / 2)
    for group in range(values.size // GROUP):
        row = values[group * GROUP : (group + 1) * GROUP]
        top, wrong = np.float32(0), np.float32(0)
        for k in range(GROUP):
            top = max(top, abs(row[k]))
            wrong += row[k] * np.float32(0)
        scales[group] = as_half(top / half + wrong)
        step = from_half(scales[group])
        for k in range(GROUP):
            place = group * GROUP + k
            level = np.rint(row[k] / step + half) if step > 0 else np.rint(half)
            code = np.int64(min(max(level, np.float32(0)), 2 * half)) if wrong == 0 else 0
            if bits == 4:
                codes[place // 2] = code if k % 2 == 0 else codes[place // 2] | code << 4
            else:
                codes[place] = code & 255
            if bits == 9:
                mark = values.size + place // 8
                codes[mark] = (codes[mark] if k % 8 else 0) | (code >> 8) << k % 8


def _vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def _at(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, index: int = 0) -> ir.Value:
    """A pointer to number `index` of things of this kind."""
    start = b.inttoptr(address, kind.as_pointer())
    return b.gep(start, [ir.IntType(64)(index)]) if index else start


def _in_every_lane(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    undefined = ir.Constant(_vector(value.type), ir.Undefined)
    first = ir.Constant(_vector(ir.IntType(32)), [0] * LANES)
    return b.shuffle_vector(b.insert_element(undefined, value, ir.IntType(32)(0)), undefined, first)


def _multiply_add(b: ir.IRBuilder, one: ir.Value, other: ir.Value, total: ir.Value) -> ir.Value:
    kind = _vector(ir.FloatType())
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), "llvm.fma.v16f32")
    return b.call(function, [one, other, total])


def _numbers(b: ir.IRBuilder, codes: ir.Value, ninths: ir.Value, bits: int) -> list[ir.Value]:
    """The codes of a group less their middle, twice 16 float32; at 4 bits the even ones and then the odd ones."""
    byte, word, number = ir.IntType(8), ir.IntType(32), _vector(ir.FloatType())
    if bits == 4:
        pairs = b.load(_at(b, codes, _vector(byte)), align=1)
        four = ir.Constant(_vector(byte), [4] * LANES)
        parts = [b.and_(pairs, ir.Constant(_vector(byte), [15] * LANES)), b.lshr(pairs, four)]
    else:
        parts = [b.load(_at(b, codes, _vector(byte), index), align=1) for index in range(2)]
    whole = [b.zext(part, _vector(word)) for part in parts]
    if bits == 9:
        marks = b.bitcast(b.load(_at(b, ninths, word), align=1), _vector(ir.IntType(1), 2 * LANES))
        undefined = ir.Constant(marks.type, ir.Undefined)
        high, none = (ir.Constant(_vector(word), [value] * LANES) for value in (256, 0))
        for index in range(2):
            places = ir.Constant(_vector(word), list(range(index * LANES, (index + 1) * LANES)))
            own = b.shuffle_vector(marks, undefined, places)
            whole[index] = b.add(whole[index], b.select(own, high, none))
    middle = ir.Constant(number, [((1 << bits) - 1) / 2] * LANES)
    return [b.fsub(b.sitofp(part, number), middle) for part in whole]


@intrinsic(prefer_literal=True)
def add_product(typing, total, query, codes, ninths, scale, bits):  # type: ignore[no-untyped-def]
    """`total` plus `query · decode(group)`, lane by lane: addresses of 32 float32, and of the codes of a group."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        number = _vector(ir.FloatType())
        own = ir.Constant(number, [0.0] * LANES)
        for index, part in enumerate(_numbers(b, args[2], args[3], bits.literal_value)):
            own = _multiply_add(b, b.load(_at(b, args[1], number, index), align=4), part, own)
        return _multiply_add(b, own, _in_every_lane(b, args[4]), args[0])

    return VECTOR(VECTOR, types.int64, types.int64, types.int64, types.float32, bits), emit


@intrinsic(prefer_literal=True)
def add_share(typing, mixed, factor, codes, bits):  # type: ignore[no-untyped-def]
    """Adds `factor · codes` of a group to the 32 float32 at `mixed`. No value has a ninth bit."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        wide_factor = _in_every_lane(b, args[1])
        for index, part in enumerate(_numbers(b, args[2], args[2], bits.literal_value)):
            target = _at(b, args[0], part.type, index)
            b.store(_multiply_add(b, part, wide_factor, b.load(target, align=4)), target, align=4)
        return context.get_dummy_value()

    return types.none(types.int64, types.float32, types.int64, bits), emit


@intrinsic
def no_sum(typing):  # type: ignore[no-untyped-def]
    """Zero in every lane."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return ir.Constant(_vector(ir.FloatType()), [0.0] * LANES)

    return VECTOR(), emit


@intrinsic
def sum_of_lanes(typing, total):  # type: ignore[no-untyped-def]
    """Halves added to halves."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        vector, lanes, word = args[0], LANES, ir.IntType(32)
        while lanes > 1:
            lanes //= 2
            undefined = ir.Constant(vector.type, ir.Undefined)
            near, far = (ir.Constant(_vector(word, lanes), list(range(s, s + lanes))) for s in (0, lanes))
            vector = b.fadd(b.shuffle_vector(vector, undefined, near), b.shuffle_vector(vector, undefined, far))
        return b.extract_element(vector, word(0))

    return types.float32(VECTOR), emit


@register_jitable
def apart(values, spare):  # type: ignore[no-untyped-def]
    """The even elements of each group before the odd ones, in place."""
    for group in range(values.size // GROUP):
        own = values[group * GROUP : (group + 1) * GROUP]
        for k in range(GROUP // 2):
            spare[k], spare[GROUP // 2 + k] = own[2 * k], own[2 * k + 1]
        own[:] = spare[:GROUP]


@register_jitable
def together(values, spare):  # type: ignore[no-untyped-def]
    """The inverse of `apart`."""
    for group in range(values.size // GROUP):
        own = values[group * GROUP : (group + 1) * GROUP]
        for k in range(GROUP // 2):
            spare[2 * k], spare[2 * k + 1] = own[k], own[GROUP // 2 + k]
        own[:] = spare[:GROUP]


@cache
def rope_append(key_bits: int, value_bits: int) -> Any:
    """Normalises heads where the model does, rotates queries and keys, stores keys and values; heads are shared out.

    Operands: qkv float32 [m, (heads + 2·kv_heads)·dim], rotated in place; cos, sin float32 [m, pairs]; weights float32
    [dim] of the norms of q and k or 0, their epsilon float32 [1]; slots int64 [m]; pages of keys, then of values, each
    as `place` has them; m, heads, kv_heads, dim, pairs. Bits are 16 for bfloat16, and those of `kernels.steps`.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = carray(pointer(arguments), 26, np.int64)
        m, heads, kv_heads, dim, pairs = a[21], a[22], a[23], a[24], a[25]
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
                turn(values, a[13])
            else:
                turn(values, a[20])
            if head >= heads:
                is_value, kept = (head - heads) // kv_heads, (head - heads) % kv_heads
                side = a[14:21] if is_value else a[7:14]
                page, at = slots[row] // PAGE, slots[row] % PAGE
                codes = side[0] + page * side[2] + kept * side[3]
                scales = side[1] + page * side[4] + kept * side[5]
                bits = value_bits if is_value else key_bits
                if bits == 16:
                    stored = carray(pointer(codes + 2 * at * dim), dim, np.uint16)
                    for k in range(dim):
                        stored[k] = narrow(values[k])
                else:
                    width = dim * bits // 8
                    marks = carray(pointer(codes + at * width), width, np.uint8)
                    steps = carray(pointer(scales + 2 * at * (dim // GROUP)), dim // GROUP, np.uint16)
                    if is_value:
                        store(values, marks, steps, value_bits)
                    else:
                        store(values, marks, steps, key_bits)

    return operation(kernel)


@cache
def attend(key_bits: int, value_bits: int) -> Any:
    """One new token of each row over its whole past, itself included; heads of rows are shared out.

    Operands: qkv as `rope_append` leaves it; y float32 [m, heads·dim]; pages as there; table int32 [m, most], lengths
    int32 [m]; scratch float32 [threads at most, most·256 + dim]; scale float32 [1]; window, 0 for none; m, heads,
    kv_heads, dim, most.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = carray(pointer(arguments), 26, np.int64)
        m, heads, kv_heads, dim, most = a[21], a[22], a[23], a[24], a[25]
        qkv = carray(pointer(a[0]), (m, heads + 2 * kv_heads, dim), np.float32)
        y = carray(pointer(a[1]), (m, heads, dim), np.float32)
        table, lengths = carray(pointer(a[16]), (m, most), np.int32), carray(pointer(a[17]), m, np.int32)
        scratch = carray(pointer(a[18] + 4 * thread * (most * PAGE + dim)), most * PAGE + dim, np.float32)
        scores, spare = scratch[: most * PAGE], scratch[most * PAGE :]
        scale, window = carray(pointer(a[19]), 1, np.float32)[0], a[20]
        key_width, value_width, groups = dim * key_bits // 8, dim * value_bits // 8, dim // GROUP
        each = heads + 2 * kv_heads
        for job in range(m * heads * thread // threads, m * heads * (thread + 1) // threads):
            row, head = job // heads, job % heads
            group, query, length = head // (heads // kv_heads), qkv[row, head], np.int64(lengths[row])
            start = max(0, length - window) if window else 0
            top = np.float32(-np.inf)
            if key_bits == 4:
                apart(query, spare)
            asked = a[0] + 4 * (row * each + head) * dim
            for first in range(start // PAGE * PAGE, length, PAGE):
                page = table[row, first // PAGE]
                codes, steps = a[2] + page * a[4] + group * a[5], a[3] + page * a[6] + group * a[7]
                keys = carray(pointer(codes), (PAGE, dim), np.uint16)
                for position in range(max(start, first), min(first + PAGE, length)):
                    at, score = position - first, np.float32(0)
                    if key_bits == 16:
                        for k in range(dim):
                            score += query[k] * wide(keys[at, k])
                    else:
                        scales = carray(pointer(steps + 2 * at * groups), groups, np.uint16)
                        mine, summed = codes + at * key_width, no_sum()
                        for g in range(groups):
                            here, ninths = mine + g * (GROUP if key_bits > 4 else GROUP // 2), mine + dim + 4 * g
                            summed = add_product(
                                summed, asked + 4 * GROUP * g, here, ninths, from_half(scales[g]), key_bits
                            )
                        score = sum_of_lanes(summed)
                    score *= scale
                    scores[position] = score
                    top = max(top, score)
            total, wrong = np.float32(0), np.float32(0)
            for position in range(start, length):
                wrong += scores[position] * np.float32(0)
                scores[position] = exponential(scores[position] - top)
                total += scores[position]
            mixed = y[row, head]
            found = a[1] + 4 * (row * heads + head) * dim
            for k in range(dim):
                mixed[k] = 0
            for first in range(start // PAGE * PAGE, length, PAGE):
                page = table[row, first // PAGE]
                codes, steps = a[9] + page * a[11] + group * a[12], a[10] + page * a[13] + group * a[14]
                values = carray(pointer(codes), (PAGE, dim), np.uint16)
                for position in range(max(start, first), min(first + PAGE, length)):
                    at, share = position - first, scores[position]
                    if value_bits == 16:
                        for k in range(dim):
                            mixed[k] += share * wide(values[at, k])
                    else:
                        scales = carray(pointer(steps + 2 * at * groups), groups, np.uint16)
                        mine = codes + at * value_width
                        for g in range(groups):
                            here = mine + g * (GROUP if value_bits > 4 else GROUP // 2)
                            add_share(found + 4 * GROUP * g, share * from_half(scales[g]), here, value_bits)
            if value_bits == 4:
                together(mixed, spare)
            for k in range(dim):
                mixed[k] = mixed[k] / total + wrong
            turn(mixed, a[15])

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
