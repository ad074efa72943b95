"""Where weights come from when part of a result is solved anew: for the block in hand, for the result as it will be."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from quantkit.checkpoint.decoded import DecodedCheckpoint
from quantkit.checkpoint.header import Header
from quantkit.checkpoint.reader import Checkpoint
from quantkit.formats.codec import StoredTensor
from quantkit.models.source import Source


@dataclass(frozen=True, slots=True, eq=False)
class Redo:
    """A part of a finished result that is solved anew.

    previous  the result
    names     its linears that are solved; all else stays as it is
    """

    previous: Checkpoint
    names: frozenset[str]

    def weight(self, name: str) -> Tensor:
        """The weight of a linear so far, floats `[in, out]`."""
        return self.previous.linear(name).dequantize()

    def in_hand(self, original: Source) -> Source:
        """What blocks are read from: their linears that are to be solved as in the original, all else as in the
        result."""
        return _InHand(DecodedCheckpoint.of(self.previous), original, self.names)

    def outcome(self, solved: Mapping[str, Header]) -> DecodedCheckpoint:
        """The result as it will be, with these tensors from other files."""
        return DecodedCheckpoint.of(replace(self.previous, homes={**self.previous.homes, **solved}))


@dataclass(frozen=True, slots=True, eq=False)
class _InHand:
    """Which tensors there are is asked of the original: its head may be its embedding."""

    result: Source
    original: Source
    names: frozenset[str]

    def has(self, name: str) -> bool:
        return self.original.has(name)

    def tensor(self, name: str) -> Tensor:
        return self.result.tensor(name)

    def linear(self, name: str) -> StoredTensor:
        return (self.original if name in self.names else self.result).linear(name)
