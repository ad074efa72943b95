"""RMS norm, always in float32. (Zhang and Sennrich 2019)"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.models.source import Device, Source, read_tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """`x / rms(x) · weight` over the last axis. `weight` is float32 and holds the family's offset already."""

    weight: Tensor
    epsilon: float

    @classmethod
    def read(
        cls, source: Source, name: str, width: int, offset: float, epsilon: float, device: Device
    ) -> "Norm":
        weight = read_tensor(source, f"{name}.weight", (width,))
        return cls(weight.to(device, torch.float32) + offset, epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        """Any float dtype → float32."""
        return F.rms_norm(x.to(torch.float32), self.weight.shape, self.weight, self.epsilon)
