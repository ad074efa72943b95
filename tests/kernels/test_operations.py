"""The operations of a decode step on the CPU against `ReferenceSteps` in float32, in one, two and three threads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.kernels import operations
from quantkit.kernels.program import Program
from quantkit.kernels.steps import PAGE, Pages, ReferenceSteps

THREADS = (1, 2, 3)
steps = ReferenceSteps()


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _alone(operation, operands, threads: int) -> None:
    program = Program()
    program.add(operation, operands)
    program.run(threads)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (5, 96), (4, 33)])
def test_rms_norm(rows: int, width: int, joins: bool, threads: int) -> None:
    hidden, update, weight = _random(rows, width), _random(rows, width, seed=1), _random(width, seed=2)
    y, mine = torch.empty(rows, width), hidden.clone()
    epsilon = np.array([1e-5], np.float32)
    _alone(operations.rms_norm(), (mine, update if joins else None, weight, epsilon, y, rows, width), threads)
    expected = hidden + update if joins else hidden
    assert torch.equal(mine, expected)
    torch.testing.assert_close(y, F.rms_norm(expected, (width,), weight, 1e-5), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (3, 50)])
def test_silu_mul(rows: int, width: int, threads: int) -> None:
    gate, up = _random(rows, width) * 20, _random(rows, width, seed=1)
    gate[0, :6] = torch.tensor([200.0, -200.0, 0.0, -87.5, 88.5, -100.0])
    y = torch.empty(rows, width)
    _alone(operations.silu_mul(), (torch.cat((gate, up), 1), y, rows, width), threads)
    torch.testing.assert_close(y, F.silu(gate) * up, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_silu_mul_hides_nothing(value: float) -> None:
    both, y = torch.cat((torch.full((1, 4), value), torch.ones(1, 4)), 1), torch.empty(1, 4)
    _alone(operations.silu_mul(), (both, y, 1, 4), 1)
    assert not bool(torch.isfinite(y).any())


def _pages(pages: int, kv_heads: int, dim: int, *, heads_first: bool, seed: int) -> Pages:
    """Pages with numbers in them, whose heads or whose pages lie further apart."""
    shape = (kv_heads, pages, PAGE, dim) if heads_first else (pages, kv_heads, PAGE, dim)
    codes = _random(*shape, seed=seed).to(torch.bfloat16)
    return Pages(codes.transpose(0, 1) if heads_first else codes, None, 16)


def _place(keys: Pages, values: Pages) -> tuple[int, ...]:
    apart = [side.codes.stride(axis) for axis in (0, 1) for side in (keys, values)]
    return keys.codes.data_ptr(), values.codes.data_ptr(), *apart


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("pairs", [8, 16])
def test_rope_append(pairs: int, norms: bool, heads_first: bool, threads: int) -> None:
    rows, heads, kv_heads, dim = 3, 6, 2, 32
    q, k, v = (_random(rows, n, dim, seed=n) for n in (heads, kv_heads, 7))
    v = v[:, :kv_heads].contiguous()
    angles = _random(rows, pairs, seed=9)
    cos, sin = angles.cos(), angles.sin()
    slots = torch.tensor([0, PAGE + 255, 2 * PAGE + 17])
    sides = [_pages(3, kv_heads, dim, heads_first=heads_first, seed=seed) for seed in (1, 2)]
    before = [side.codes.clone() for side in sides]
    weights = [_random(dim, seed=seed) for seed in (3, 4)] if norms else [None, None]
    qkv = torch.cat((q, k, v), 1).view(rows, -1).clone()
    epsilon = np.array([1e-6], np.float32)
    operands = (qkv, cos, sin, *weights, epsilon, slots, *_place(*sides), rows, heads, kv_heads, dim, pairs)
    _alone(operations.rope_append(), operands, threads)
    if norms:
        q, k = (F.rms_norm(part, (dim,), weight, 1e-6) for part, weight in zip((q, k), weights, strict=True))
    mine = [Pages.empty(3, kv_heads, dim, 16, torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    turned = steps.rope_append(q.to(torch.bfloat16), k.to(torch.bfloat16), v.to(torch.bfloat16), cos, sin, slots, *mine)
    found = qkv.view(rows, -1, dim)[:, :heads]
    torch.testing.assert_close(found, turned.to(torch.float32), rtol=2e-2, atol=2e-2)
    # In float32 the turn is exact: the reference rounds what it turns to halves first.
    one, other = q[..., :pairs], q[..., pairs : 2 * pairs]
    c, s = cos[:, None], sin[:, None]
    exact = torch.cat((one * c - other * s, other * c + one * s, q[..., 2 * pairs :]), -1)
    torch.testing.assert_close(found, exact, rtol=3e-6, atol=3e-6)
    for side, old, expected in zip(sides, before, mine, strict=True):
        pages, at = slots // PAGE, slots % PAGE
        stored = side.codes[pages, :, at]
        torch.testing.assert_close(stored.float(), expected.codes[pages, :, at].float(), rtol=2e-2, atol=2e-2)
        kept = side.codes.clone()
        kept[pages, :, at] = old[pages, :, at]
        assert torch.equal(kept, old)  # nothing else was touched


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("window", [0, 1, 100, 300])
@pytest.mark.parametrize("heads_first", [False, True])
def test_attend(heads_first: bool, window: int, threads: int) -> None:
    rows, heads, kv_heads, dim, most = 4, 6, 2, 32, 3
    keys, values = (_pages(6, kv_heads, dim, heads_first=heads_first, seed=seed) for seed in (1, 2))
    table = torch.tensor([[5, 0, 3], [2, 0, 0], [1, 4, 0], [0, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([700, 256, 257, 1], dtype=torch.int32)
    qkv = _random(rows, (heads + 2 * kv_heads) * dim, seed=3)
    y, scores = torch.empty(rows, heads * dim), torch.empty(max(THREADS), most * PAGE)
    scale = np.array([dim**-0.5], np.float32)
    sizes = (rows, heads, kv_heads, dim, most)
    operands = (qkv, y, *_place(keys, values), table, lengths, scores, scale, window, *sizes)
    _alone(operations.attend(), operands, threads)
    q = qkv.view(rows, -1, dim)[:, :heads].contiguous()
    expected = steps.attend(q, keys, values, table, lengths, dim**-0.5, window=window)
    torch.testing.assert_close(y.view(rows, heads, dim), expected.to(torch.float32), rtol=1e-5, atol=1e-5)


def test_attend_hides_no_nan_of_a_key() -> None:
    keys, values = (_pages(1, 1, 32, heads_first=False, seed=seed) for seed in (1, 2))
    keys.codes[0, 0, 3, 5] = float("nan")
    table, scores = torch.zeros(2, 1, dtype=torch.int32), torch.empty(1, PAGE)
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    y = torch.empty(2, 32)
    scale = np.array([1], np.float32)
    operands = (_random(2, 96), y, *_place(keys, values), table, lengths, scores, scale, 0, 2, 1, 1, 32, 1)
    _alone(operations.attend(), operands, 1)
    assert bool(torch.isfinite(y[0]).all())
    assert bool(torch.isnan(y[1]).all())


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 64, 50), (4, 33, 7)])
def test_dense_product(rows: int, width: int, out: int, biased: bool, threads: int) -> None:
    x, weight = _random(rows, width), _random(out, width, seed=1).to(torch.bfloat16)
    bias = _random(out, seed=2) if biased else None
    y = torch.full((rows, out + 5), 7.0)
    _alone(operations.dense_product(), (x, weight, bias, y, 3, rows, width, width, out, out + 5), threads)
    expected = F.linear(x, weight.to(torch.float32), bias)
    torch.testing.assert_close(y[:, 3 : 3 + out], expected, rtol=1e-5, atol=1e-5)
    assert bool((y[:, :3] == 7).all())
    assert bool((y[:, 3 + out :] == 7).all())


def test_a_row_gets_the_same_bits_in_every_batch_and_any_number_of_threads() -> None:
    x, weight = _random(4, 100), _random(300, 100, seed=1).to(torch.bfloat16)

    def dense(rows: Tensor, threads: int) -> Tensor:
        y = torch.empty(len(rows), 300)
        _alone(operations.dense_product(), (rows, weight, None, y, 0, len(rows), 100, 100, 300, 300), threads)
        return y

    alone = torch.cat([dense(row, 1) for row in x.split(1)])
    assert torch.equal(dense(x, 1), alone)
    assert torch.equal(dense(x, 3), alone)
