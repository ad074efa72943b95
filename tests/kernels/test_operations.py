"""The operations of a decode step on the CPU against torch in float32, in one, two and three threads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from one_operation import random, run_alone
from torch import Tensor

from quantkit.kernels import operations

THREADS = (1, 2, 3)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (5, 96), (4, 33)])
def test_rms_norm(rows: int, width: int, joins: bool, threads: int) -> None:
    hidden, update, weight = random(rows, width), random(rows, width, seed=1), random(width, seed=2)
    y, mine = torch.empty(rows, width), hidden.clone()
    epsilon = np.array([1e-5], np.float32)
    run_alone(operations.rms_norm(), (mine, update if joins else None, weight, epsilon, y, rows, width), threads)
    expected = hidden + update if joins else hidden
    assert torch.equal(mine, expected)
    torch.testing.assert_close(y, F.rms_norm(expected, (width,), weight, 1e-5), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (3, 50)])
def test_silu_mul(rows: int, width: int, threads: int) -> None:
    gate, up = random(rows, width) * 20, random(rows, width, seed=1)
    gate[0, :6] = torch.tensor([200.0, -200.0, 0.0, -87.5, 88.5, -100.0])
    y = torch.empty(rows, width)
    run_alone(operations.silu_mul(), (torch.cat((gate, up), 1), y, rows, width), threads)
    torch.testing.assert_close(y, F.silu(gate) * up, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_silu_mul_hides_nothing(value: float) -> None:
    both, y = torch.cat((torch.full((1, 4), value), torch.ones(1, 4)), 1), torch.empty(1, 4)
    run_alone(operations.silu_mul(), (both, y, 1, 4), 1)
    assert not bool(torch.isfinite(y).any())


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 64, 50), (4, 33, 7)])
def test_dense_product(rows: int, width: int, out: int, biased: bool, threads: int) -> None:
    x, weight = random(rows, width), random(out, width, seed=1).to(torch.bfloat16)
    bias = random(out, seed=2) if biased else None
    y = torch.full((rows, out + 5), 7.0)
    run_alone(operations.dense_product(), (x, weight, bias, y, 3, rows, width, width, out, out + 5), threads)
    expected = F.linear(x, weight.to(torch.float32), bias)
    torch.testing.assert_close(y[:, 3 : 3 + out], expected, rtol=1e-5, atol=1e-5)
    assert bool((y[:, :3] == 7).all())
    assert bool((y[:, 3 + out :] == 7).all())


def test_a_row_gets_the_same_bits_in_every_batch_and_any_number_of_threads() -> None:
    x, weight = random(4, 100), random(300, 100, seed=1).to(torch.bfloat16)

    def dense(rows: Tensor, threads: int) -> Tensor:
        y = torch.empty(len(rows), 300)
        run_alone(operations.dense_product(), (rows, weight, None, y, 0, len(rows), 100, 100, 300, 300), threads)
        return y

    alone = torch.cat([dense(row, 1) for row in x.split(1)])
    assert torch.equal(dense(x, 1), alone)
    assert torch.equal(dense(x, 3), alone)
