"""What one process holds of a weight, and how its product becomes that of the whole.

    SummedTensor     rows: each process multiplies the inputs it has, and the results are added up
    GatheredTensor   columns: each process computes some outputs, and all of them get all
    SplitEmbedding   some words: a process knows the states of its own, the others add zero to them

Plain slices of columns, whose outputs stay where they are, need nothing of this kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.formats.codec import StoredTensor
from quantkit.models.transformer import Embedding, require_known
from quantkit.runtime.ranks import Ranks


class SharedTensor(StoredTensor):
    """A part of a weight that this process holds; `tensors`, `dequantize` and bits are those of the part."""

    def __init__(self, part: StoredTensor, ranks: Ranks) -> None:
        self.part, self.ranks = part, ranks
        self.in_features, self.out_features = part.in_features, part.out_features
        self.bias = part.bias

    def tensors(self) -> dict[str, Tensor]:
        return self.part.tensors()

    def dequantize(self) -> Tensor:
        return self.part.dequantize()

    def repack(self) -> None:
        self.part.repack()

    @property
    def stored_bits(self) -> int:
        return self.part.stored_bits


class SummedTensor(SharedTensor):
    """The rows of the inputs that this process has: `[m, own in]` → `[m, out]`. `bias [out]` is added once, by all."""

    def __init__(self, part: StoredTensor, bias: Tensor | None, ranks: Ranks) -> None:
        super().__init__(part, ranks)
        self.bias = bias

    def tensors(self) -> dict[str, Tensor]:
        return self.part.tensors() if self.bias is None else {**self.part.tensors(), "bias": self.bias}

    def matmul(self, x: Tensor) -> Tensor:
        total = self.ranks.sum(self.part.matmul(x))
        return (total if self.bias is None else total + self.bias.to(total.dtype)).to(x.dtype)

    def to(self, device: str | torch.device) -> "SummedTensor":
        bias = None if self.bias is None else self.bias.to(device)
        return SummedTensor(self.part.to(device), bias, self.ranks)

    @property
    def stored_bits(self) -> int:
        return self.part.stored_bits + (0 if self.bias is None else self.bias.nbytes * 8)


class GatheredTensor(SharedTensor):
    """Some columns, with all rows: `[m, own in]` → `[m, out]`, or `[m, in]` where every process has all inputs.

    outputs  columns of each process, which lie side by side in the whole
    inputs   inputs of each process, likewise; None where all have all
    """

    def __init__(
        self, part: StoredTensor, ranks: Ranks, outputs: Sequence[int], inputs: Sequence[int] | None = None
    ) -> None:
        super().__init__(part, ranks)
        self._outputs, self._inputs = outputs, inputs
        self.out_features = sum(outputs)
        self.in_features = part.in_features if inputs is None else inputs[ranks.rank]

    def matmul(self, x: Tensor) -> Tensor:
        whole = x if self._inputs is None else self.ranks.gather(x, self._inputs)
        return self.ranks.gather(self.part.matmul(whole), self._outputs)

    def to(self, device: str | torch.device) -> "GatheredTensor":
        return GatheredTensor(self.part.to(device), self.ranks, self._outputs, self._inputs)


@dataclass(frozen=True, slots=True)
class SplitEmbedding(Embedding):
    """`weight` has the words from `first` on that this process holds, of `vocabulary` words."""

    first: int
    vocabulary: int
    ranks: Ranks

    def __call__(self, ids: Tensor) -> Tensor:
        """As that of `Embedding`."""
        require_known(ids, self.vocabulary)
        own = ids - self.first
        mine = (own >= 0) & (own < len(self.weight))
        rows = F.embedding(own.clamp(0, len(self.weight) - 1), self.weight).to(self.dtype).to(torch.float32)
        rows = torch.where(mine[..., None], rows, 0.0)
        return self.ranks.sum(rows) * torch.tensor(self.scale, dtype=self.dtype).to(torch.float32)
