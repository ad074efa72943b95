"""The Hessian against its definition in float64."""

import pytest
import torch

from quantkit.calibration.hessian import CHUNK_TOKENS, PANEL_COLUMNS, Hessian
from quantkit.errors import CalibrationError

FEATURES = PANEL_COLUMNS + 44  # two panels, the second of them short


def _inputs(tokens: int, features: int = FEATURES, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(features, generator=generator) + 0.1
    return torch.randn(tokens, features, generator=generator) * scale


def _finish(x: torch.Tensor, *sizes: int, token_share: float = 0.0) -> torch.Tensor:
    hessian = Hessian(x.shape[1], token_share=token_share)
    for part in x.split(list(sizes) or [len(x)]):
        hessian.add(part)
    result = hessian.finish()
    assert hessian.tokens == len(x)
    return result


@pytest.mark.parametrize("tokens", [1, 700, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 5])
def test_the_mean_of_x_xt(tokens: int) -> None:
    x = _inputs(tokens)
    expected = x.double().T @ x.double() / tokens
    result = _finish(x)
    assert result.dtype == torch.float32 and torch.equal(result, result.T)
    # float32 sums of a thousand products: their rounding, relative to the diagonal that bounds every entry.
    assert (result - expected).abs().max() < 1e-6 * expected.diagonal().max()


def test_batches_do_not_change_the_bytes() -> None:
    x = _inputs(2600)
    whole = _finish(x, token_share=0.25)
    assert torch.equal(whole, _finish(x, 1, 1023, 1, 500, 1075, token_share=0.25))
    assert torch.equal(whole, _finish(x, *[13] * 200, token_share=0.25))


def test_threads_do_not_change_the_bytes() -> None:
    x = _inputs(3000)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(_finish(x, token_share=0.25))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_bfloat16_inputs_are_summed_in_float32() -> None:
    x = _inputs(2000).bfloat16()
    result, expected = _finish(x), _finish(x.float())
    assert (result - expected).abs().max() < 4e-6 * expected.diagonal().max()


@pytest.mark.parametrize("token_share", [0.0, 0.25])
def test_neither_batches_nor_threads_change_the_bytes_in_bfloat16(token_share: float) -> None:
    x = _inputs(2600).bfloat16()
    whole = _finish(x, token_share=token_share)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(whole, _finish(x, token_share=token_share))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole, _finish(x, 1, 1023, 1, 500, 1075, token_share=token_share))
    assert torch.equal(whole, _finish(x, *[13] * 200, token_share=token_share))


def test_counted_tokens_in_bfloat16_are_rounded_once_more_at_most() -> None:
    x, counts = _inputs(1500).bfloat16(), torch.rand(1500, generator=torch.Generator().manual_seed(2)) * 3
    counts[7] = 0
    kept, hessian, exact = x.clone(), Hessian(FEATURES), Hessian(FEATURES, dtype=torch.float64)
    hessian.add(x, counts)
    exact.add(x, counts)
    result, expected = hessian.finish().double(), exact.finish()
    assert torch.equal(x, kept)
    scale = expected.diagonal().sqrt()
    # A rounded value is off by at most 2^-8; over so many tokens little of it is left.
    assert ((result - expected).abs() / (scale[:, None] * scale)).max() < 2**-10
    assert (result - expected).norm() < 2**-10 * expected.norm()


def test_adding_does_not_change_the_input() -> None:
    x = _inputs(10)
    kept = x.clone()
    _finish(x, token_share=0.25)
    assert torch.equal(x, kept)


def test_the_token_share_is_a_mix_of_two_hessians_of_unit_diagonal() -> None:
    x = _inputs(CHUNK_TOKENS).double()
    x[3] *= 1000
    plain, normal = x.T @ x, (x / x.norm(dim=1, keepdim=True)).T @ (x / x.norm(dim=1, keepdim=True))
    expected = 0.75 * plain / plain.diagonal().mean() + 0.25 * normal / normal.diagonal().mean()
    result = _finish(x.float(), token_share=0.25)
    assert result.diagonal().mean() == pytest.approx(1.0, rel=1e-5)
    assert (result - expected).abs().max() < 1e-5 * expected.diagonal().max()


def test_tokens_without_input_have_no_weight_in_the_mix() -> None:
    x = _inputs(100)
    padded = torch.cat([x, torch.zeros(100, FEATURES)])
    # The zero tokens halve the mean energy of the chunk and count as tokens: 0.75 + 0.25 / 2 of the diagonal is left.
    result = _finish(padded, token_share=0.25)
    assert torch.isfinite(result).all() and result.diagonal().mean() == pytest.approx(0.875, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("row", [5, CHUNK_TOKENS + 7])
def test_a_value_that_is_not_finite_is_named(value: float, row: int, dtype: torch.dtype) -> None:
    x = _inputs(CHUNK_TOKENS + 20).to(dtype)
    x[row, 9] = value
    hessian = Hessian(FEATURES, "model.layers.2.mlp.down_proj")
    with pytest.raises(CalibrationError, match=rf"`model.layers.2.mlp.down_proj` .* channel 9 of calibration token {row:,} "):
        hessian.add(x)
        hessian.finish()


def test_no_token_is_an_error() -> None:
    hessian = Hessian(8, "model.layers.0.mlp.experts.3.w1")
    hessian.add(torch.zeros(0, 8))
    with pytest.raises(CalibrationError, match=r"no calibration token reached `model.layers.0.mlp.experts.3.w1`"):
        hessian.finish()


def test_counted_tokens_count_so_often() -> None:
    x, counts = _inputs(2 * CHUNK_TOKENS + 9), torch.rand(2 * CHUNK_TOKENS + 9, generator=torch.Generator().manual_seed(1)) * 3
    hessian, same = Hessian(FEATURES), Hessian(FEATURES)
    hessian.add(x, counts)
    for part, own in zip(x.split(100), counts.split(100), strict=True):
        same.add(part, own)
    result = hessian.finish()
    expected = (x * counts[:, None]).double().T @ x.double() / len(x)
    assert (result - expected).abs().max() < 1e-6 * expected.diagonal().max()
    assert torch.equal(result, same.finish())


def test_tokens_without_a_count_count_once() -> None:
    x = _inputs(700)
    mixed, ones = Hessian(FEATURES), Hessian(FEATURES)
    mixed.add(x[:300])
    mixed.add(x[300:], torch.ones(400))
    ones.add(x)
    assert torch.equal(mixed.finish(), ones.finish())


def test_sums_in_float64_are_those_of_float64() -> None:
    x = torch.randn(3000, 40, generator=torch.Generator().manual_seed(4)) * torch.logspace(-3, 3, 40)
    hessian = Hessian(40, dtype=torch.float64)
    hessian.add(x)
    total = hessian.finish()
    exact = x.double().T @ x.double() / len(x)
    assert total.dtype == torch.float64
    scale = exact.diagonal().sqrt()
    assert ((total - exact).abs() / (scale[:, None] * scale)).max() < 1e-14
