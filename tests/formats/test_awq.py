"""AWQ words by hand, and that packing undoes unpacking. Whole models are in tests/commands/test_convert_exact.py."""

import pytest
import torch

from quantkit.errors import FormatError
from quantkit.formats import awq


def test_the_example_of_the_docs() -> None:
    word = torch.tensor([[0x86427531 - 2**32]], dtype=torch.int64).to(torch.int32)
    assert awq.unpack(word).tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert torch.equal(awq.pack(torch.arange(1, 9, dtype=torch.uint8)[None]), word)


def test_packing_undoes_unpacking() -> None:
    values = torch.randint(0, 16, (5, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(awq.unpack(awq.pack(values)), values)


def test_a_weight_is_rounded_once() -> None:
    weight = awq.AwqWeight(
        torch.tensor([[15, 0]], dtype=torch.uint8),
        torch.tensor([[3, 7]], dtype=torch.uint8),
        torch.tensor([[0.1, 0.3]], dtype=torch.float16),
        None,
    )
    scales = torch.tensor([0.1, 0.3], dtype=torch.float16).double()
    assert torch.equal(weight.dequantize()[0], (torch.tensor([12.0, -7.0]).double() * scales).to(torch.float16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": None}, "no tensor `m.scales`"),
        ({"qweight": torch.zeros(64, 4)}, "an int32 matrix"),
        ({"qzeros": torch.zeros(3, 4, dtype=torch.int32)}, "groups a divisor of 64"),
        ({"scales": torch.ones(2, 31)}, r"floats of shape \[2, 32\]"),
        ({"scales": torch.full((2, 32), torch.inf)}, "NaN or infinity"),
    ],
)
def test_what_does_not_fit_is_named(change, message) -> None:
    tensors = {
        "qweight": torch.zeros(64, 4, dtype=torch.int32),
        "qzeros": torch.zeros(2, 4, dtype=torch.int32),
        "scales": torch.ones(2, 32),
    }
    assert awq.decode("m", tensors).group_rows == 32
    tensors = {name: value for name, value in {**tensors, **change}.items() if value is not None}
    with pytest.raises(FormatError, match=message):
        awq.decode("m", tensors)
