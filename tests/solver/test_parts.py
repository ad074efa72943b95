"""A weight solved some outputs at a time is the weight solved whole."""

import pytest
import torch

from quantkit.formats.exl2 import Exl2Codec, Width
from quantkit.formats.gptq import GptqCodec
from quantkit.solver import parts
from quantkit.solver.gptq import solve_together
from quantkit.solver.inverse import factor
from quantkit.solver.outputs import factor_outputs
from quantkit.solver.parts import solve_in_parts


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(
    "codec", [GptqCodec(4, 32), GptqCodec(3, 32, sym=False), GptqCodec(4, 32, act_order=True), GptqCodec(4, -1)]
)
def test_the_codes_and_grids_are_the_same(codec: GptqCodec, chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_OUTPUTS", 40)
    x, weight, gradients = torch.randn(300, 192), torch.randn(192, 104), torch.randn(64, 104)
    factored = factor(x.T @ x / 300)
    sizes = gradients.split([40, 32, 32], 1)
    outputs = factor_outputs([own.T @ own for own in sizes]) if chunked else None
    (whole,) = solve_together([weight], factored, codec, None if outputs is None else [outputs])
    read: list[slice] = []

    def columns(part: slice) -> torch.Tensor:
        read.append(part)
        return weight[:, part].contiguous()

    found = solve_in_parts(columns, 104, factored, codec, outputs)
    assert [part.stop for part in read] == ([40, 72, 104] if chunked else [40, 80, 104])
    assert torch.equal(found.codes.q, whole.codes.q) and torch.equal(found.codes.order, whole.codes.order)
    assert torch.equal(found.codes.dequantize(), whole.codes.dequantize())
    for own, other in zip(found.codes.grids, whole.codes.grids, strict=True):
        assert own.top == other.top and all(torch.equal(own.stored[name], other.stored[name]) for name in other.stored)
    assert found.error == pytest.approx(whole.error, rel=1e-6)
    torch.testing.assert_close(found.losses, whole.losses, rtol=1e-5, atol=1e-6)


def test_what_knows_of_all_outputs_is_not_taken_apart() -> None:
    codec = Exl2Codec((Width(4, 32),))
    assert not codec.columns_alone
    with pytest.raises(AssertionError):
        solve_in_parts(lambda part: torch.zeros(32, 32), 32, factor(torch.eye(32)), codec)
