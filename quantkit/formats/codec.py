"""The words that solver and storage share: Group, Layout, Grid, Codes, StoredTensor, Codec.

Weights are `[in, out]` here, since GPTQ and EXL2 both store rows of input features. A solved weight is a matrix of
integer codes cut into groups of consecutive rows; every group has one grid, and a grid says which real value each
code stands for. Nothing here knows a file name or a model.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantkit.errors import FormatError


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive input rows that share a row of scales."""

    bits: int
    rows: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows of one weight are cut into groups, first row first."""

    groups: tuple[Group, ...]

    @classmethod
    def uniform(cls, rows: int, bits: int, group_size: int) -> "Layout":
        """Groups of one width. `group_size` -1 is one group; the last group may be short."""
        size = rows if group_size == -1 else group_size
        return cls(tuple(Group(bits, min(size, rows - start)) for start in range(0, rows, size)))

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)

    def code_bits(self, out_features: int) -> int:
        """Bits of the codes alone, without scales and other side data."""
        return sum(group.bits * group.rows for group in self.groups) * out_features

    def spans(self) -> Iterable[tuple[Group, int, int]]:
        """Each group with its first row and the row after its last."""
        start = 0
        for group in self.groups:
            yield group, start, start + group.rows
            start += group.rows


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The representable values of one group: `w = (q - zero) · scale` with `0 <= q <= top`.

    scale   float32 [out]: exactly the value a reader of the file will compute; may be negative; 0 makes a column 0
    zero    int32 [out]
    stored  what the codec must write for this group, by its own names
    """

    scale: Tensor
    zero: Tensor
    top: int
    stored: Mapping[str, Tensor]

    def quantize(self, rows: Tensor) -> Tensor:
        """Nearest codes, ties to even: float32 [rows, out] → uint8 [rows, out]. A zero scale gives code `zero`."""
        step = torch.where(self.scale == 0, torch.ones_like(self.scale), self.scale)
        codes = torch.where(self.scale == 0, torch.zeros_like(rows), torch.round(rows / step)) + self.zero
        return codes.clamp(0, self.top).to(torch.uint8)

    def dequantize(self, codes: Tensor) -> Tensor:
        """uint8 [rows, out] → float32 [rows, out]."""
        return (codes.to(torch.int32) - self.zero).to(torch.float32) * self.scale

    def to(self, device: str | torch.device) -> "Grid":
        """The same on a device."""
        stored = {name: tensor.to(device) for name, tensor in self.stored.items()}
        return Grid(self.scale.to(device), self.zero.to(device), self.top, stored)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A solved weight, free of any file format.

    q       uint8 [in, out]: row j holds input feature `order[j]`
    grids   one for each group of `layout`, in the same order
    layout  cuts the rows of `q`
    order   int64 [in], a permutation; `arange(in)` where the format keeps the model's own order
    """

    q: Tensor
    grids: tuple[Grid, ...]
    layout: Layout
    order: Tensor

    def dequantize(self) -> Tensor:
        """The weight these codes stand for, float32 [in, out], rows in the model's own order."""
        weight = torch.empty(self.q.shape, dtype=torch.float32, device=self.q.device)
        for grid, (_, start, end) in zip(self.grids, self.layout.spans(), strict=True):
            weight[self.order[start:end]] = grid.dequantize(self.q[start:end])
        return weight

    def to(self, device: str | torch.device) -> "Codes":
        """The same on a device."""
        grids = tuple(grid.to(device) for grid in self.grids)
        return Codes(self.q.to(device), grids, self.layout, self.order.to(device))


class StoredTensor(ABC):
    """One weight in its on-disk form, with its bias: frozen, complete, and able to be used as it is.

    row_groups  int64 [in]: the group of each row, where rows share scales and a group has one width; else None
    """

    in_features: int
    out_features: int
    bias: Tensor | None
    row_groups: Tensor | None = None

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What is on disk, by suffix (`qweight`, `weight`, `bias`, …)."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """The weight `[in, out]`: float16 rounded once where it is quantized, the stored dtype where it is dense."""

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """`x [m, in] · W [in, out] + bias → [m, out]`, in the dtype of `x`."""

    @abstractmethod
    def to(self, device: str | torch.device) -> "StoredTensor":
        """The same weight on a device, itself if it is there; what it multiplies must be there too."""

    def repack(self) -> None:  # noqa: B027 - nothing to do for a weight that has one form
        """Take the form that the kernels read, where there is one, now rather than at the first product.

        What is kept for long is then not allocated among the activations of a forward pass, between which the C
        library could not return memory to the system.
        """

    def outputs(self, columns: Tensor) -> "StoredTensor":
        """These outputs alone, int64 [n], in this order, in the same form: nothing is dequantized.

        Raises FormatError where the form cannot hold so many.
        """
        raise FormatError(f"a weight held as {type(self).__name__} cannot be taken apart")

    def inputs(self, rows: Tensor) -> "StoredTensor":
        """The part of the weight that reads these inputs, int64 [n], in this order, in the same form, without the bias.
        The parts of all inputs give the whole product as their sum. Raises FormatError where `divides` says no."""
        raise FormatError(f"a weight held as {type(self).__name__} cannot be taken apart")

    def divides(self, rows: Tensor) -> bool:
        """Whether `inputs` can take these rows: groups that share scales come apart in whole units of 32 only."""
        return False

    @property
    def runs(self) -> tuple[Tensor, ...] | None:
        """The inputs in the order in which their rows are stored, int64, a run for each width of the codes: any whole
        units of 32 of a run can be taken by `inputs`. None where that is not so."""
        return None

    @property
    def stored_bits(self) -> int:
        """All bits on disk, side data and bias included."""
        return sum(tensor.numel() * tensor.element_size() * 8 for tensor in self.tensors().values())

    @property
    def bits_per_weight(self) -> float:
        return self.stored_bits / (self.in_features * self.out_features)


class Codec(Protocol):
    """How one format chooses grids and writes codes. A new format is one of these."""

    @property
    def name(self) -> str: ...

    @property
    def act_order(self) -> bool:
        """Whether a group may hold scattered rows: the solver then forms groups in the order it rounds rows."""

    @property
    def columns_alone(self) -> bool:
        """Whether the grid of an output has nothing to do with other outputs, so that some can be solved by
        themselves."""

    def whole_groups(self, in_features: int) -> Tensor | None:
        """int64 [in]: the group of each row, where groups are to be solved whole, one after another, so that a grid can
        be fitted when its group is reached. None where rows may be rounded in any order."""

    def refusal(self, in_features: int, out_features: int) -> str | None:
        """Why a weight of this shape cannot be held, in words for people; None when it can."""

    def layout(self, in_features: int) -> Layout:
        """The groups of a weight with this many input features."""

    def stored_bits(self, in_features: int, out_features: int, bias: bool) -> int:
        """All bits on disk of a weight of this shape, side data included, before it is solved."""

    def fit(self, rows: Tensor, bits: int, importance: Tensor | None) -> Grid:
        """The grid of one group: rows float32 [g, out], importance float32 [g] (a weight for each row's error)."""

    def encode(self, codes: Codes, bias: Tensor | None) -> StoredTensor:
        """The on-disk form. Integer codes are written as they are, never recomputed from rounded weights."""
