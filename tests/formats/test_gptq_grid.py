"""The choice of scale and zero point: what is never clipped, what a file can hold, and what importances buy."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.errors import FormatError
from quantkit.formats import gptq_grid
from quantkit.formats.codec import Grid

KINDS = list(itertools.product((2, 3, 4, 8), (True, False), (0, 1)))


def fit(rows: Tensor, bits: int, importance: Tensor | None = None, *, sym: bool = True, least_zero: int = 0) -> Grid:
    return gptq_grid.fit(rows, bits, importance, sym=sym, least_zero=least_zero)


def some_rows(seed: int = 0, rows: int = 64) -> Tensor:
    """Columns of all kinds: mixed, never negative, never positive, all zero, one outlier."""
    values = torch.randn(rows, 12, generator=torch.Generator().manual_seed(seed)) * 0.02
    values[:, 1], values[:, 2], values[:, 3] = values[:, 1].abs(), -values[:, 2].abs(), 0
    values[5, 4], values[6, 5] = 0.5, -0.5
    return values


def cost(grid: Grid, rows: Tensor, importance: Tensor) -> Tensor:
    return importance @ (rows - grid.dequantize(grid.quantize(rows))).square()


@pytest.mark.parametrize(("bits", "sym", "least_zero"), KINDS)
def test_plain_grids_clip_nothing(bits: int, sym: bool, least_zero: int) -> None:
    rows = some_rows()
    grid = fit(rows, bits, sym=sym, least_zero=least_zero)
    miss = (rows - grid.dequantize(grid.quantize(rows))).abs()
    assert bool((miss <= grid.scale.abs() * 0.5001).all())


@pytest.mark.parametrize(("bits", "sym", "least_zero"), KINDS)
def test_what_is_fitted_is_what_a_file_holds(bits: int, sym: bool, least_zero: int) -> None:
    for importance in (None, torch.rand(64) + 0.1):
        grid = fit(some_rows(), bits, importance, sym=sym, least_zero=least_zero)
        assert torch.equal(grid.scale.to(torch.float16).to(torch.float32), grid.scale)
        assert torch.equal(grid.stored["scales"].to(torch.float32), grid.scale)
        assert torch.equal(grid.stored["zeros"].to(torch.int32), grid.zero)
        assert grid.stored["zeros"].dtype == torch.uint8
        assert grid.top == 2**bits - 1
        assert least_zero <= int(grid.zero.min())
        assert int(grid.zero.max()) <= grid.top
        if sym:
            assert bool((grid.zero == 2 ** (bits - 1)).all())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_groups_without_a_negative_weight_use_the_full_range(bits: int) -> None:
    """The largest weight is the farthest code, on whichever side: the step is absmax / 2^(bits-1)."""
    rows = torch.rand(64, 2, generator=torch.Generator().manual_seed(0)) + 0.01
    rows[:, 1] = -rows[:, 1]
    grid = fit(rows, bits)
    assert torch.allclose(grid.scale.abs(), rows.abs().amax(0) / 2 ** (bits - 1), rtol=1e-3)
    assert (grid.scale.sign()).tolist() == [-1, 1]
    codes = grid.quantize(rows)
    assert codes.gather(0, rows.abs().argmax(0)[None]).tolist() == [[0, 0]]


@pytest.mark.parametrize(("sym", "importance"), itertools.product((True, False), (None, torch.ones(64))))
def test_all_zero_columns_are_exactly_zero(sym: bool, importance: Tensor | None) -> None:
    grid = fit(some_rows(), 4, importance, sym=sym)
    assert float(grid.scale[3]) == 0
    assert not grid.dequantize(grid.quantize(some_rows()))[:, 3].any()


@pytest.mark.parametrize(("bits", "sym", "least_zero"), KINDS)
def test_importances_never_make_it_worse(bits: int, sym: bool, least_zero: int) -> None:
    rows = some_rows(1)
    importance = torch.rand(64, generator=torch.Generator().manual_seed(3)) ** 4
    plain = cost(fit(rows, bits, sym=sym, least_zero=least_zero), rows, importance)
    chosen = cost(fit(rows, bits, importance, sym=sym, least_zero=least_zero), rows, importance)
    assert bool((chosen <= plain * (1 + 1e-5)).all())
    if bits < 8:
        assert float(chosen.sum()) < 0.97 * float(plain.sum())


def test_both_signs_compete() -> None:
    """With a heavy importance on the largest weight, the sign is that which reaches it."""
    rows = torch.zeros(32, 2)
    rows[:, 0], rows[:, 1] = torch.linspace(-0.5, 1, 32), torch.linspace(0.5, -1, 32)
    importance = torch.ones(32)
    importance[-1] = 1000
    grid = fit(rows, 2, importance)
    assert grid.scale.sign().tolist() == [-1, 1]


def test_an_unimportant_outlier_is_clipped_and_an_important_one_kept() -> None:
    rows = some_rows(rows=128)[:, 4:5]
    light, heavy = torch.ones(128), torch.ones(128)
    light[5], heavy[5] = 1e-6, 1e6
    assert float(fit(rows, 3, light).scale.abs()) < 0.5 * float(fit(rows, 3, heavy).scale.abs())


def test_no_importance_at_all_is_the_same_for_all_rows() -> None:
    rows = some_rows()
    assert torch.equal(fit(rows, 4, torch.zeros(64)).scale, fit(rows, 4, torch.ones(64)).scale)


@pytest.mark.parametrize(("size", "sym"), itertools.product((1e-9, 1e-7, 1e-6), (True, False)))
def test_tiny_weights_keep_a_scale_that_float16_holds(size: float, sym: bool) -> None:
    rows = some_rows() * size
    grid = fit(rows, 4, sym=sym)
    kept = grid.scale[[0, 1, 2, 4]].abs()
    assert bool((kept >= 2.0**-24).all())
    assert bool(((rows - grid.dequantize(grid.quantize(rows))).abs() <= grid.scale.abs() * 0.5001).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    rows = some_rows()
    rows[3, 3] = bad
    with pytest.raises(FormatError, match="a group of weights holds NaN or infinity"):
        fit(rows, 4)


def test_weights_beyond_any_scale_are_refused() -> None:
    with pytest.raises(FormatError, match="spans 2e\\+07, which no float16 scale covers at 4 bits") as caught:
        fit(torch.tensor([[-1e7], [1e7]]), 4)
    assert caught.value.hint


@pytest.mark.parametrize("bad", [float("nan"), -1.0])
def test_importances_that_make_no_sense_are_refused(bad: float) -> None:
    importance = torch.ones(64)
    importance[0] = bad
    with pytest.raises(FormatError, match="importances must be finite and not negative"):
        fit(some_rows(), 4, importance)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from((2, 3, 4, 8)),
    sym=st.booleans(),
    least_zero=st.sampled_from((0, 1)),
    values=st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=40),
)
def test_no_weight_is_ever_clipped_without_importances(bits, sym, least_zero, values) -> None:
    rows = torch.tensor(values)[:, None]
    grid = fit(rows, bits, sym=sym, least_zero=least_zero)
    miss = (rows - grid.dequantize(grid.quantize(rows))).abs()
    assert bool((miss <= grid.scale.abs() * 0.5001).all())
