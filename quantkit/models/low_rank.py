"""LowRank: what adapters add to the output of a linear, as two narrow matrices. (Hu et al. 2021, LoRA)"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """`x · down · up` in float32: `[in, r]` and `[r, out]`, every scale and weight in `up`."""

    down: Tensor
    up: Tensor

    @classmethod
    def joined(cls, parts: Sequence["LowRank"]) -> "LowRank":
        """Several as one: the sum of what they add, of their ranks together."""
        return cls(torch.cat([part.down for part in parts], 1), torch.cat([part.up for part in parts], 0))

    def __call__(self, x: Tensor) -> Tensor:
        """`[m, in]` → float32 `[m, out]`."""
        return x.to(torch.float32) @ self.down @ self.up

    def to(self, device: torch.device) -> "LowRank":
        return LowRank(self.down.to(device), self.up.to(device))
