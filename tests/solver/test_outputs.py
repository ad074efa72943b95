"""Feedback between outputs against the definition: entry after entry, each with all that was rounded before it."""

import pytest
import torch

from quantkit.formats.gptq import GptqCodec
from quantkit.solver import outputs as outputs_module
from quantkit.solver.gptq import solve_together
from quantkit.solver.inverse import Factor, factor
from quantkit.solver.outputs import Chunk, factor_outputs, waves


def spd(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3 * size, size, generator=generator) @ torch.randn(size, size, generator=generator)
    scale = torch.exp(0.7 * torch.randn(size, generator=generator))
    rows = rows * scale
    return rows.T @ rows / len(rows) / size


def problem(features: int, out: int, chunk: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A weight, the Hessian of its inputs and the covariance of its outputs' gradients, in chunks."""
    weight = 0.05 * torch.randn(features, out, generator=torch.Generator().manual_seed(seed))
    whole = spd(out, seed + 2)
    chunks = [whole[start : start + chunk, start : start + chunk] for start in range(0, out, chunk)]
    return weight, spd(features, seed + 1), chunks


def loss(error: torch.Tensor, hessian: torch.Tensor, chunks: list[torch.Tensor]) -> float:
    return float((hessian @ error @ torch.block_diag(*chunks) * error).sum())


def entry_by_entry(weight: torch.Tensor, inner: Factor, chunks: tuple[Chunk, ...], grids) -> torch.Tensor:
    """Codes [in, out] by the formula: round W + B E Cᵀ - E, where E has only what was rounded before."""
    lower = inner.lower.double()
    order = torch.cat([chunk.order for chunk in chunks])
    feedback = torch.block_diag(*(chunk.lower.double() for chunk in chunks))
    inverse = torch.argsort(order)
    feedback = feedback[inverse][:, inverse]  # C by the outputs' own numbers
    rows = weight.double()[inner.order]
    errors = torch.zeros_like(rows)
    codes = torch.zeros(weight.shape, dtype=torch.int64)
    for place, feature in enumerate(inner.order.tolist()):
        grid = grids[feature // 32]
        for output in order.tolist():
            target = rows[place, output] + lower[place, : place + 1] @ errors[: place + 1] @ feedback[output]
            scale, zero = float(grid.scale[output]), int(grid.zero[output])
            code = min(max(round(float(target) / scale) + zero, 0), grid.top)
            codes[feature, output] = code
            errors[place, output] = rows[place, output] - (code - zero) * scale
    return codes


@pytest.mark.parametrize("chunk", [16, 24, 40])
def test_codes_are_those_of_the_definition(chunk: int) -> None:
    weight, hessian, covariances = problem(64, 40, chunk)
    inner, chunks = factor(hessian), factor_outputs(covariances)
    assert chunks is not None
    codec = GptqCodec(bits=3, group_size=32)
    (solution,) = solve_together([weight], inner, codec, [chunks])
    expected = entry_by_entry(weight, inner, chunks, solution.codes.grids)
    differing = int((solution.codes.q != expected).sum())
    assert differing <= 2, f"{differing} codes differ"  # a tie may fall either way in float32


def test_factor_is_that_of_the_mixed_matrix() -> None:
    covariance = spd(40, 5)
    (chunk,) = factor_outputs([covariance], share=0.5) or ()
    mixed = 0.5 * covariance / covariance.diagonal().mean() + 0.5 * torch.eye(40)
    mixed = mixed[chunk.order][:, chunk.order].double()
    inverse = torch.linalg.inv(chunk.lower.double())
    middle = inverse.T @ mixed @ inverse  # H = Cᵀ F C, F with blocks on its diagonal
    size = outputs_module.BLOCK
    blocks = torch.block_diag(*(middle[i : i + size, i : i + size] for i in range(0, 40, size)))
    torch.testing.assert_close(middle, blocks, rtol=0, atol=1e-5)
    for start in range(0, 40, size):
        square = chunk.lower[start : start + size, start : start + size]
        assert torch.equal(square, torch.eye(len(square)))


@pytest.mark.parametrize(
    "codec",
    [
        GptqCodec(bits=3, group_size=32),
        GptqCodec(bits=2, group_size=32, sym=False, act_order=True),
    ],
    ids=["static", "act-order"],
)
def test_the_loss_that_it_minimises_falls(codec: GptqCodec) -> None:
    weight, hessian, covariances = problem(128, 96, 48)
    inner, chunks = factor(hessian), factor_outputs(covariances)
    (plain,) = solve_together([weight], inner, codec)
    (fed,) = solve_together([weight], inner, codec, [chunks])
    before, after = (loss(weight - found.codes.dequantize(), hessian, covariances) for found in (plain, fed))
    assert after < 0.93 * before
    error = weight - fed.codes.dequantize()
    assert fed.error == pytest.approx(float((hessian @ error * error).sum() / (hessian @ weight * weight).sum()), rel=1e-2)


def test_linears_side_by_side_are_solved_as_alone() -> None:
    weight, hessian, covariances = problem(64, 80, 40)
    inner, codec = factor(hessian), GptqCodec(bits=4, group_size=32)
    parts, chunks = (weight[:, :40], weight[:, 40:]), [factor_outputs(covariances[:1]), factor_outputs(covariances[1:])]
    together = solve_together(parts, inner, codec, chunks)
    for part, own, found in zip(parts, chunks, together, strict=True):
        (alone,) = solve_together([part], inner, codec, [own])
        assert torch.equal(alone.codes.q, found.codes.q)


def test_without_covariance_between_outputs_nothing_changes() -> None:
    weight, hessian, _ = problem(64, 40, 40)
    inner, codec = factor(hessian), GptqCodec(bits=4, group_size=32)
    (plain,) = solve_together([weight], inner, codec)
    (fed,) = solve_together([weight], inner, codec, [factor_outputs([torch.eye(40)])])
    assert torch.equal(plain.codes.q, fed.codes.q)


def test_gradients_of_zero_say_nothing() -> None:
    assert factor_outputs([torch.zeros(16, 16), torch.zeros(8, 8)]) is None
    chunks = factor_outputs([torch.zeros(16, 16), torch.eye(8)])
    assert chunks is not None and torch.equal(chunks[0].lower, torch.eye(16))


def test_every_output_is_in_one_wave() -> None:
    chunks = factor_outputs([spd(40, 1), spd(24, 2)])
    assert chunks is not None
    found = [wave.outputs for wave in waves([chunks, chunks])]
    assert sorted(torch.cat(found).tolist()) == list(range(128))
    assert len(found) == 3
