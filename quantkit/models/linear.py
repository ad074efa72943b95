"""Linear: one stored weight in use. Below this module weights are `[in, out]`; torch's `[out, in]` ends here."""

from copy import copy

import torch
from torch import Tensor

from quantkit.formats.codec import StoredTensor
from quantkit.formats.dense import DenseTensor
from quantkit.models.low_rank import LowRank


class Linear:
    """`x · W + bias`, computed in `dtype` by whatever form the weight is stored in.

    A dense weight is converted to `dtype` once. What was read from disk is kept beside it, since that is what a solver
    has to work on, until `settle` says that only the result matters.
    """

    def __init__(self, name: str, stored: StoredTensor, dtype: torch.dtype, device: str | torch.device = "cpu") -> None:
        self.name = name
        self.dtype = dtype
        self.device = torch.device(device)
        self._addition: LowRank | None = None
        self.replace(stored)

    @property
    def in_features(self) -> int:
        return self.stored.in_features

    @property
    def out_features(self) -> int:
        return self.stored.out_features

    @property
    def is_adapted(self) -> bool:
        """Whether it adds something to what the weight computes."""
        return self._addition is not None

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., in]` of any float dtype → `[..., out]` in `dtype`."""
        rows = x.reshape(-1, self.in_features).to(self.dtype)
        out = self._running.matmul(rows)
        if self._addition is not None:
            out = (out.to(torch.float32) + self._addition(rows)).to(out.dtype)
        return out.reshape(*x.shape[:-1], self.out_features)

    def weight(self) -> Tensor:
        """float32 `[in, out]` on its device, in memory of its own: the weight as stored, not as rounded to `dtype`."""
        return self.stored.dequantize().to(self.device).to(torch.float32).contiguous()

    def columns(self, outputs: slice) -> Tensor:
        """float32 `[in, n]`: the weight of some outputs."""
        return self.stored.dequantize()[:, outputs].to(self.device).to(torch.float32).contiguous()

    def replace(self, stored: StoredTensor) -> None:
        """Use another form of this weight from now on."""
        self.stored = stored
        self._running = _in_dtype(stored, self.dtype, self.device)

    def adapted(self, addition: LowRank) -> "Linear":
        """Another linear of the same weight in the same memory, which adds this to its outputs."""
        other = copy(self)
        other._addition = addition.to(self.device)
        return other

    def settle(self) -> None:
        """Forget what was read from disk where it is not what runs: a whole model holds each weight once."""
        self.stored = self._running
        self.stored.repack()


def _in_dtype(stored: StoredTensor, dtype: torch.dtype, device: torch.device) -> StoredTensor:
    if isinstance(stored, DenseTensor):
        bias = None if stored.bias is None else stored.bias.to(device, dtype)
        return DenseTensor(stored.weight.to(device, dtype), bias)
    return stored.to(device)
