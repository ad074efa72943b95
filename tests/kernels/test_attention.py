"""Attention of a decode step on the CPU against `ReferenceSteps` in float32, for every form of the cache."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from one_operation import random, run_alone
from torch import Tensor

from quantkit.kernels import attention
from quantkit.kernels.steps import PAGE, Pages, ReferenceSteps, encode, turn, write

THREADS = (1, 2, 3)
steps = ReferenceSteps()


def _pages(pages: int, kv_heads: int, dim: int, bits: int, *, heads_first: bool, seed: int) -> Pages:
    """Pages with numbers in them, whose heads or whose pages lie further apart."""
    shape = (kv_heads, pages, PAGE, dim) if heads_first else (pages, kv_heads, PAGE, dim)
    numbers = random(*shape, seed=seed)
    codes, scales = (numbers.to(torch.bfloat16), None) if bits == 16 else encode(numbers, bits)
    if heads_first:
        codes, scales = codes.transpose(0, 1), None if scales is None else scales.transpose(0, 1)
    return Pages(codes, scales, bits, 1 if bits == 16 else dim & -dim)


FORMATS = [(16, 16), (9, 8), (8, 4), (4, 4)]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(("norms", "pairs"), [(False, 16), (True, 8)])
@pytest.mark.parametrize(("bits", "dim"), [*((form, 32) for form in FORMATS), ((9, 8), 96), ((16, 16), 40)])
def test_rope_append(bits, dim: int, pairs: int, norms: bool, heads_first: bool, threads: int) -> None:
    """Beside the reference, which is given bfloat16: what is stored may be the next code."""
    rows, heads, kv_heads = 3, 6, 2
    q, k, v = (random(rows, n, dim, seed=seed) for n, seed in ((heads, 1), (kv_heads, 2), (kv_heads, 3)))
    angles = random(rows, pairs, seed=9)
    cos, sin = angles.cos(), angles.sin()
    slots = torch.tensor([0, PAGE + 255, 2 * PAGE + 17])
    sides = [_pages(3, kv_heads, dim, own, heads_first=heads_first, seed=seed) for own, seed in zip(bits, (1, 2), strict=True)]
    before = [side.codes.clone() for side in sides]
    weights = [random(dim, seed=seed) for seed in (3, 4)] if norms else [None, None]
    qkv = torch.cat((q, k, v), 1).view(rows, -1).clone()
    epsilon = np.array([1e-6], np.float32)
    pages = (*attention.place(sides[0]), *attention.place(sides[1]))
    operands = (qkv, cos, sin, *weights, epsilon, slots, *pages, rows, heads, kv_heads, dim, pairs)
    run_alone(attention.rope_append(*bits, norms, bits != (16, 16)), operands, threads)
    if norms:
        q, k = (F.rms_norm(part, (dim,), weight, 1e-6) for part, weight in zip((q, k), weights, strict=True))
    c, s = cos[:, None], sin[:, None]

    def turned(x: Tensor, block: int) -> Tensor:
        one, other = x[..., :pairs], x[..., pairs : 2 * pairs]
        return turn(torch.cat((one * c - other * s, other * c + one * s, x[..., 2 * pairs :]), -1), block)

    found = qkv.view(rows, -1, dim)
    torch.testing.assert_close(found[:, :heads], turned(q, sides[0].block), rtol=3e-6, atol=3e-6)
    exact = (turned(k, sides[0].block), turn(v, sides[1].block))
    for side, old, expected in zip(sides, before, exact, strict=True):
        page, at = slots // PAGE, slots % PAGE
        stored = steps.kv_read(side, slots, torch.float32)
        written = Pages.empty(3, kv_heads, dim, side.bits, torch.bfloat16, torch.device("cpu")) if dim % 32 == 0 else None
        if written is None:
            torch.testing.assert_close(stored, expected, rtol=2**-8, atol=0)
        else:
            write(written, expected, slots)
            step = expected.abs().max() / (2 ** (min(side.bits, 9) - 1) - 0.5)
            assert float((stored - steps.kv_read(written, slots, torch.float32)).abs().max()) <= 1.01 * float(step)
            same = side.codes[page, :, at] == written.codes[page, :, at]
            assert float(same.float().mean()) > 0.98
        kept = side.codes.clone()
        kept[page, :, at] = old[page, :, at]
        assert torch.equal(kept, old)  # nothing else was touched


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("window", [0, 1, 100, 300])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(("bits", "dim"), [*((form, 32) for form in FORMATS), ((9, 8), 96), ((4, 4), 64), ((16, 16), 40)])
def test_attend(bits, dim: int, heads_first: bool, window: int, threads: int) -> None:
    rows, heads, kv_heads, most = 4, 6, 2, 3
    keys, values = (
        _pages(6, kv_heads, dim, own, heads_first=heads_first, seed=seed) for own, seed in zip(bits, (1, 2), strict=True)
    )
    table = torch.tensor([[5, 0, 3], [2, 0, 0], [1, 4, 0], [0, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([700, 256, 257, 1], dtype=torch.int32)
    qkv = random(rows, (heads + 2 * kv_heads) * dim, seed=3)
    q = qkv.view(rows, -1, dim)[:, :heads].clone()
    y, scratch = torch.empty(rows, heads * dim), torch.empty(max(THREADS), most * PAGE + dim)
    scale = np.array([dim**-0.5], np.float32)
    pages, sizes = (*attention.place(keys), *attention.place(values)), (rows, heads, kv_heads, dim, most)
    operation = attention.attend(*bits, bits != (16, 16))
    run_alone(operation, (qkv, y, *pages, table, lengths, scratch, scale, window, *sizes), threads)
    expected = steps.attend(q, keys, values, table, lengths, dim**-0.5, window=window)
    torch.testing.assert_close(y.view(rows, heads, dim), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", FORMATS)
def test_what_is_not_finite_is_not_hidden(bits) -> None:
    """Stored and read again: every later token sees it, whatever the codes."""
    dim = 32
    keys, values = (_pages(1, 1, dim, own, heads_first=False, seed=seed) for own, seed in zip(bits, (1, 2), strict=True))
    pages = (*attention.place(keys), *attention.place(values))
    for poisoned in (1, 2):
        qkv = random(1, 3 * dim, seed=poisoned)
        qkv.view(3, dim)[poisoned, 5] = float("nan")
        cos = torch.ones(1, 16)
        slots, one = torch.tensor([3 * poisoned]), np.array([1], np.float32)
        operands = (qkv, cos, cos * 0, None, None, one, slots, *pages, 1, 1, 1, dim, 16)
        run_alone(attention.rope_append(*bits, False, True), operands, 1)
        table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([3 * poisoned, 9], dtype=torch.int32)
        y, scratch = torch.empty(2, dim), torch.empty(1, PAGE + dim)
        asked = (random(2, 3 * dim), y, *pages, table, lengths, scratch, one, 0, 2, 1, 1, dim, 1)
        run_alone(attention.attend(*bits, True), asked, 1)
        assert bool(torch.isfinite(y[0]).all()) == (poisoned == 1)
        assert not bool(torch.isfinite(y[1]).any()) or (bits[1] == 16 and poisoned == 2)
