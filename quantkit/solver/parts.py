"""A weight solved some outputs at a time: the same codes in less memory, where outputs know nothing of each other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.formats.codec import Codec, Codes, Grid
from quantkit.solver.gptq import Solution, solve_together
from quantkit.solver.inverse import Factor
from quantkit.solver.outputs import Chunk

PART_OUTPUTS = 512


def solve_in_parts(
    read: Callable[[slice], Tensor],
    out_features: int,
    factor: Factor,
    codec: Codec,
    outputs: Sequence[Chunk] | None = None,
) -> Solution:
    """As `solve_together` of one weight, for a codec whose `columns_alone` says that it may be done.

    read     the weight of some outputs, float32 [in, n]
    outputs  as there; outputs of one chunk stay together
    """
    assert codec.columns_alone
    found = []
    for part, chunks in _parts(out_features, outputs):
        own = None if chunks is None else [chunks]
        found += solve_together([read(part)], factor, codec, own)
    first = found[0].codes
    grids = tuple(map(_join, *(solution.codes.grids for solution in found)))
    q = torch.cat([solution.codes.q for solution in found], 1)
    return Solution(
        Codes(q, grids, first.layout, first.order),
        torch.cat([solution.losses for solution in found]),
        torch.cat([solution.energies for solution in found]),
    )


def _parts(out_features: int, outputs: Sequence[Chunk] | None) -> Iterator[tuple[slice, Sequence[Chunk] | None]]:
    """Neighbouring outputs, and the chunk that they are, counted from the first of them."""
    if outputs is None:
        for start in range(0, out_features, PART_OUTPUTS):
            yield slice(start, min(start + PART_OUTPUTS, out_features)), None
        return
    start = 0
    for chunk in outputs:
        yield slice(start, start + len(chunk.order)), [replace(chunk, order=chunk.order - start)]
        start += len(chunk.order)


def _join(*parts: Grid) -> Grid:
    """One group of neighbouring outputs."""
    return Grid(
        torch.cat([grid.scale for grid in parts]),
        torch.cat([grid.zero for grid in parts]),
        parts[0].top,
        {name: torch.cat([grid.stored[name] for grid in parts]) for name in parts[0].stored},
    )
