"""Not quantized: fp16, bf16 or fp32 as it is on disk, so that "left dense" is no special case."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from quantkit.errors import FormatError
from quantkit.formats.codec import StoredTensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HINT = "use a version of this model in bfloat16, float16 or float32"


def recognise(suffixes: Collection[str]) -> bool:
    """Whether these tensor names of one linear are those of a plain weight."""
    return "weight" in suffixes


def decode(name: str, tensors: Mapping[str, Tensor]) -> "DenseTensor":
    """One linear from its tensors by suffix: `weight` [out, in] and perhaps `bias` [out].

    Raises FormatError when the weight is no matrix of floats or the bias does not fit it.
    """
    weight, bias = tensors["weight"], tensors.get("bias")
    if weight.dim() != 2 or weight.dtype not in DTYPES:
        found = f"{str(weight.dtype).removeprefix('torch.')} of shape {list(weight.shape)}"
        raise FormatError(f"`{name}.weight`: expected a matrix of fp16, bf16 or fp32, found {found}", hint=HINT)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise FormatError(f"`{name}.bias`: expected shape [{weight.shape[0]}], found {list(bias.shape)}", hint=HINT)
    return DenseTensor(weight, bias)


class DenseTensor(StoredTensor):
    """A plain weight `[out, in]`, as on disk, with its bias `[out]`; `row_groups` where it was quantized before."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, row_groups: Tensor | None = None) -> None:
        self.weight, self.bias, self.row_groups = weight, bias, row_groups
        self.out_features, self.in_features = weight.shape

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}

    def dequantize(self) -> Tensor:
        return self.weight.t()

    def matmul(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.nn.functional.linear(x, self.weight.to(x.dtype), bias)

    def to(self, device: str | torch.device) -> "DenseTensor":
        bias = None if self.bias is None else self.bias.to(device)
        return DenseTensor(self.weight.to(device), bias, self.row_groups)

    def outputs(self, columns: Tensor) -> "DenseTensor":
        bias = None if self.bias is None else self.bias[columns]
        return DenseTensor(self.weight[columns], bias, self.row_groups)

    def inputs(self, rows: Tensor) -> "DenseTensor":
        groups = None if self.row_groups is None else self.row_groups[rows]
        return DenseTensor(self.weight[:, rows], None, groups)

    def divides(self, rows: Tensor) -> bool:
        return True

    @property
    def runs(self) -> tuple[Tensor, ...]:
        return (torch.arange(self.in_features),)
