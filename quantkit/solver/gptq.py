"""Error-compensated rounding of one weight, or of several that read the same input.

The rows of a weight are rounded one after another, the most active input first, and each takes over the errors of the
rows before it (`inverse` says why). This is done in left-looking blocks: one product brings the errors of all earlier
rows into a block, and the backend's `solve_rows` does the rest inside it. Without a Hessian rows are rounded to
nearest. Nothing here knows a file format: grids come from the codec, codes go back to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit import kernels
from quantkit.formats.codec import Codec, Codes, Grid, Layout
from quantkit.solver.inverse import Factor
from quantkit.solver.outputs import Chunk, waves

BLOCK_ROWS = 128
SUMMED_COLUMNS = 256
"""Columns whose squares are in memory at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """A solved weight.

    codes     what the codec encodes
    losses    float64 [out]: the diagonal of (W - Q)ᵀ H (W - Q), what each output loses
    energies  float64 [out]: the diagonal of Wᵀ H W
    """

    codes: Codes
    losses: Tensor
    energies: Tensor

    @property
    def error(self) -> float:
        """tr((W - Q)ᵀ H (W - Q)) / tr(Wᵀ H W) with the Hessian before damping; without one, H is the identity."""
        energy = self.energies.sum()
        return float(self.losses.sum() / energy) if float(energy) > 0 else 0.0


def solve(weight: Tensor, factor: Factor | None, codec: Codec) -> Solution:
    """Round one weight, float32 [in, out]; `factor` None rounds to nearest. See `solve_together`."""
    return solve_together([weight], factor, codec)[0]


def solve_together(
    weights: Sequence[Tensor],
    factor: Factor | None,
    codec: Codec,
    outputs: Sequence[Sequence[Chunk]] | None = None,
    energies: Sequence[Tensor] | None = None,
) -> list[Solution]:
    """Round weights that read the same input, each float32 [in, out_i], in one pass.

    outputs   of each weight, where its outputs are to make up for each other; see `outputs.factor_outputs`
    energies  of each weight, if they are known: `find_energies`, for those who round the same weights many times

    Rows are processed in the order of the factor. A codec without act-order keeps groups of consecutive features, and
    their grids are fitted beforehand to the weights as they are. With act-order a group is a run of rows in
    processing order, and its grid is fitted when its first row is reached, to the rows as they stand by then: moved
    to make up for the errors of all rows before; groups may then differ in width. So it is for a codec with
    `whole_groups`, whose groups the order has to keep together. In the choice of a grid a row weighs as much as its
    pivot.
    """
    if factor is None:
        return [_round_to_nearest(weight, codec) for weight in weights]
    rounding = _Rounding(weights, factor, outputs)
    layout = codec.layout(len(factor.order))
    whole = codec.whole_groups(len(factor.order))
    if codec.act_order or whole is not None:
        assert whole is None or _keeps_together(factor.order.cpu(), whole, layout), "order the rows with `grouped`"
        grids = _round_act_order(rounding, codec, layout)
        order, q = factor.order, rounding.q
    else:
        grids = _round_static(rounding, codec, layout)
        order, q = torch.arange(len(factor.order), device=factor.order.device), torch.empty_like(rounding.q)
        q[factor.order] = rounding.q
    losses = rounding.losses()
    known = find_energies(weights, factor) if energies is None else energies
    return [
        Solution(
            Codes(q[:, columns].contiguous(), tuple(own), layout, order),
            losses[columns],
            energy,
        )
        for columns, own, energy in zip(rounding.columns, zip(*grids, strict=True), known, strict=True)
    ]


def find_energies(weights: Sequence[Tensor], factor: Factor) -> list[Tensor]:
    """The diagonal of Wᵀ H W of each weight, float32 [in, out_i], with the Hessian before damping: float64 [out_i]."""
    return [torch.cat([_energies(part, factor) for part in weight.split(SUMMED_COLUMNS, 1)]) for weight in weights]


def _energies(weight: Tensor, factor: Factor) -> Tensor:
    ordered = weight[factor.order]
    damped = _column_squares(factor.lower @ ordered, factor.pivots[:, None])
    return (damped - factor.ridge * _column_squares(ordered)).clamp(min=0)


def _keeps_together(order: Tensor, groups: Tensor, layout: Layout) -> bool:
    return all(len(torch.unique(groups[order[start:end]])) == 1 for _, start, end in layout.spans())


class _Rounding:
    """The state of one pass: weights side by side and in processing order, their codes and errors so far."""

    def __init__(
        self, weights: Sequence[Tensor], factor: Factor, outputs: Sequence[Sequence[Chunk]] | None = None
    ) -> None:
        widths = [weight.shape[1] for weight in weights]
        self.columns = [slice(sum(widths[:i]), sum(widths[: i + 1])) for i in range(len(widths))]
        self.factor = factor
        self.weight = torch.cat([weight[factor.order] for weight in weights], dim=1)
        self.q = torch.empty(self.weight.shape, dtype=torch.uint8, device=self.weight.device)
        self._errors = torch.zeros_like(self.weight)
        self._lost = torch.zeros(sum(widths), dtype=torch.float64, device=self.weight.device)
        self._backend = kernels.backend(self.weight.device.type)
        self._waves = None if outputs is None else tuple(waves(outputs))

    def target(self, start: int, end: int) -> Tensor:
        """Rows plus the feedback of all rows before `start`: W + B E."""
        rows = self.weight[start:end]
        return torch.addmm(rows, self.factor.lower[start:end, :start], self._errors[:start]) if start else rows

    def moved(self, start: int, end: int, target: Tensor) -> Tensor:
        """The rows that GPTQ holds when it reaches `start`: the best ones for the codes so far.

        `target` is what row j sees when all rows between `start` and j keep their old value. They are expected to move
        too, by X = B⁻¹ (target - W) with B the square of these rows: that is what their codes will round.
        """
        if not start:
            return target
        rows = self.weight[start:end]
        square = self.factor.lower[start:end, start:end]
        return rows + torch.linalg.solve_triangular(square, target - rows, upper=False, unitriangular=True)

    def round(self, start: int, end: int, target: Tensor, group: Tensor, grids: Sequence[Sequence[Grid]]) -> None:
        """Choose the codes of rows `start` to `end`: place j of them on `grids[group[j]]`, one grid for each weight."""
        rows = self.weight[start:end]
        square = self.factor.lower[start:end, start:end]
        scales = torch.stack([torch.cat([grid.scale for grid in side_by_side]) for side_by_side in grids])
        zeros = torch.stack([torch.cat([grid.zero for grid in side_by_side]) for side_by_side in grids])
        top = grids[0][0].top
        if self._waves is None:
            q, errors = self._backend.solve_rows(rows, target, square, group, scales, zeros, top)
            # (B E)_j = t_j - ŵ_j, what rounding alone did to row j: D weighs its square.
            missed = torch.addmm(target - rows, square, errors)
        else:
            q, errors, missed = self._round_waves(rows, target, square, group, scales, zeros, top)
        self.q[start:end] = q
        self._errors[start:end] = errors
        self._lost += _column_squares(missed, self.factor.pivots[start:end, None])

    def _round_waves(
        self, rows: Tensor, target: Tensor, square: Tensor, group: Tensor, scales: Tensor, zeros: Tensor, top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, errors E and B E of some rows, where each wave of outputs takes over B E of those before it."""
        assert self._waves is not None
        q = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
        errors, missed = torch.empty_like(rows), torch.empty_like(rows)
        for wave in self._waves:
            own, before = rows[:, wave.outputs], target[:, wave.outputs]
            wanted = before.clone()
            for place, sources, lower in wave.sources:
                wanted[:, place].addmm_(missed[:, sources], lower.T)
            grids = scales[:, wave.outputs], zeros[:, wave.outputs]
            q[:, wave.outputs], found = self._backend.solve_rows(own, wanted, square, group, *grids, top)
            errors[:, wave.outputs] = found
            missed[:, wave.outputs] = torch.addmm(before - own, square, found)
        return q, errors, missed

    def losses(self) -> Tensor:
        """The diagonal of Eᵀ H E, float64, without the ridge that damping put into B and D."""
        return (self._lost - self.factor.ridge * _column_squares(self._errors)).clamp(min=0)


def _round_static(rounding: _Rounding, codec: Codec, layout: Layout) -> list[list[Grid]]:
    """Grids of consecutive features, fitted first; rows in any order. Returns the grids of each group."""
    assert len({group.bits for group in layout.groups}) == 1, "rows are rounded in one pass, so they have one width"
    order, pivots = rounding.factor.order, rounding.factor.pivots
    place = torch.argsort(order)
    group_of_feature = torch.empty_like(order)
    grids = []
    for number, (group, start, end) in enumerate(layout.spans()):
        places = place[start:end]
        group_of_feature[start:end] = number
        rows = rounding.weight[places]
        grids.append([codec.fit(rows[:, own].contiguous(), group.bits, pivots[places]) for own in rounding.columns])
    group_of_place = group_of_feature[order]
    for start in range(0, layout.rows, BLOCK_ROWS):
        end = min(start + BLOCK_ROWS, layout.rows)
        rounding.round(start, end, rounding.target(start, end), group_of_place[start:end], grids)
    return grids


def _round_act_order(rounding: _Rounding, codec: Codec, layout: Layout) -> list[list[Grid]]:
    """Grids of runs of rows in processing order, each fitted on the way. Returns the grids of each group."""
    grids = []
    for group, first, last in layout.spans():
        target = rounding.target(first, last)
        rows, pivots = rounding.moved(first, last, target), rounding.factor.pivots[first:last]
        side_by_side = [codec.fit(rows[:, own].contiguous(), group.bits, pivots) for own in rounding.columns]
        for start in range(first, last, BLOCK_ROWS):
            end = min(start + BLOCK_ROWS, last)
            target = target[: end - start] if start == first else rounding.target(start, end)
            only = torch.zeros(end - start, dtype=torch.int64, device=target.device)
            rounding.round(start, end, target, only, [side_by_side])
        grids.append(side_by_side)
    return grids


def _round_to_nearest(weight: Tensor, codec: Codec) -> Solution:
    layout = codec.layout(len(weight))
    groups = [(group, weight[start:end]) for group, start, end in layout.spans()]
    grids = tuple(codec.fit(rows, group.bits, None) for group, rows in groups)
    q = torch.cat([grid.quantize(rows) for grid, (_, rows) in zip(grids, groups, strict=True)])
    codes = Codes(q, grids, layout, torch.arange(len(weight), device=weight.device))
    losses = _column_squares(weight - codes.dequantize())
    return Solution(codes, losses, _column_squares(weight))


def _column_squares(matrix: Tensor, weights: Tensor | None = None) -> Tensor:
    """Σ_j weights[j] · matrix[j]² for each column, float64 [out] of float32 sums."""
    found = []
    for part in matrix.split(SUMMED_COLUMNS, 1):
        squares = part.square()
        found.append((squares if weights is None else squares.mul_(weights)).sum(0).double())
    return torch.cat(found)
