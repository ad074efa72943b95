"""Products of bfloat16 rows with themselves: what holds of them beyond the sweep in test_protocol.py."""

import pytest
import torch
from torch import Tensor

from quantkit.kernels import gram
from quantkit.kernels.pairs import HAS_PAIR_PRODUCTS

pytestmark = pytest.mark.skipif(not HAS_PAIR_PRODUCTS, reason="this processor multiplies no pairs of bfloat16")


def _rows(tokens: int, features: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(tokens + features)
    scale = torch.logspace(-2, 2, features)
    rows = (torch.randn(tokens, features, generator=random) * scale).to(torch.bfloat16)
    return rows, torch.rand(tokens, generator=random) * 3


def _added(rows: Tensor, factors: Tensor, threads: int = 1) -> Tensor:
    total = torch.zeros(rows.shape[1], rows.shape[1])
    gram.add(total, rows, factors, threads=threads)
    return total.triu()


@pytest.mark.parametrize("features", [1, 2, 31, 32, 33, 64, 100, 200])
@pytest.mark.parametrize("tokens", [1, 2, 5, 64, 301])
def test_it_is_the_product_of_the_rounded_rows(tokens: int, features: int) -> None:
    rows, factors = _rows(tokens, features)
    factors[tokens // 2] = 0
    found = _added(rows, factors)
    rounded = (rows.float() * factors[:, None]).bfloat16().double()
    exact = (rounded.T @ rounded).triu()
    scale = rounded.norm(dim=0)
    bound = 2**-22 * tokens**0.5 + 2**-24  # float32 sums, each rounded once for a pair
    assert ((found - exact).abs() / (scale[:, None] * scale + 1e-30)).max() <= bound


def test_rounding_of_scaled_rows_is_all_that_it_loses() -> None:
    rows, factors = _rows(1000, 70)
    scaled = rows.double() * factors.double()[:, None]
    exact, scale = (scaled.T @ scaled).triu(), scaled.norm(dim=0)
    error = ((_added(rows, factors) - exact).abs() / (scale[:, None] * scale)).max()
    assert 2**-14 < error < 2**-8  # two roundings of half a unit in the eighth bit, averaged over tokens


def test_threads_change_no_bit() -> None:
    rows, factors = _rows(129, 170)
    whole = _added(rows, factors)
    for threads in (2, 3, 7):
        assert torch.equal(_added(rows, factors, threads), whole)


def test_sums_grow() -> None:
    rows, factors = _rows(64, 40)
    total = torch.full((40, 40), 5.0)
    gram.add(total, rows, factors, threads=2)
    assert torch.equal(total.triu(), (_added(rows, factors) + 5).triu())


def test_the_sum_is_positive_semi_definite() -> None:
    rows, factors = _rows(16, 96)
    upper = _added(rows, factors).double()
    values = torch.linalg.eigvalsh(upper + upper.triu(1).T)
    assert values.min() > -1e-6 * values.max()


def test_rows_that_do_not_lie_together_are_read_all_the_same() -> None:
    rows, factors = _rows(50, 80)
    assert torch.equal(_added(rows[:, :40], factors), _added(rows[:, :40].contiguous(), factors))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_in_every_sum_of_its_column(value: float) -> None:
    rows, factors = _rows(11, 40)
    rows[10, 33] = value
    found = _added(rows, factors)
    assert not found[:34, 33].isfinite().any() and not found[33, 33:].isfinite().any()
    found[:34, 33] = found[33, 33:] = 0
    assert found.isfinite().all()
