"""Attention of a decode step on the CPU, as operations of a `Program`: rotation, the cache in pages, the past mixed.

Pages are those of `kernels.steps`, bfloat16 or codes of 9, 8 and 4 bits, which are read as they lie there: a group of
32 codes is two vectors, whatever its bits. At 4 bits a byte has an even element and the next odd one, so that queries
and sums stand with the even elements of each group first.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from quantkit.kernels.columns import as_float, half_bits, nearest
from quantkit.kernels.lanes import (
    FLOAT,
    I8,
    I32,
    LANES,
    VECTOR,
    broadcast,
    element,
    every,
    multiply_add,
    sum_of_lanes,
    vector_of,
    vectors,
)
from quantkit.kernels.operations import REORDERED, narrow, normalised, wide
from quantkit.kernels.program import Operand, operation
from quantkit.kernels.steps import GROUP, PAGE, Pages
from quantkit.kernels.views import array_at, exponential, larger, smaller


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
        factor = np.float32(1) / math.sqrt(np.float32(block))
        for k in range(values.size):
            values[k] *= factor


@register_jitable
def store_halves(values, halves):  # type: ignore[no-untyped-def]
    """One row in bfloat16, from an address on."""
    stored = array_at(halves, values.size, np.uint16)
    for k in range(values.size):
        stored[k] = narrow(values[k])


@register_jitable
def store(values, row_of_codes, row_of_scales, bits):  # type: ignore[no-untyped-def]
    """`steps.encode` of one row, from these addresses on."""
    codes = array_at(row_of_codes, values.size * bits // 8, np.uint8)
    scales = array_at(row_of_scales, values.size // GROUP, np.uint16)
    half = np.float32(((1 << bits) - 1) / 2)
    for group in range(values.size // GROUP):
        row = values[group * GROUP : (group + 1) * GROUP]
        top, wrong = np.float32(0), np.float32(0)
        for k in range(GROUP):
            top = larger(abs(row[k]), top)
            wrong += row[k] * np.float32(0)
        scales[group] = half_bits(top / half + wrong)
        step = as_float(scales[group])
        for k in range(GROUP):
            place = group * GROUP + k
            level = nearest(row[k] / step + half if step > 0 else half)
            code = np.int64(smaller(larger(level, np.float32(0)), 2 * half)) if wrong == 0 else 0
            if bits == 4:
                codes[place // 2] = code if k % 2 == 0 else codes[place // 2] | code << 4
            else:
                codes[place] = code & 255
            if bits == 9:
                mark = values.size + place // 8
                codes[mark] = (codes[mark] if k % 8 else 0) | (code >> 8) << k % 8


def _numbers(b: ir.IRBuilder, codes: ir.Value, ninths: ir.Value, bits: int) -> list[ir.Value]:
    """The codes of a group less their middle, twice 16 float32; at 4 bits the even ones and then the odd ones."""
    byte, word, number = I8, I32, vector_of(FLOAT)
    if bits == 4:
        pairs = b.load(element(b, codes, vector_of(byte)), align=1)
        parts = [b.and_(pairs, every(byte, 15)), b.lshr(pairs, every(byte, 4))]
    else:
        parts = [b.load(element(b, codes, vector_of(byte), index), align=1) for index in range(2)]
    whole = [b.zext(part, vector_of(word)) for part in parts]
    if bits == 9:
        marks = b.bitcast(b.load(element(b, ninths, word), align=1), vector_of(ir.IntType(1), 2 * LANES))
        undefined = ir.Constant(marks.type, ir.Undefined)
        high, none = every(word, 256), every(word, 0)
        for index in range(2):
            places = ir.Constant(vector_of(word), list(range(index * LANES, (index + 1) * LANES)))
            own = b.shuffle_vector(marks, undefined, places)
            whole[index] = b.add(whole[index], b.select(own, high, none))
    middle = every(FLOAT, ((1 << bits) - 1) / 2)
    return [b.fsub(b.sitofp(part, number), middle) for part in whole]


@intrinsic(prefer_literal=True)
def add_product(typing, total, query, codes, ninths, scale, bits):  # type: ignore[no-untyped-def]
    """`total` plus `query · decode(group)`, lane by lane: addresses of 32 float32, and of the codes of a group."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        number = vector_of(FLOAT)
        own = every(FLOAT, 0.0)
        for index, part in enumerate(_numbers(b, args[2], args[3], bits.literal_value)):
            own = multiply_add(b, b.load(element(b, args[1], number, index), align=4), part, own)
        return multiply_add(b, own, broadcast(b, args[4]), args[0])

    return VECTOR(VECTOR, types.int64, types.int64, types.int64, types.float32, bits), emit


@intrinsic(prefer_literal=True)
def add_share(typing, mixed, factor, codes, bits):  # type: ignore[no-untyped-def]
    """Adds `factor · codes` of a group to the 32 float32 at `mixed`. No value has a ninth bit."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        wide_factor = broadcast(b, args[1])
        for index, part in enumerate(_numbers(b, args[2], args[2], bits.literal_value)):
            target = element(b, args[0], part.type, index)
            b.store(multiply_add(b, part, wide_factor, b.load(target, align=4)), target, align=4)
        return context.get_dummy_value()

    return types.none(types.int64, types.float32, types.int64, bits), emit


@register_jitable
def apart(values, spare):  # type: ignore[no-untyped-def]
    """The even elements of each group before the odd ones, in place."""
    for group in range(values.size // GROUP):
        own = values[group * GROUP : (group + 1) * GROUP]
        for k in range(GROUP // 2):
            spare[k], spare[GROUP // 2 + k] = own[2 * k], own[2 * k + 1]
        for k in range(GROUP):
            own[k] = spare[k]


@register_jitable
def together(values, spare):  # type: ignore[no-untyped-def]
    """The inverse of `apart`."""
    for group in range(values.size // GROUP):
        own = values[group * GROUP : (group + 1) * GROUP]
        for k in range(GROUP // 2):
            spare[2 * k], spare[2 * k + 1] = own[k], own[GROUP // 2 + k]
        for k in range(GROUP):
            own[k] = spare[k]


@cache
def rope_append(key_bits: int, value_bits: int, normed: bool, turned: bool) -> Any:
    """Normalises heads where the model does, `normed`, rotates queries and keys, turns heads where pages are kept
    turned, `turned`, and stores keys and values; heads are shared out.

    Operands: qkv float32 [m, (heads + 2·kv_heads)·dim], rotated in place; cos, sin float32 [m, pairs]; weights float32
    [dim] of the norms of q and k or 0, their epsilon float32 [1]; slots int64 [m]; pages of keys, then of values, each
    as `place` has them; m, heads, kv_heads, dim, pairs. Bits are 16 for bfloat16, and those of `kernels.steps`.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = array_at(arguments, 26, np.int64)
        m, heads, kv_heads, dim, pairs = a[21], a[22], a[23], a[24], a[25]
        each = heads + 2 * kv_heads
        qkv = array_at(a[0], (m, each, dim), np.float32)
        cos, sin = array_at(a[1], (m, pairs), np.float32), array_at(a[2], (m, pairs), np.float32)
        epsilon = array_at(a[5], 1, np.float32)[0]
        slots = array_at(a[6], m, np.int64)
        for job in range(m * each * thread // threads, m * each * (thread + 1) // threads):
            text, head = job // each, job % each
            values = qkv[text, head]
            if head < heads + kv_heads:
                if normed:
                    weight = array_at(a[3] if head < heads else a[4], dim, np.float32)
                    normalised(values, weight, epsilon, values)
                for i in range(pairs):
                    one, other = values[i], values[i + pairs]
                    values[i] = one * cos[text, i] - other * sin[text, i]
                    values[i + pairs] = other * cos[text, i] + one * sin[text, i]
            if turned:
                turn(values, a[13] if head < heads + kv_heads else a[20])
            if head >= heads:
                is_value, kept = (head - heads) // kv_heads, (head - heads) % kv_heads
                side = a[14:21] if is_value else a[7:14]
                page, at = slots[text] // PAGE, slots[text] % PAGE
                codes = side[0] + page * side[2] + kept * side[3]
                scales = side[1] + page * side[4] + kept * side[5]
                if is_value:
                    if value_bits == 16:
                        store_halves(values, codes + 2 * at * dim)
                    else:
                        row = codes + at * (dim * value_bits // 8)
                        store(values, row, scales + 2 * at * (dim // GROUP), value_bits)
                else:  # a condition that is constant is left out only where it stands alone
                    if key_bits == 16:
                        store_halves(values, codes + 2 * at * dim)
                    else:
                        row = codes + at * (dim * key_bits // 8)
                        store(values, row, scales + 2 * at * (dim // GROUP), key_bits)

    return operation(kernel)


@cache
def attend(key_bits: int, value_bits: int, turned: bool) -> Any:
    """One new token of each row over its whole past, itself included; heads of rows are shared out. `turned`: values
    are kept so, and what is mixed of them is turned back.

    Operands: qkv as `rope_append` leaves it; y float32 [m, heads·dim]; pages as there; table int32 [m, most], lengths
    int32 [m]; scratch float32 [threads at most, most·256 + dim]; scale float32 [1]; window, 0 for none; m, heads,
    kv_heads, dim, most.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = array_at(arguments, 26, np.int64)
        m, heads, kv_heads, dim, most = a[21], a[22], a[23], a[24], a[25]
        qkv = array_at(a[0], (m, heads + 2 * kv_heads, dim), np.float32)
        y = array_at(a[1], (m, heads, dim), np.float32)
        table, lengths = array_at(a[16], (m, most), np.int32), array_at(a[17], m, np.int32)
        scratch = array_at(a[18] + 4 * thread * (most * PAGE + dim), most * PAGE + dim, np.float32)
        scores, spare = scratch[: most * PAGE], scratch[most * PAGE :]
        scale, window = array_at(a[19], 1, np.float32)[0], a[20]
        key_width, value_width, groups = dim * key_bits // 8, dim * value_bits // 8, dim // GROUP
        each = heads + 2 * kv_heads
        for job in range(m * heads * thread // threads, m * heads * (thread + 1) // threads):
            row, head = job // heads, job % heads
            group, query, length = head // (heads // kv_heads), qkv[row, head], np.int64(lengths[row])
            start = larger(0, length - window) if window else 0
            top = np.float32(-np.inf)
            if key_bits == 4:
                apart(query, spare)
            asked = a[0] + 4 * (row * each + head) * dim
            for first in range(start // PAGE * PAGE, length, PAGE):
                page = table[row, first // PAGE]
                codes, steps = a[2] + page * a[4] + group * a[5], a[3] + page * a[6] + group * a[7]
                keys = array_at(codes, (PAGE, dim), np.uint16)
                for position in range(larger(start, first), smaller(first + PAGE, length)):
                    at, score = position - first, np.float32(0)
                    if key_bits == 16:
                        for k in range(dim):
                            score += query[k] * wide(keys[at, k])
                    else:
                        scales = array_at(steps + 2 * at * groups, groups, np.uint16)
                        mine, summed = codes + at * key_width, vectors(1)[0]
                        for g in range(groups):
                            here, ninths = mine + g * (GROUP if key_bits > 4 else GROUP // 2), mine + dim + 4 * g
                            summed = add_product(
                                summed, asked + 4 * GROUP * g, here, ninths, as_float(scales[g]), key_bits
                            )
                        score = sum_of_lanes(summed)
                    score *= scale
                    scores[position] = score
                    top = larger(score, top)
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
                values = array_at(codes, (PAGE, dim), np.uint16)
                for position in range(larger(start, first), smaller(first + PAGE, length)):
                    at, share = position - first, scores[position]
                    if value_bits == 16:
                        for k in range(dim):
                            mixed[k] += share * wide(values[at, k])
                    else:
                        scales = array_at(steps + 2 * at * groups, groups, np.uint16)
                        mine = codes + at * value_width
                        for g in range(groups):
                            here = mine + g * (GROUP if value_bits > 4 else GROUP // 2)
                            add_share(found + 4 * GROUP * g, share * as_float(scales[g]), here, value_bits)
            if value_bits == 4:
                together(mixed, spare)
            for k in range(dim):
                mixed[k] = mixed[k] / total + wrong
            if turned:
                turn(mixed, a[15])

    return operation(kernel, **REORDERED)
