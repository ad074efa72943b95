"""Dense weights as one more stored form."""

import pytest
import torch

from quantkit.errors import FormatError
from quantkit.formats import dense
from quantkit.formats.dense import DenseTensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weight_and_bias_as_on_disk(dtype: torch.dtype) -> None:
    weight, bias = torch.randn(6, 4).to(dtype), torch.randn(6).to(dtype)
    assert dense.recognise({"weight": weight})
    stored = dense.decode("m", {"weight": weight, "bias": bias})
    assert (stored.in_features, stored.out_features) == (4, 6)
    assert stored.tensors() == {"weight": weight, "bias": bias}
    assert torch.equal(stored.dequantize(), weight.t())
    assert stored.dequantize().dtype == dtype
    assert stored.stored_bits == (24 + 6) * dtype.itemsize * 8
    x = torch.randn(3, 4)
    assert torch.allclose(stored.matmul(x), x @ weight.t().float() + bias.float(), atol=1e-6)
    assert stored.matmul(x).dtype == torch.float32


def test_without_bias() -> None:
    stored = DenseTensor(torch.eye(4))
    assert stored.tensors().keys() == {"weight"}
    assert torch.equal(stored.matmul(torch.eye(4)), torch.eye(4))
    assert stored.bits_per_weight == 32


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": torch.zeros(4)}, r"`m.weight`: expected a matrix of fp16, bf16 or fp32, found float32 of shape \[4\]"),
        ({"weight": torch.zeros(4, 4, dtype=torch.int8)}, "`m.weight`: expected a matrix of fp16, bf16 or fp32, found int8"),
        ({"weight": torch.zeros(4, 4), "bias": torch.zeros(3)}, r"`m.bias`: expected shape \[4\], found \[3\]"),
    ],
)
def test_faults_are_named(tensors: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        dense.decode("m", tensors)
    assert caught.value.hint
