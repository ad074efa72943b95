"""Tensors of int32 words, as every quantized format has them: the checks that formats share."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import FormatError


def misfit(name: str, suffix: str, expected: str, found: Tensor, hint: str) -> FormatError:
    """The error for a tensor that is not as expected."""
    dtype = str(found.dtype).removeprefix("torch.")
    return FormatError(
        f"`{name}.{suffix}`: expected {expected}, found {dtype} of shape {list(found.shape)}", hint=hint
    )


def codes_and_grids(name: str, tensors: Mapping[str, Tensor], hint: str) -> tuple[Tensor, Tensor, Tensor]:
    """qweight, qzeros and scales of a linear in GPTQ or AWQ form, the first two int32 matrices.

    Raises FormatError for one that is missing, and, with this hint, for words of another kind.
    """
    for suffix in ("qweight", "qzeros", "scales"):
        if suffix not in tensors:
            raise FormatError(f"`{name}` has no tensor `{name}.{suffix}`", hint="download the checkpoint again")
    for suffix in ("qweight", "qzeros"):
        if tensors[suffix].dtype != torch.int32 or tensors[suffix].dim() != 2:
            raise misfit(name, suffix, "an int32 matrix", tensors[suffix], hint)
    return tensors["qweight"], tensors["qzeros"], tensors["scales"]
