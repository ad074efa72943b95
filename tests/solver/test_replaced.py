"""What a weight loses that is there already."""

import pytest
import torch

from quantkit.formats.gptq import GptqCodec
from quantkit.solver.gptq import solve
from quantkit.solver.inverse import factor
from quantkit.solver.replaced import relative_error


@pytest.mark.parametrize("dead", [0, 3])
def test_it_is_the_error_that_the_solver_would_have_found(dead: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight = (torch.randn(shape, generator=generator) for shape in ((256, 64), (64, 320)))
    inputs[:, :dead] = 0
    hessian = inputs.T @ inputs / 256
    found = factor(hessian.clone(), name="w")
    solution = solve(weight, found, GptqCodec(3, 32))
    other = solution.codes.dequantize()
    error = relative_error(lambda own: weight[:, own], other.to(torch.float16), found)
    assert error == pytest.approx(solution.error, rel=2e-3)
    missed = (weight - other).double()
    expected = (missed * (hessian.double() @ missed)).sum() / (weight * (hessian @ weight)).sum()
    assert error == pytest.approx(float(expected), rel=1e-2)


def test_without_a_hessian_every_input_counts_alike() -> None:
    weight = torch.arange(64.0 * 300).reshape(64, 300)
    assert relative_error(lambda own: weight[:, own], weight * 0.75, None) == pytest.approx(1 / 16)
    assert relative_error(lambda own: weight[:, own] * 0, weight, None) == 0.0
