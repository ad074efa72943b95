"""JoinedTensor: stored weights that read the same input, side by side as the one fused linear they stand for."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.formats.codec import StoredTensor


class JoinedTensor(StoredTensor):
    """Parts in the order of their outputs, by the names they have on disk, each in whatever format it has."""

    def __init__(self, parts: Mapping[str, StoredTensor]) -> None:
        self._parts = dict(parts)
        stored = list(self._parts.values())
        self.in_features = stored[0].in_features
        self.out_features = sum(part.out_features for part in stored)
        groups = [part.row_groups for part in stored]
        first = groups[0]
        if first is not None and all(own is not None and torch.equal(own, first) for own in groups):
            self.row_groups = first
        biases = [part.bias for part in stored]
        if all(bias is None for bias in biases):
            self.bias = None
        else:
            device = next(bias.device for bias in biases if bias is not None)
            zeros = [torch.zeros(part.out_features, dtype=torch.float16, device=device) for part in stored]
            self.bias = torch.cat([zero if bias is None else bias for zero, bias in zip(zeros, biases, strict=True)])

    def tensors(self) -> dict[str, Tensor]:
        """What is on disk, by `part.suffix`."""
        return {
            f"{name}.{suffix}": tensor
            for name, part in self._parts.items()
            for suffix, tensor in part.tensors().items()
        }

    def dequantize(self) -> Tensor:
        return torch.cat([part.dequantize() for part in self._parts.values()], dim=1)

    def matmul(self, x: Tensor) -> Tensor:
        return torch.cat([part.matmul(x) for part in self._parts.values()], dim=-1)

    def to(self, device: str | torch.device) -> "JoinedTensor":
        return JoinedTensor({name: part.to(device) for name, part in self._parts.items()})

    def outputs(self, columns: Tensor) -> "JoinedTensor":
        """As of any weight; `columns` of a part come together, and the parts in their order."""
        own, start = {}, 0
        for name, part in self._parts.items():
            mine = columns[(columns >= start) & (columns < start + part.out_features)] - start
            if len(mine):
                own[name] = part.outputs(mine)
            start += part.out_features
        return JoinedTensor(own)

    @property
    def stored_bits(self) -> int:
        return sum(part.stored_bits for part in self._parts.values())
