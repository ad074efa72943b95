"""Feedback between the outputs of one weight: an error at one is made up for by the outputs that act alike.

With H on the side of the inputs and G on that of the outputs, the loss of an error E is tr(H E G Eᵀ) (YAQA, arXiv
2505.22988). Where H = Bᵀ D B (`inverse`) and G = Cᵀ F C in the same way, that is ‖D^½ B E Cᵀ F^½‖²: rounding
entry (j, o) of W + (B E Cᵀ - E) to its nearest code minimises it greedily, inputs and outputs each in their order. C is
taken in blocks of outputs, of which those in one block are rounded side by side as if F were diagonal, and G in chunks
of neighbours, so that it grows with the number of outputs and not with its square.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.solver.inverse import cholesky

BLOCK = 16
SHARE = 0.5
"""Of G in the sum with a multiple of the identity that has the same mean diagonal."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Neighbouring outputs that know of each other.

    order  int64 [c]: the outputs, in processing order
    lower  float32 [c, c]: C in that order, with the identity in the place of each block on its diagonal
    """

    order: Tensor
    lower: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Wave:
    """Outputs that are rounded side by side, one block of each chunk, and what they take over.

    outputs  int64 [n]
    sources  for each chunk: its part of `outputs` as a slice, the outputs rounded before, int64 [m], and C between
             them, float32 [n', m]
    """

    outputs: Tensor
    sources: tuple[tuple[slice, Tensor, Tensor], ...]


def factor_outputs(covariances: Sequence[Tensor], share: float = SHARE) -> tuple[Chunk, ...] | None:
    """Factor G, given as its chunks on the diagonal: each [c, c] of any float dtype, symmetric, positive semidefinite.

    None where all of them are zero, which says nothing.
    """
    total = sum(float(chunk.diagonal().sum(dtype=torch.float64)) for chunk in covariances)
    if not total > 0:
        return None
    mean = total / sum(len(chunk) for chunk in covariances)
    chunks, start = [], 0
    for covariance in covariances:
        mixed = covariance.to(torch.float32) * (share / mean)
        mixed.diagonal().add_(1 - share)
        order, lower = _factor(mixed)
        chunks.append(Chunk(order + start, lower))
        start += len(covariance)
    return tuple(chunks)


def waves(linears: Sequence[Sequence[Chunk]]) -> Iterator[Wave]:
    """For linears whose outputs stand side by side, each in chunks that cover all of its outputs."""
    shifted, start = [], 0
    for chunks in linears:
        shifted += [(chunk.order + start, chunk.lower) for chunk in chunks]
        start += sum(len(chunk.order) for chunk in chunks)
    for first in range(0, max(len(order) for order, _ in shifted), BLOCK):
        outputs, sources, filled = [], [], 0
        for order, lower in shifted:
            own = order[first : first + BLOCK]
            if len(own):
                place = slice(filled, filled + len(own))
                outputs.append(own)
                sources.append((place, order[:first], lower[first : first + BLOCK, :first]))
                filled += len(own)
        yield Wave(torch.cat(outputs), tuple(sources))


def _factor(mixed: Tensor) -> tuple[Tensor, Tensor]:
    """Order and C of one chunk. H = U Uᵀ with U upper comes from the Cholesky factor of the flipped matrix."""
    order = torch.argsort(mixed.diagonal(), descending=True, stable=True)
    backwards = order.flip(0)
    flipped = mixed[backwards[:, None], backwards]
    found = cholesky(flipped)
    assert found, "a sum with a multiple of the identity is positive definite"
    upper = flipped.tril_().flip((0, 1))
    lower = torch.zeros_like(upper)
    for start in range(0, len(order), BLOCK):
        end = min(start + BLOCK, len(order))
        square = upper[start:end, start:end].T
        lower[start:end] = torch.linalg.solve_triangular(square, upper[:, start:end].T, upper=False)
        lower[start:end, start:end] = torch.eye(end - start, device=mixed.device)
    return order, lower
