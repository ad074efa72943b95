"""Arrays at an address and plain arithmetic, as kernels use them."""

import math

import numpy as np
import pytest
import torch
from one_operation import run_alone

from quantkit.kernels.jit import compiled
from quantkit.kernels.program import operation
from quantkit.kernels.views import array_at, exponential, larger, room, smaller

NAN = float("nan")


@operation
def _sum_planes(thread, threads, arguments):  # type: ignore[no-untyped-def]
    a = array_at(arguments, 4, np.int64)
    numbers = array_at(a[0], (a[2], a[3], 2), np.float32)
    sums = array_at(a[1], (a[2], a[3]), np.float32)
    own = room(2, np.float32)
    for i in range(a[2]):
        for j in range(a[3]):
            for k in range(2):
                own[k] = numbers[i, j, k]
            sums[i, j] = own[0] + own[1]


@compiled
def _each(values, others, out):  # type: ignore[no-untyped-def]
    for k in range(values.size):
        out[0, k], out[1, k] = larger(values[k], others[k]), smaller(values[k], others[k])
        out[2, k] = exponential(values[k])


@compiled
def _whole(one, other):  # type: ignore[no-untyped-def]
    return larger(one, other), smaller(one, other)


def test_arrays_are_what_lies_at_their_address() -> None:
    numbers, sums = torch.randn(3, 5, 2), torch.empty(3, 5)
    run_alone(_sum_planes, (numbers, sums, 3, 5), 1)
    assert torch.equal(sums, numbers.sum(2))


def test_the_larger_and_the_smaller_of_two_numbers() -> None:
    values, others = np.array([1, -2, 0, NAN, 5], np.float32), np.array([2, -3, 0, 7, NAN], np.float32)
    out = np.empty((3, 5), np.float32)
    _each(values, others, out)
    np.testing.assert_array_equal(out[0], np.array([2, -2, 0, 7, NAN], np.float32))
    np.testing.assert_array_equal(out[1], np.array([1, -3, 0, 7, NAN], np.float32))
    assert _whole(-(2**40), 3) == (3, -(2**40))


@pytest.mark.parametrize("reach", [1, 20, 87])
def test_exponential(reach: int) -> None:
    values = np.linspace(-reach, reach, 1001, dtype=np.float32)
    out = np.empty((3, 1001), np.float32)
    _each(values, values, out)
    np.testing.assert_allclose(out[2], np.exp(values.astype(np.float64)), rtol=2e-6 + 1e-7 * reach)


def test_exponential_is_held_within_what_float32_has() -> None:
    values, out = np.array([1000, -1000], np.float32), np.empty((3, 2), np.float32)
    _each(values, values, out)
    assert [math.log2(value) for value in out[2]] == [126, -126]
