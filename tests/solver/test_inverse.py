"""The factor against its definition, its damping and its fallbacks."""

import pytest
import torch

from quantkit.errors import CalibrationError
from quantkit.solver.inverse import BLOCK_COLUMNS, DAMPING_STEPS, MOVED, Factor, cholesky, descending, factor


def _hessian(features: int, tokens: int | None = None, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator) / features**0.5
    scale = torch.exp(torch.randn(features, generator=generator))
    x = torch.randn(tokens or 4 * features, features, generator=generator) @ mixing * scale
    return x.T @ x / len(x)


def _require_factor(result: Factor, hessian: torch.Tensor) -> None:
    """Its definition: the Hessian in the order of the factor, with its ridge, is Bᵀ D B."""
    expected = hessian.double()[result.order][:, result.order] + result.ridge * torch.eye(len(hessian))
    lower = result.lower.double()
    product = lower.T @ (result.pivots.double()[:, None] * lower)
    assert (product - expected).abs().max() < 1e-5 * expected.diagonal().max()
    assert torch.equal(lower, lower.tril()) and torch.equal(lower.diagonal(), torch.ones(len(hessian)))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("features", [1, 7, BLOCK_COLUMNS, BLOCK_COLUMNS + 1, 3 * BLOCK_COLUMNS + 5, 2 * MOVED + 5])
def test_the_damped_hessian_is_bt_d_b(features: int, last: bool) -> None:
    hessian = _hessian(features)
    result = factor(hessian.clone(), last=last)
    _require_factor(result, hessian)
    assert result.ridge == pytest.approx(0.01 * float(hessian.diagonal().mean()), rel=1e-5)
    assert (result.damping, result.dead_inputs, result.fallback) == (0.01, 0, None)


def test_pivots_are_those_of_the_inverse() -> None:
    """D_j = 1 / U_jj² for the upper Cholesky factor U of the inverse, which textbook GPTQ divides by."""
    hessian = _hessian(40)
    result = factor(hessian)
    damped = hessian.double()[result.order][:, result.order] + result.ridge * torch.eye(40)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    assert torch.allclose(result.pivots.double(), upper.diagonal() ** -2, rtol=1e-4)


def test_the_order_is_by_diagonal_and_stable() -> None:
    assert descending(torch.diag(torch.tensor([1.0, 3.0, 1.0, 3.0, 0.0]))).tolist() == [1, 3, 0, 2, 4]


def test_another_order_can_be_given() -> None:
    order = torch.arange(20)
    assert torch.equal(factor(_hessian(20), order).order, order)


@pytest.mark.parametrize("features", [1, 63, 64, 65, 200])
def test_cholesky_is_lapacks(features: int) -> None:
    hessian = _hessian(features) + 0.1 * torch.eye(features)
    ours = hessian.clone()
    assert cholesky(ours)
    assert torch.allclose(ours.tril(), torch.linalg.cholesky(hessian), rtol=1e-4, atol=1e-5)


def test_a_hessian_that_nobody_needs_again_gives_up_its_memory() -> None:
    kept, given = _hessian(600), _hessian(600)
    before = kept.clone()
    assert torch.equal(factor(given, last=True).lower, factor(kept).lower) and torch.equal(kept, before)
    assert given.untyped_storage().nbytes() == 0


def test_threads_do_not_change_the_bytes() -> None:
    hessian = _hessian(700)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(factor(hessian))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0].lower, results[1].lower) and torch.equal(results[0].lower, results[2].lower)


def test_few_and_equal_rows_are_damped() -> None:
    """Rank one: sixteen equal rows on 256 inputs."""
    x = _hessian(256)[:1].repeat(16, 1)
    result = factor(x.T @ x / 16)
    assert result.fallback is None and result.damping == 0.01
    assert torch.isfinite(result.lower).all() and (result.pivots > 0).all()


@pytest.mark.parametrize("features", [BLOCK_COLUMNS, 3 * BLOCK_COLUMNS + 5])
@pytest.mark.parametrize(("negative", "steps"), [(0.02, 3), (0.2, 30)])
def test_damping_steps_up_until_it_holds(negative: float, steps: int, features: int) -> None:
    """Of several blocks the first have been overwritten when the factorisation fails."""
    basis = torch.linalg.qr(_hessian(features)).Q
    values = torch.ones(features)
    values[5] = -negative
    hessian = basis @ torch.diag(values) @ basis.T
    hessian = (hessian + hessian.T) / 2
    result = factor(hessian)
    _require_factor(result, hessian)
    assert result.fallback is None and result.damping == pytest.approx(0.01 * steps)
    assert steps in DAMPING_STEPS


def test_a_hessian_that_stays_singular_gives_no_feedback() -> None:
    hessian = torch.eye(8) + 5 * (torch.ones(8, 8) - torch.eye(8))
    result = factor(hessian)
    assert result.fallback == "its Hessian stays singular up to damping 1"
    assert torch.equal(result.lower, torch.eye(8))
    assert torch.allclose(result.pivots, torch.full((8,), 1.01))


def test_dead_inputs_come_last_and_touch_nothing() -> None:
    hessian = _hessian(30)
    dead = [4, 17]
    hessian[dead] = 0
    hessian[:, dead] = 0
    result = factor(hessian)
    assert result.order[-2:].tolist() == dead and result.dead_inputs == 2
    assert torch.equal(result.lower[-2:, :-2], torch.zeros(2, 28))
    assert result.pivots[-2:].tolist() == pytest.approx([result.ridge] * 2)
    live = [i for i in range(30) if i not in dead]
    without = factor(hessian[live][:, live])
    assert torch.allclose(result.lower[:-2, :-2], without.lower, atol=1e-5)
    assert result.ridge == pytest.approx(without.ridge)


def test_no_live_input_gives_no_feedback() -> None:
    result = factor(torch.zeros(5, 5))
    assert result.fallback == "calibration moved none of its inputs" and result.dead_inputs == 5
    assert torch.equal(result.lower, torch.eye(5)) and torch.equal(result.pivots, torch.ones(5))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_hessian_that_is_not_finite_is_named(value: float) -> None:
    hessian = _hessian(10)
    hessian[2, 3] = hessian[3, 2] = value
    with pytest.raises(CalibrationError, match=r"Hessian of `model.layers.1.mlp.down_proj` holds NaN or infinity"):
        factor(hessian, name="model.layers.1.mlp.down_proj")


def test_the_hessian_is_left_alone() -> None:
    hessian = _hessian(70)
    kept = hessian.clone()
    factor(hessian)
    assert torch.equal(hessian, kept)


def test_a_float64_hessian_is_factored_as_such() -> None:
    """With a ridge that float32 loses beside the largest entry."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    hessian = x.T @ x * 1e6
    single, double = factor(hessian.float(), damping=1e-9), factor(hessian, damping=1e-9)
    assert double.damping == 1e-9 and double.fallback is None
    assert single.damping > 1e-9 or single.fallback is not None
    assert double.lower.dtype == double.pivots.dtype == torch.float32
    order = double.order
    product = double.lower.double().T @ (double.pivots.double()[:, None] * double.lower.double())
    expected = hessian[order[:, None], order]
    assert (product - expected).abs().max() < 1e-5 * expected.abs().max()
