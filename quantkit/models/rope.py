"""Rotary position embedding: the variants and the tables that attention uses.

Each variant is one small class. `frequencies(length)` are the angles per position of the pairs of a head; pair `i` is
(element i, element i + dim/2), as in Hugging Face checkpoints.

Two variants depend on how long the text is: `dynamic` stretches its base as the text outgrows `max_positions`, and
LongRoPE changes from short to long factors at `original`. The length is that of the whole text at the time of a call:
the last position + 1, or what the caller says (a prompt read in pieces has its full length from the first piece on).
Keys already in a cache keep the rotation they were given. Generation in transformers does the same, so tokens agree
with it. Its Phi-3 alone reads the whole text again once the short factors no longer serve: `restarts`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quantkit import kernels


@dataclass(frozen=True)
class Rope:
    """Plain rotation by `position · theta^(-2i/dim)`. (Su et al. 2021, RoFormer, section 3.2.2)

    theta  the base
    dim    elements of a head that rotate; the rest of the head passes through
    """

    theta: float
    dim: int

    depends_on_length: ClassVar[bool] = False

    @property
    def table_factor(self) -> float:
        """Factor of cosine and sine, so that attention scores grow by its square."""
        return 1.0

    def frequencies(self, length: int) -> Tensor:
        """float32 [dim/2], for a text of `length` positions."""
        return _plain(self.theta, self.dim)

    def reach(self, max_positions: int) -> int:
        """Positions a model is good for whose config states `max_positions`, which some variants go beyond."""
        return max_positions

    def restarts(self, cached: int, length: int) -> bool:
        """Whether a cache of `cached` positions must be rebuilt before the text grows to `length`."""
        return False


@dataclass(frozen=True)
class LinearRope(Rope):
    """Positions divided by `factor`. (Chen et al. 2023, Position Interpolation, equation 3)"""

    factor: float

    def frequencies(self, length: int) -> Tensor:
        return _plain(self.theta, self.dim) / self.factor

    def reach(self, max_positions: int) -> int:
        return int(max_positions * self.factor)


@dataclass(frozen=True)
class DynamicRope(Rope):
    """NTK-aware base that grows with the text beyond `max_positions`. (Peng et al. 2023, YaRN, section 3.1 and B.1)"""

    factor: float
    max_positions: int

    depends_on_length: ClassVar[bool] = True

    def frequencies(self, length: int) -> Tensor:
        stretch = self.factor * max(length, self.max_positions) / self.max_positions - (self.factor - 1)
        return _plain(self.theta * stretch ** (self.dim / (self.dim - 2)), self.dim)

    def reach(self, max_positions: int) -> int:
        return int(max_positions * self.factor)


@dataclass(frozen=True)
class Llama3Rope(Rope):
    """Long wavelengths divided by `factor`, short ones kept, a linear passage between. (Llama 3.1 reference code)"""

    factor: float
    low: float
    high: float
    original: int

    def frequencies(self, length: int) -> Tensor:
        plain = _plain(self.theta, self.dim)
        turns = self.original * plain / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - kept) * plain / self.factor + kept * plain


@dataclass(frozen=True)
class YarnRope(Rope):
    """Interpolated where a pair turns less than `slow` times in the original context, kept where it turns more than
    `fast` times, a linear ramp over the pairs between. (Peng et al. 2023, YaRN, sections 3.2 and 3.4)

    truncate  the ramp starts and ends at whole pairs
    """

    factor: float
    original: int
    scores: float
    fast: float
    slow: float
    truncate: bool

    @property
    def table_factor(self) -> float:
        return self.scores

    def frequencies(self, length: int) -> Tensor:
        plain = _plain(self.theta, self.dim)
        start, end = self._pair_that_turns(self.fast), self._pair_that_turns(self.slow)
        if self.truncate:
            start, end = math.floor(start), math.ceil(end)
        start, end = max(start, 0), min(end, self.dim - 1)
        pairs = torch.arange(self.dim // 2, dtype=torch.float32)
        stretched = ((pairs - start) / (end - start if end != start else 0.001)).clamp(0, 1)
        return plain / self.factor * stretched + plain * (1 - stretched)

    def reach(self, max_positions: int) -> int:
        return max(max_positions, int(self.original * self.factor))

    def _pair_that_turns(self, times: float) -> float:
        return self.dim * math.log(self.original / (times * 2 * math.pi)) / (2 * math.log(self.theta))


@dataclass(frozen=True)
class LongRope(Rope):
    """Each pair divided by a factor of its own: short ones up to `original` positions, long ones beyond.
    (Ding et al. 2024, LongRoPE, section 3)

    restart  a cache made with short factors is rebuilt before long ones are used
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    scores: float
    restart: bool

    depends_on_length: ClassVar[bool] = True

    @property
    def table_factor(self) -> float:
        return self.scores

    def frequencies(self, length: int) -> Tensor:
        factors = torch.tensor(self.long if length > self.original else self.short, dtype=torch.float32)
        return _plain(self.theta, self.dim) / factors

    def restarts(self, cached: int, length: int) -> bool:
        return self.restart and 0 < cached <= self.original < length


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosines and sines of one forward pass: one pair of float32 tables [rows, s, dim/2] for each rope in use."""

    tables: Mapping[Rope, tuple[Tensor, Tensor]]

    @classmethod
    def at(cls, ropes: tuple[Rope, ...], positions: Tensor, length: int | Tensor | None = None) -> "Rotary":
        """Tables for positions `[rows, s]`. `length` overrides how long the text of every row is taken to be, or of
        every token where it is a tensor `[rows, s]`: tokens of several texts may stand in one row."""
        angle = positions.to(torch.float32)[..., None]
        tables = {}
        for rope in dict.fromkeys(ropes):
            if not rope.depends_on_length:
                frequencies = rope.frequencies(1).to(positions.device)
            else:
                frequencies = _frequencies(rope, _lengths(positions, length)).to(positions.device)
            angles = angle * frequencies
            tables[rope] = (angles.cos() * rope.table_factor, angles.sin() * rope.table_factor)
        return cls(tables)

    def to(self, device: torch.device) -> "Rotary":
        """The same on another device; itself where it is there."""
        if all(cos.device == device for cos, _ in self.tables.values()):
            return self
        return Rotary({rope: (cos.to(device), sin.to(device)) for rope, (cos, sin) in self.tables.items()})

    def turn(self, rope: Rope, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Heads `[rows, heads, s, head_dim]` rotated in float32 and rounded to `dtype`; elements from `rope.dim` on are
        left as they are."""
        x = x.transpose(1, 2)  # as linears leave them: the heads of a token lie side by side
        cos, sin = self.tables[rope]
        backend = kernels.backend("cpu", None if x.device.type == "cpu" else "reference")
        return backend.rotate_heads(x, cos, sin, dtype).transpose(1, 2)


def _lengths(positions: Tensor, length: int | Tensor | None) -> Tensor:
    """int64 `[rows, 1]` or `[rows, s]`."""
    if isinstance(length, Tensor):
        return length
    return positions.amax(dim=1, keepdim=True) + 1 if length is None else torch.tensor([[length]])


def _frequencies(rope: Rope, lengths: Tensor) -> Tensor:
    """float32 `[rows, 1 or s, dim/2]`, worked out once for each length."""
    known, which = lengths.cpu().unique(return_inverse=True)
    return torch.stack([rope.frequencies(one) for one in known.tolist()])[which]


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
