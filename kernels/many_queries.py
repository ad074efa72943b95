"""Causal attention of many queries at once on the CPU, in bfloat16, as operations of a `Program`.

    mixed = attend(q, k, v, scale=0.125, window=0, threads=2)          # [heads, s, d], [kv_heads, t, d] → [s, heads, d]

Keys and values are laid out anew in words of two bfloat16 for the products of `pairs.py`: of keys, two neighbouring
elements of a head, 16 keys side by side; of values, one element of two neighbouring positions. Sixteen queries are
taken through all of their past before the next: scores in float32, softmax in float32, its exponentials rounded to
bfloat16. (Dao et al. 2022, FlashAttention, with whole rows for tiles)

Every sum of a query runs over its own past in order, from the first position on: how many queries come at once changes
no bit. Torch's kernel does a third as much in the same time.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from quantkit.kernels.lanes import FLOAT, I32, LANES, VECTOR, element, vector_of, vectors
from quantkit.kernels.operations import REORDERED, narrow
from quantkit.kernels.pairs import ACROSS, TILE, add_pairs, keep
from quantkit.kernels.program import Program, operation
from quantkit.kernels.views import array_at, exponential, larger, smaller

# Queries that share what is read of the past, two tiles.
ROWS = 2 * TILE


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, threads: int) -> Tensor:
    """q [heads, s, d], the last s of t positions, k and v [kv_heads, t, d], all bfloat16 and d even → bfloat16
    [s, heads, d]. A query sees itself and all before it, or so many as `window` says; 0 is all."""
    (heads, queries, dim), (kv_heads, positions, _) = q.shape, k.shape
    assert scale > 0 and k.shape == v.shape == (kv_heads, positions, dim) and queries <= positions
    assert heads % kv_heads == 0 and dim % 2 == 0
    q = q if q.stride(2) == 1 else q.contiguous()
    length, wide = -(-positions // ACROSS) * ACROSS, -(-dim // ACROSS) * ACROSS
    y = torch.empty(queries, heads, dim, dtype=torch.bfloat16)
    scratch = torch.empty(threads, ROWS * (length + length // 2 + wide + dim // 2))
    factor = np.array([scale], np.float32)
    words = (_words_of_keys(k, length), _words_of_values(v, length, wide))
    sizes = (heads, queries, window, kv_heads, positions, dim, length, wide)
    program = Program()
    program.add(mix(), (q.data_ptr(), q.stride(0), q.stride(1), *words, y, scratch, factor, *sizes))
    program.run(threads)
    return y


def _words_of_keys(k: Tensor, length: int) -> Tensor:
    """bfloat16 [kv_heads, t, d] → int32 [kv_heads, length/16, d/2, 16]; zeros where there are no keys."""
    words = _padded(k, length, k.shape[2]).contiguous().view(torch.int32)
    return words.unflatten(1, (-1, LANES)).transpose(2, 3).contiguous()


def _words_of_values(v: Tensor, length: int, wide: int) -> Tensor:
    """bfloat16 [kv_heads, t, d] → int32 [kv_heads, length/2, wide]; zeros where there are none."""
    pairs = _padded(v, length, wide).unflatten(1, (-1, 2)).transpose(2, 3)
    return pairs.contiguous().view(torch.int32).squeeze(-1)


def _padded(part: Tensor, length: int, wide: int) -> Tensor:
    if part.shape[1:] == (length, wide):
        return part
    return F.pad(part, (0, wide - part.shape[2], 0, length - part.shape[1]))


@cache
def mix() -> Any:
    """The operation that mixes values; heads of sixteen queries are shared out.

    Operands: queries bfloat16, elements from a head to the next and from a position to the next; words of keys and of
    values; y bfloat16 [s, heads, d]; scratch float32 [threads, 16·(length·3/2 + wide + d/2)]; scale float32 [1];
    heads, s, window or 0; kv_heads, t, d, length, wide.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = array_at(arguments, 16, np.int64)
        heads, queries, window, kv_heads, positions = a[8], a[9], a[10], a[11], a[12]
        dim, length, wide = a[13], a[14], a[15]
        scale = array_at(a[7], 1, np.float32)[0]
        scores_at = a[6] + 4 * thread * ROWS * (length + length // 2 + wide + dim // 2)
        shares_at = scores_at + 4 * ROWS * length
        mixed_at = shares_at + 2 * ROWS * length
        asked_at = mixed_at + 4 * ROWS * wide
        blocks = -(-queries // ROWS)
        for job in range(thread, heads * blocks, threads):
            head, first = job // blocks, job % blocks * ROWS
            count = smaller(ROWS, queries - first)
            before = positions - queries + first
            start = larger(0, before + 1 - window) // ACROSS * ACROSS if window else 0
            end = -(-(before + count) // ACROSS) * ACROSS
            for r in range(ROWS):
                at = first + smaller(r, count - 1)
                query = array_at(a[0] + 2 * (head * a[1] + at * a[2]), dim, np.uint16)
                asked = array_at(asked_at + 2 * r * dim, dim, np.uint16)
                for c in range(dim):
                    asked[c] = query[c]
            group = head // (heads // kv_heads)
            keys, values = a[3] + 2 * group * length * dim, a[4] + 2 * group * length * wide
            for strip in range(start, end, ACROSS):
                for row in range(0, ROWS, TILE):
                    total = vectors(16)
                    for pair in range(dim // 2):
                        word = keys + 4 * (strip * (dim // 2) + pair * LANES)
                        total = add_pairs(total, asked_at + 2 * row * dim + 4 * pair, 2 * dim, word, 2 * LANES * dim)
                    keep(total, scores_at + 4 * (row * length + strip), 4 * length)
            for r in range(count):
                # Loops begin with 0: Numba reads what may be negative one by one, as it may count from the end.
                last = before + r + 1
                first_seen = larger(start, last - window) if window else start
                own_at, share_at = scores_at + 4 * r * length, shares_at + 2 * r * length
                for part_at, part_end in ((start, first_seen), (last, end)):
                    own = array_at(own_at + 4 * part_at, part_end - part_at, np.float32)
                    share = array_at(share_at + 2 * part_at, part_end - part_at, np.uint16)
                    for at in range(part_end - part_at):
                        own[at], share[at] = -np.inf, 0
                highest = load(own_at + 4 * start)
                for at in range(start + LANES, end, LANES):
                    highest = larger_lanes(highest, load(own_at + 4 * at))
                top = largest_lane(highest) * scale
                own = array_at(own_at + 4 * first_seen, last - first_seen, np.float32)
                share = array_at(share_at + 2 * first_seen, last - first_seen, np.uint16)
                total_share, wrong = np.float32(0), np.float32(0)
                for at in range(last - first_seen):
                    score = own[at] * scale
                    part = exponential(score - top)
                    wrong += score * np.float32(0)
                    total_share += part
                    share[at] = narrow(part)
                own = array_at(own_at, 2, np.float32)
                own[0] = total_share
                own[1] = wrong
            for column in range(0, wide, ACROSS):
                for row in range(0, ROWS, TILE):
                    total = vectors(16)
                    for pair in range(start // 2, end // 2):
                        words = values + 4 * (pair * wide + column)
                        total = add_pairs(total, shares_at + 2 * row * length + 4 * pair, 2 * length, words, 4 * LANES)
                    keep(total, mixed_at + 4 * (row * wide + column), 4 * wide)
            for r in range(count):
                own = array_at(scores_at + 4 * r * length, 2, np.float32)
                inverse, wrong = np.float32(1) / own[0], own[1]
                row_of_y = array_at(a[5] + 2 * dim * ((first + r) * heads + head), dim, np.uint16)
                row_of_mixed = array_at(mixed_at + 4 * r * wide, dim, np.float32)
                for c in range(dim):
                    row_of_y[c] = narrow(row_of_mixed[c] * inverse + wrong)

    return operation(kernel, **REORDERED)


# --- intrinsics


@intrinsic
def load(typing, address):  # type: ignore[no-untyped-def]
    """16 float32."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return b.load(element(b, args[0], vector_of(FLOAT)), align=4)

    return VECTOR(types.int64), emit


@intrinsic
def larger_lanes(typing, one, other):  # type: ignore[no-untyped-def]
    """Lane by lane."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return b.select(b.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return VECTOR(VECTOR, VECTOR), emit


@intrinsic
def largest_lane(typing, vector):  # type: ignore[no-untyped-def]
    """float32."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        lanes = [b.extract_element(args[0], I32(lane)) for lane in range(LANES)]
        while len(lanes) > 1:
            pairs = zip(lanes[::2], lanes[1::2], strict=True)
            lanes = [b.select(b.fcmp_ordered(">", one, other), one, other) for one, other in pairs]
        return lanes[0]

    return types.float32(VECTOR), emit
