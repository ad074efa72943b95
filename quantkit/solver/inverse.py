"""The Hessian factored for error feedback: order, damping, one Cholesky, and what to do when it fails.

With H = Bᵀ D B, B unit lower triangular and D diagonal, both in processing order, the weighted error of a rounded
weight is Σ_j D_j ‖(B (W - Q))_j‖². Rounding row j of W + (B - I)(W - Q) to its nearest code therefore minimises it
greedily: this is GPTQ (arXiv 2210.17323) in its LDL form (QuIP, arXiv 2307.13304, section 3). Nothing is inverted: the
rows are flipped, so that the lower Cholesky factor of the flipped matrix is the transpose of the upper one needed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import CalibrationError

DAMPING = 0.01
DAMPING_STEPS = (1, 3, 10, 30, 100)  # factors tried one after another when the factorisation fails
BLOCK_COLUMNS = 64
MOVED = 256
"""Rows or columns that are copied at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """H + ridge · I = Bᵀ D B, rows and columns in processing order.

    order        int64 [in]: the input feature of each place
    lower        float32 [in, in]: B, unit lower triangular
    pivots       float32 [in]: D, the part of each input that the inputs after it do not explain
    ridge        what was added to the diagonal
    damping      the same as a share of the mean of the diagonal over live inputs
    dead_inputs  inputs that calibration never moved: only the ridge speaks for them, so they are rounded to nearest
                 and feed no error to others
    fallback     None, or why there is no error feedback at all: B is then the identity, D the damped diagonal
    """

    order: Tensor
    lower: Tensor
    pivots: Tensor
    ridge: float
    damping: float
    dead_inputs: int
    fallback: str | None = None

    @property
    def trace(self) -> float:
        """Of H itself, without the ridge."""
        damped = (self.pivots * self.lower.square().sum(1)).sum(dtype=torch.float64)
        return max(0.0, float(damped) - self.ridge * len(self.pivots))


def descending(hessian: Tensor) -> Tensor:
    """The processing order: inputs by their diagonal, greatest first, equals in their own order. int64 [in]."""
    return torch.argsort(hessian.diagonal(), descending=True, stable=True)


def grouped(hessian: Tensor, groups: Tensor) -> Tensor:
    """A processing order that keeps groups of rows together, int64 [in]: the most active group first by the mean of its
    diagonal, a smaller one than the first last; in a group inputs by their diagonal.

    For weights that were quantized before: within an old group they lie on a few values, which a new group of the same
    rows can meet and one of other rows cannot. groups int64 [in].
    """
    diagonal = hessian.diagonal().double().cpu()  # sums on a GPU have no order of their own
    count = int(groups.max()) + 1
    rows = torch.bincount(groups, minlength=count)
    means = torch.zeros(count, dtype=torch.float64).index_add_(0, groups, diagonal) / rows.clamp(min=1)
    whole = rows >= rows.max()
    places = sorted(range(count), key=lambda group: (not bool(whole[group]), -float(means[group]), group))
    rank = torch.empty(count, dtype=torch.int64)
    rank[torch.tensor(places)] = torch.arange(count)
    inside = descending(hessian).cpu()
    return inside[torch.argsort(rank[groups[inside]], stable=True)].to(hessian.device)


def factor(
    hessian: Tensor, order: Tensor | None = None, damping: float = DAMPING, *, name: str = "", last: bool = False
) -> Factor:
    """Factor a symmetric Hessian, float32 or float64 [in, in], in its own dtype; `order` None means
    `descending(hessian)`.

    `damping` times the mean of the diagonal is added to it. When the factorisation fails, it is tried again with the
    multiples of DAMPING_STEPS, and after the last of them the factor has a `fallback`. With `last` nobody needs the
    Hessian any more: its memory is given up before that of the factor is taken. Raises CalibrationError, with the
    `name` of the linear, for NaN or infinity.

    All of it is done in the memory of one matrix.
    """
    diagonal = hessian.diagonal().clone()
    if not all(bool(torch.isfinite(end)) for end in torch.aminmax(hessian)):
        raise CalibrationError(
            f"the Hessian of `{name}` holds NaN or infinity", hint="use `--dtype fp32` and other calibration text"
        )
    order = descending(hessian) if order is None else order
    live = diagonal > 0
    dead_inputs = int((~live).sum())
    if dead_inputs == len(diagonal):
        return _diagonal(diagonal, order, damping, "calibration moved none of its inputs")
    mean = float(diagonal[live].double().mean())
    flipped = hessian.view_as(hessian).detach() if last else hessian.clone()
    if last:
        hessian.set_()  # type: ignore[call-overload]  # `resize_` would not give its memory up
    _permute(flipped, order.flip(0))
    squares = _squares(flipped)
    for step in DAMPING_STEPS:
        ridge = damping * step * mean
        flipped.diagonal().add_(ridge)
        if cholesky(flipped):
            pivots = _unit_lower(flipped)
            return Factor(order, flipped.float(), pivots.float(), ridge, damping * step, dead_inputs)
        _restore(flipped, squares)
    most = damping * DAMPING_STEPS[-1]
    return _diagonal(diagonal, order, damping, f"its Hessian stays singular up to damping {most:g}")


def cholesky(matrix: Tensor) -> bool:
    """Overwrite the lower triangle of a symmetric matrix with its Cholesky factor; False when there is none.

    Blocks of columns, each updated by one product with all columns before it: as fast as LAPACK's and, unlike it, the
    same to the last bit on any number of threads. What stands above the diagonal afterwards has no meaning.
    """
    size = len(matrix)
    for start in range(0, size, BLOCK_COLUMNS):
        end = min(start + BLOCK_COLUMNS, size)
        if start:
            matrix[start:, start:end].addmm_(matrix[start:, :start], matrix[start:end, :start].T, alpha=-1)
        square, failed_at = torch.linalg.cholesky_ex(matrix[start:end, start:end])
        if int(failed_at) or not bool(torch.isfinite(square).all()):
            return False
        matrix[start:end, start:end] = square
        if end < size:
            identity = torch.eye(end - start, dtype=matrix.dtype, device=matrix.device)
            inverse = torch.linalg.solve_triangular(square, identity, upper=False)
            matrix[end:, start:end] = matrix[end:, start:end] @ inverse.T
    return True


def _permute(matrix: Tensor, order: Tensor) -> None:
    """Rows and columns of a square matrix into this order, in place."""
    for start in range(0, len(matrix), MOVED):
        part = slice(start, start + MOVED)
        matrix[:, part] = matrix[order, part]
    for start in range(0, len(matrix), MOVED):
        part = slice(start, start + MOVED)
        matrix[part] = matrix[part][:, order]


def _transpose(matrix: Tensor) -> None:
    """A square matrix, in place."""
    for start in range(0, len(matrix), MOVED):
        part, rest = slice(start, start + MOVED), slice(start + MOVED, None)
        matrix[part, part] = matrix[part, part].T.clone()
        across = matrix[part, rest].T.clone()
        matrix[part, rest] = matrix[rest, part].T
        matrix[rest, part] = across


def _squares(matrix: Tensor) -> list[Tensor]:
    """A copy of what stands on the diagonal, as `cholesky` cuts it."""
    ends = (slice(start, start + BLOCK_COLUMNS) for start in range(0, len(matrix), BLOCK_COLUMNS))
    return [matrix[part, part].clone() for part in ends]


def _restore(matrix: Tensor, squares: list[Tensor]) -> None:
    """What `cholesky` has overwritten of a symmetric matrix: all but what stands above those squares."""
    for number, square in enumerate(squares):
        start = number * BLOCK_COLUMNS
        end = start + len(square)
        matrix[start:end, start:end] = square
        matrix[end:, start:end] = matrix[start:end, end:].T


def _unit_lower(flipped: Tensor) -> Tensor:
    """Cholesky factor L of the flipped matrix → B, in its place, and D [in].

    Flipped back, L is the upper U with H = U Uᵀ. Its columns divided by the roots of D = diag(U)² are Bᵀ.
    """
    _permute(flipped.tril_(), torch.arange(len(flipped) - 1, -1, -1, device=flipped.device))
    _transpose(flipped)
    roots = flipped.diagonal().clone()
    flipped.div_(roots[:, None])
    return roots.square()


def _diagonal(diagonal: Tensor, order: Tensor, damping: float, reason: str) -> Factor:
    """No feedback: each row is rounded to nearest, and its error counts as its own diagonal says."""
    diagonal = diagonal.clamp(min=0)
    ridge = damping * float(diagonal.mean()) if bool(diagonal.any()) else 1.0
    lower = torch.eye(len(order), dtype=torch.float32, device=diagonal.device)
    return Factor(order, lower, diagonal[order].float() + ridge, ridge, damping, int((diagonal == 0).sum()), reason)
