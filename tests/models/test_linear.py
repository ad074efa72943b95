import pytest
import torch

from quantkit.formats.codec import Layout, StoredTensor
from quantkit.formats.dense import DenseTensor
from quantkit.formats.exl2 import Exl2Codec
from quantkit.formats.gptq import GptqCodec
from quantkit.models.linear import Linear
from quantkit.solver.gptq import solve


class Tripled(StoredTensor):
    """A stored form that is not dense: three times a scalar matrix."""

    in_features = out_features = 4
    bias = None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"three": torch.tensor(3.0)}

    def dequantize(self) -> torch.Tensor:
        return 3 * torch.eye(4, dtype=torch.float16)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    def to(self, device: str | torch.device) -> "Tripled":
        return self


def make(dtype: torch.dtype, stored: torch.dtype = torch.float32) -> tuple[Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 4, generator=generator).to(stored)
    return Linear("a.b", DenseTensor(weight, torch.tensor([1.0, 2.0, 3.0])), dtype), weight


def test_any_leading_axes_and_the_bias() -> None:
    linear, weight = make(torch.float32)
    x = torch.arange(24.0).reshape(2, 3, 4)
    expected = x @ weight.T + torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(linear(x), expected)
    assert linear(x[:, :0]).shape == (2, 0, 3)


def test_computes_in_its_dtype_whatever_comes_in() -> None:
    linear, _ = make(torch.bfloat16)
    assert linear(torch.ones(1, 4)).dtype == torch.bfloat16


def test_the_weight_is_as_stored_until_settled() -> None:
    linear, weight = make(torch.bfloat16)
    assert linear.weight().dtype == torch.float32
    assert torch.equal(linear.weight(), weight.T)
    linear.settle()
    assert torch.equal(linear.weight(), weight.T.to(torch.bfloat16).float())
    assert linear.stored.tensors()["weight"].dtype == torch.bfloat16


def test_the_weight_is_a_copy() -> None:
    linear, weight = make(torch.float32)
    linear.weight().zero_()
    assert torch.equal(linear.weight(), weight.T)


def test_replace_changes_what_runs() -> None:
    square = Linear("a.b", DenseTensor(torch.eye(4)), torch.float32)
    square.replace(Tripled())
    assert torch.equal(square(torch.ones(1, 4)), torch.full((1, 4), 3.0))
    assert torch.equal(square.weight(), 3 * torch.eye(4))
    square.settle()
    assert isinstance(square.stored, Tripled)


def test_a_settled_weight_has_the_form_that_kernels_read_before_anything_runs() -> None:
    class Repacked(Tripled):
        forms = 0

        def repack(self) -> None:
            self.forms += 1

    linear = Linear("a.b", Repacked(), torch.float32)
    assert linear.stored.forms == 0
    linear.settle()
    assert linear.stored.forms == 1


@pytest.mark.parametrize("form", ["gptq", "exl2"])
def test_a_quantized_weight_goes_to_the_device_whole(form: str) -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    codec = GptqCodec(4, 32) if form == "gptq" else Exl2Codec(Layout.uniform(64, 4, 32))
    stored = codec.encode(solve(weight, None, codec).codes, torch.zeros(32))
    moved = stored.to("meta")
    assert {name: (part.shape, part.dtype) for name, part in moved.tensors().items()} == {
        name: (part.shape, part.dtype) for name, part in stored.tensors().items()
    }
    assert {part.device.type for part in (*moved.tensors().values(), moved.bias)} == {"meta"}
    assert stored.to("cpu") is stored
