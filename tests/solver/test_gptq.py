"""The blocked solve against the textbook: one column of the paper's loop after another, in float64."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from quantkit.formats.codec import Codec, Codes, Grid
from quantkit.formats.exl2 import Exl2Codec, Width
from quantkit.formats.gptq import GptqCodec
from quantkit.solver import gptq
from quantkit.solver.gptq import find_energies, solve, solve_together
from quantkit.solver.inverse import Factor, factor, grouped


def _problem(features: int, out: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight with some large entries and the Hessian of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator) / features**0.5
    scale = torch.exp(0.7 * torch.randn(features, generator=generator))
    x = (torch.randn(4 * features, features, generator=generator) @ mixing) * scale
    weight = torch.randn(features, out, generator=generator) * 0.05
    weight[torch.rand(features, out, generator=generator) < 0.01] *= 4
    return weight, x.T @ x / len(x)


def _textbook(weight: torch.Tensor, hessian: torch.Tensor, factor: Factor, codec: Codec) -> Codes:
    """GPTQ as published (arXiv 2210.17323, algorithm 1) with one column per block: U of the inverse Hessian, Uᵀ U =
    H⁻¹, and the error of each row subtracted at once from all rows after it."""
    order, features = factor.order, len(weight)
    layout = codec.layout(features)
    damped = hessian.double()[order][:, order] + factor.ridge * torch.eye(features, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    pivots = (upper.diagonal() ** -2).float()
    rows = weight.double()[order]
    group_of_row = [number for number, group in enumerate(layout.groups) for _ in range(group.rows)]
    place = torch.argsort(order)
    grids: dict[int, Grid] = {}
    runs = codec.act_order or codec.whole_groups(features) is not None
    if not runs:
        group_of_row = [group_of_row[feature] for feature in order.tolist()]
        for number, (group, start, end) in enumerate(layout.spans()):
            grids[number] = codec.fit(weight[start:end], group.bits, pivots[place[start:end]])
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for row in range(features):
        number = group_of_row[row]
        if number not in grids:
            size = layout.groups[number].rows
            grids[number] = codec.fit(rows[row : row + size].float(), layout.groups[number].bits, pivots[row : row + size])
        grid = grids[number]
        codes[row] = (torch.round(rows[row] / grid.scale.double()) + grid.zero).clamp(0, grid.top).to(torch.uint8)
        rounded = (codes[row].double() - grid.zero) * grid.scale.double()
        error = (rows[row] - rounded) / upper[row, row]
        rows[row + 1 :] -= torch.outer(upper[row, row + 1 :], error)
    in_order = tuple(grids[number] for number in range(len(layout.groups)))
    if runs:
        return Codes(codes, in_order, layout, order)
    return Codes(codes[place], in_order, layout, torch.arange(features))


def _factored(hessian: torch.Tensor, codec: Codec) -> Factor:
    whole = codec.whole_groups(len(hessian))
    return factor(hessian, None if whole is None else grouped(hessian, whole))


def _weighted_error(weight: torch.Tensor, codes: Codes, hessian: torch.Tensor) -> float:
    wrong, weight, hessian = (weight - codes.dequantize()).double(), weight.double(), hessian.double()
    return float((wrong * (hessian @ wrong)).sum() / (weight * (hessian @ weight)).sum())


CODECS = [
    GptqCodec(4, 32),
    GptqCodec(4, 32, act_order=True),
    GptqCodec(3, 64, act_order=True),
    GptqCodec(3, 128, sym=False),
    GptqCodec(2, 32, sym=False, act_order=True),
    GptqCodec(8, -1),
    GptqCodec(4, -1, act_order=True),
    GptqCodec(4, 256, act_order=True),
    GptqCodec(4, 64, group_aware=True),
    GptqCodec(2, 96, sym=False, group_aware=True),
]


MIXED = [
    Exl2Codec((Width(4, 128),)),
    Exl2Codec((Width(6, 32, 0.2), Width(3, 64, 0.8))),
    Exl2Codec((Width(8, 32, 0.1), Width(5, 32, 0.2), Width(4, -1, 0.4), Width(2, 32, 0.3))),
]


def _named(codec: Codec) -> str:
    if isinstance(codec, GptqCodec):
        return f"{codec.bits}-{codec.group_size}-{codec.sym}-{codec.act_order}-{codec.group_aware}"
    return "exl2-" + "".join(str(width.bits) for width in codec.mix)


@pytest.mark.parametrize("features", [64, 320])
@pytest.mark.parametrize("codec", [*CODECS, *MIXED], ids=_named)
def test_the_codes_are_the_textbooks(codec: Codec, features: int) -> None:
    weight, hessian = _problem(features, 48)
    factored = _factored(hessian, codec)
    solution = solve(weight, factored, codec)
    expected = _textbook(weight, hessian, factored, codec)
    assert torch.equal(solution.codes.q, expected.q)
    assert torch.equal(solution.codes.order, expected.order)
    assert solution.codes.layout == expected.layout
    for ours, theirs in zip(solution.codes.grids, expected.grids, strict=True):
        assert torch.equal(ours.scale, theirs.scale) and torch.equal(ours.zero, theirs.zero)


@pytest.mark.parametrize("codec", [*CODECS, *MIXED], ids=_named)
def test_the_error_is_that_of_the_codes_and_below_nearest_rounding(codec: Codec) -> None:
    weight, hessian = _problem(192, 32, seed=3)
    solution = solve(weight, _factored(hessian, codec), codec)
    assert solution.error == pytest.approx(_weighted_error(weight, solution.codes, hessian), rel=1e-3)
    assert solution.error < 0.6 * _weighted_error(weight, solve(weight, None, codec).codes, hessian)


def test_weights_that_share_an_input_are_solved_together() -> None:
    _, hessian = _problem(160, 32)
    weights = [_problem(160, out, seed=out)[0] for out in (96, 32, 64)]
    factored = factor(hessian)
    for codec in (GptqCodec(4, 32), GptqCodec(4, 32, act_order=True), MIXED[1]):
        together = solve_together(weights, factored, codec)
        for weight, solution in zip(weights, together, strict=True):
            alone = solve(weight, factored, codec)
            assert torch.equal(solution.codes.q, alone.codes.q)
            assert solution.error == pytest.approx(alone.error, rel=1e-4)
            assert torch.equal(solution.codes.dequantize(), alone.codes.dequantize())


def test_without_a_hessian_rows_are_rounded_to_nearest() -> None:
    weight, _ = _problem(96, 32)
    codec = GptqCodec(4, 64, act_order=True)
    solution = solve(weight, None, codec)
    assert solution.codes.order.tolist() == list(range(96))
    for grid, (_, start, end) in zip(solution.codes.grids, solution.codes.layout.spans(), strict=True):
        assert torch.equal(solution.codes.q[start:end], grid.quantize(weight[start:end]))
    assert solution.error == pytest.approx(_weighted_error(weight, solution.codes, torch.eye(96)), rel=1e-5)


def test_a_zero_weight_has_no_error() -> None:
    _, hessian = _problem(64, 32)
    for factored in (factor(hessian), None):
        solution = solve(torch.zeros(64, 32), factored, GptqCodec(4, 32))
        assert solution.error == 0 and not solution.codes.dequantize().any()


def test_a_diagonal_hessian_feeds_nothing_back() -> None:
    weight, _ = _problem(64, 32)
    solution = solve(weight, factor(torch.diag(torch.rand(64) + 0.5)), GptqCodec(4, 32))
    for grid, (_, start, end) in zip(solution.codes.grids, solution.codes.layout.spans(), strict=True):
        assert torch.equal(solution.codes.q[start:end], grid.quantize(weight[start:end]))


@pytest.mark.parametrize("act_order", [False, True])
def test_dead_inputs_are_rounded_to_nearest_and_feed_nothing_back(act_order: bool) -> None:
    weight, hessian = _problem(128, 32)
    dead = torch.arange(96, 128)
    hessian[dead] = 0
    hessian[:, dead] = 0
    codec = GptqCodec(4, 32, act_order=act_order)
    codes = solve(weight, factor(hessian), codec).codes
    assert torch.equal(codes.order[96:], dead)
    assert torch.equal(codes.q[96:], codes.grids[3].quantize(weight[96:]))
    weight[dead] = 1.0
    assert torch.equal(solve(weight, factor(hessian), codec).codes.q[:96], codes.q[:96])


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("codec", [GptqCodec(4, 64), GptqCodec(4, 64, act_order=True), MIXED[2]], ids=_named)
def test_threads_do_not_change_the_codes(codec: Codec) -> None:
    weight, hessian = _problem(512, 256)
    results = []
    for threads in (1, 2, 3):
        with _threads(threads):
            results.append(solve(weight, factor(hessian), codec))
    for other in results[1:]:
        assert torch.equal(results[0].codes.q, other.codes.q) and results[0].error == other.error


@pytest.mark.parametrize("act_order", [False, True])
def test_the_size_of_a_block_does_not_change_the_codes(act_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = _problem(256, 32, seed=1)
    codec, factored = GptqCodec(4, -1 if act_order else 64, act_order=act_order), factor(hessian)
    whole = solve(weight, factored, codec)
    monkeypatch.setattr(gptq, "BLOCK_ROWS", 24)
    small = solve(weight, factored, codec)
    assert torch.equal(whole.codes.q, small.codes.q)
    assert whole.error == pytest.approx(small.error, rel=1e-4)


def test_energies_are_found_in_parts() -> None:
    x, weight = torch.randn(64, 24), torch.randn(24, 2 * gptq.SUMMED_COLUMNS + 3)
    hessian = x.T @ x / 64
    (found,) = find_energies([weight], factor(hessian))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, (weight * (hessian @ weight)).sum(0).double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("act_order", [False, True])
def test_the_codec_writes_what_was_solved(act_order: bool) -> None:
    weight, hessian = _problem(96, 32)
    codec = GptqCodec(4, 32, act_order=act_order)
    codes = solve(weight, factor(hessian), codec).codes
    assert torch.equal(codec.encode(codes, None).dequantize(), codes.dequantize().to(torch.float16))
