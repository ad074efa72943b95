"""AWQ in the GEMM layout, read only: qweight, qzeros, scales, as AutoAWQ writes them.

    qweight  int32 [in, out/8]       eight 4-bit codes of neighbouring columns in one word
    qzeros   int32 [groups, out/8]   zero points, packed alike
    scales   float16 [groups, out]

The nibbles of a word, lowest first, are columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight. A weight is `(q - zero) · scale`,
the same grid as GPTQ's: only the packing differs, and groups are always in sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import FormatError
from quantkit.formats.words import codes_and_grids, misfit

BITS = 4
COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
OTHER = "use the unquantized version of this model"
AGAIN = "download the checkpoint again"


@dataclass(frozen=True, slots=True, eq=False)
class AwqWeight:
    """One linear: codes uint8 [in, out], zero points uint8 [groups, out], scales [groups, out], bias [out] or None."""

    q: Tensor
    zeros: Tensor
    scales: Tensor
    bias: Tensor | None

    @property
    def group_rows(self) -> int:
        return len(self.q) // len(self.zeros)

    def dequantize(self) -> Tensor:
        """float16 [in, out], the product rounded once."""
        group = torch.arange(len(self.q)) // self.group_rows
        difference = self.q.to(torch.float32) - self.zeros[group].to(torch.float32)
        return (difference * self.scales[group].to(torch.float32)).to(torch.float16)


def recognise(config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` says that its model is AWQ."""
    return config.get("quant_method", config.get("method")) == "awq"


def check(config: Mapping[str, Any], where: str) -> None:
    """Raises FormatError for another width or layout than the one that is read."""
    bits = config.get("bits", config.get("w_bit"))
    if bits != BITS:
        raise FormatError(f"AWQ of {bits} bits cannot be read (in `{where}`), only of {BITS}", hint=OTHER)
    size = config.get("group_size", config.get("q_group_size"))
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not (size == -1 or size > 0)):
        raise FormatError(f"expected `group_size` -1 or above 0, found `{size}` in `{where}`", hint=OTHER)
    layout = str(config.get("version", config.get("format", "gemm"))).lower()
    if layout != "gemm":
        raise FormatError(f"AWQ layout `{layout}` cannot be read (in `{where}`), only `gemm`", hint=OTHER)


def decode(name: str, tensors: Mapping[str, Tensor]) -> AwqWeight:
    """One linear from its tensors by suffix. Raises FormatError, naming the tensor, for anything that does not fit."""
    qweight, qzeros, scales = codes_and_grids(name, tensors, AGAIN)
    rows, columns = qweight.shape[0], 8 * qweight.shape[1]
    if qzeros.shape[1] != qweight.shape[1] or not len(qzeros) or rows % len(qzeros):
        raise misfit(name, "qzeros", f"shape [groups, {qweight.shape[1]}], groups a divisor of {rows}", qzeros, AGAIN)
    if scales.shape != (len(qzeros), columns) or not scales.is_floating_point():
        raise misfit(name, "scales", f"floats of shape [{len(qzeros)}, {columns}]", scales, AGAIN)
    if not bool(torch.isfinite(scales).all()):
        raise FormatError(f"`{name}.scales` holds NaN or infinity", hint=AGAIN)
    bias = tensors.get("bias")
    if bias is not None and bias.shape != (columns,):
        raise misfit(name, "bias", f"shape [{columns}]", bias, AGAIN)
    return AwqWeight(unpack(qweight), unpack(qzeros), scales, bias)


def unpack(words: Tensor) -> Tensor:
    """int32 [rows, columns/8] → uint8 [rows, columns]."""
    shifts = 4 * torch.arange(8)
    nibbles = (words.to(torch.int64)[..., None] >> shifts) & 15
    columns = torch.empty_like(nibbles)
    columns[..., torch.tensor(COLUMN_OF_NIBBLE)] = nibbles
    return columns.flatten(1).to(torch.uint8)


def pack(values: Tensor) -> Tensor:
    """What undoes `unpack`: uint8 [rows, columns] of 0 … 15 → int32 [rows, columns/8]."""
    nibbles = values.to(torch.int64).unflatten(1, (-1, 8))[..., torch.tensor(COLUMN_OF_NIBBLE)]
    words = (nibbles << 4 * torch.arange(8)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
