"""DecodedCheckpoint: a quantized model as the dense one that it stands for, so that it can be quantized once more.

    source = DecodedCheckpoint.of(open_checkpoint("models/llama-gptq"))
    source.linear(name)          # DenseTensor of float16, with the groups of its rows
"""

from dataclasses import dataclass, fields
from typing import Self

from quantkit.checkpoint.reader import Checkpoint
from quantkit.formats.codec import StoredTensor
from quantkit.formats.dense import DenseTensor


@dataclass(frozen=True, eq=False)
class DecodedCheckpoint(Checkpoint):
    """Every linear is read as its dequantized weight; all else is that of the checkpoint it was made `of`."""

    inner: Checkpoint | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        values = {field.name: getattr(checkpoint, field.name) for field in fields(Checkpoint)}
        return cls(**{**values, "quantization": None, "inner": checkpoint})

    def linear(self, name: str) -> StoredTensor:
        """Raises as `Checkpoint.linear` does."""
        assert self.inner is not None
        stored = self.inner.linear(name)
        if isinstance(stored, DenseTensor):
            return stored
        return DenseTensor(stored.dequantize().T.contiguous(), stored.bias, stored.row_groups)

    def group_rows(self, name: str, in_features: int) -> int | None:
        """Rows that share a scale in a linear of several groups of equal size, told from its header; else None."""
        counts = {self.info(tensor).shape[0] for tensor in self.tensors_of(name) if tensor.endswith(".scales")}
        count = counts.pop() if len(counts) == 1 else 1
        return in_features // count if count > 1 and in_features % count == 0 else None
