"""How sure a mean over a text is: predictions close to each other are alike, so blocks of neighbours are the units.

Both figures take a text as rows of values, one for each prediction, and cut each row into blocks that do not overlap
(Künsch 1989; Carlstein 1986).
"""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

BLOCK = 32
"""Predictions that are taken together: neighbours in a text are alike, far ones are not."""
RESAMPLES = 2000


def standard_error(rows: Sequence[Tensor] | Tensor) -> float | None:
    """Standard error of the mean of all values, from the spread of block sums about the mean; None of one block."""
    sums, counts = _blocks(rows)
    if len(sums) < 2:
        return None
    residuals = sums - counts * (sums.sum() / counts.sum())
    return float(math.sqrt(len(sums) / (len(sums) - 1) * (residuals**2).sum()) / counts.sum())


def bootstrap_interval(rows: Sequence[Tensor] | Tensor) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean of all values. The same values give the same interval; that of a single
    value is the value."""
    sums, counts = _blocks(rows)
    random = np.random.default_rng(0)
    draws = (random.integers(len(sums), size=len(sums)) for _ in range(RESAMPLES))
    low, high = np.percentile([sums[draw].sum() / counts[draw].sum() for draw in draws], [2.5, 97.5])
    return float(low), float(high)


def _blocks(rows: Sequence[Tensor] | Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Sum and size of each block; blocks are shorter than `BLOCK` where there would be fewer than eight."""
    size = max(1, min(BLOCK, sum(row.numel() for row in rows) // 8))
    blocks = [block for row in rows for block in row.split(size)]
    return np.array([float(block.sum()) for block in blocks]), np.array([len(block) for block in blocks])
