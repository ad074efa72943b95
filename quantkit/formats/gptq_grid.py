"""The choice of scale and zero point for one GPTQ group.

A candidate grid is an integer zero point and a float16 scale of either sign. Plain grids clip nothing: no weight lies
more than half a step outside. Without importances the finer plain grid is taken. With importances, shrunken and
stretched copies of the plain grids compete, and each column keeps the one with the least weighted squared error.
"""

import torch
from torch import Tensor

from quantkit import kernels
from quantkit.errors import FormatError
from quantkit.formats.codec import Grid

SHRINK = torch.linspace(0.35, 1.12, 40)
# The range of positive float16 numbers, subnormals included. A scale that rounded to 0 would lose its group.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 65504.0


def fit(rows: Tensor, bits: int, importance: Tensor | None, *, sym: bool, least_zero: int) -> Grid:
    """The grid of one group: rows float32 [g, out], importance float32 [g] → scales float16-exact, one for each column.

    `sym` keeps the zero point at 2^(bits-1); the sign of the scale then decides which end of the weights gets the one
    code more. `least_zero` bounds an asymmetric zero point from below (1 where the file cannot hold 0).
    Raises FormatError for weights that are not finite or need a scale beyond float16.
    """
    if not bool(torch.isfinite(rows).all()):
        raise FormatError("a group of weights holds NaN or infinity", hint="use a checkpoint with finite weights")
    top = (1 << bits) - 1
    low, high = rows.amin(0).clamp(max=0), rows.amax(0).clamp(min=0)
    widest = float((high - low).max())
    if widest / top > LARGEST_SCALE:
        raise FormatError(
            f"a group of weights spans {widest:.3g}, which no float16 scale covers at {bits} bits",
            hint="use `--bits 8`, whose steps are smaller; weights of this size may be damaged, though",
        )
    if sym:
        scales, zeros = _symmetric(low, high, bits)
    else:
        scales, zeros = _asymmetric(low, high, top, least_zero)
    if importance is None:
        best = scales.abs().argmin(0)
    else:
        scales, zeros = _stretched(scales, zeros)
        best = _cheapest(rows, importance, scales, zeros, top)
    scale = scales.gather(0, best[None])[0]
    zero = zeros.gather(0, best[None])[0]
    scale = torch.where(low == high, torch.zeros_like(scale), scale)  # an all-zero column is exactly zero
    return Grid(scale, zero, top, {"scales": scale.to(torch.float16), "zeros": zero.to(torch.uint8)})


def _symmetric(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Both signs of the full-range grid: codes reach from -2^(bits-1) to 2^(bits-1) - 1 steps.

    The full end is reached exactly, the other within half a step (the rounding error that every weight may have), so
    a group without a negative weight takes the negative scale and is not clipped.
    """
    half = 1 << bits - 1
    positive = torch.maximum(-low / half, high / (half - 0.5))
    negative = torch.maximum(high / half, -low / (half - 0.5))
    scales = torch.stack((_covering(positive), -_covering(negative)))
    return scales, torch.full_like(scales, half, dtype=torch.int32)


def _asymmetric(low: Tensor, high: Tensor, top: int, least_zero: int) -> tuple[Tensor, Tensor]:
    """The two integer zero points around the real one, each with the smallest step that covers the group."""
    exact = -low * top / (high - low).clamp(min=torch.finfo(torch.float32).tiny)
    zeros = torch.stack((exact.floor(), exact.ceil())).clamp(least_zero, top)
    steps = torch.maximum(-low / (zeros + 0.5), high / (top - zeros + 0.5))
    nearest = (zeros - exact).abs() <= 0.5  # the usual min-max grid: both ends off by at most half a step
    return _covering(torch.where(nearest, (high - low) / top, steps)), zeros.to(torch.int32)


def _stretched(scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """The plain grids [2, out] and, after them, each multiplied by every factor of SHRINK."""
    factors = SHRINK.to(scales.device)[:, None, None]
    stretched = scales.sign() * _nearest(scales.abs() * factors)
    return torch.cat((scales, stretched.flatten(0, 1))), zeros.repeat(1 + len(SHRINK), 1)


def _cheapest(rows: Tensor, importance: Tensor, scales: Tensor, zeros: Tensor, top: int) -> Tensor:
    """The candidate with the least error in each column, int64 [out]; the first of equals, so plain grids win ties."""
    if not bool(torch.isfinite(importance).all()) or bool((importance < 0).any()):
        raise FormatError("importances must be finite and not negative")
    if not bool(importance.any()):
        importance = torch.ones_like(importance)
    backend = kernels.backend(rows.device.type)
    return backend.grid_error(rows, importance, scales, zeros, top).argmin(0)


def _nearest(scale: Tensor) -> Tensor:
    """Positive scales as the file will hold them: rounded to float16 and kept away from 0 and infinity."""
    return scale.clamp(SMALLEST_SCALE, LARGEST_SCALE).to(torch.float16).to(torch.float32)


def _covering(scale: Tensor) -> Tensor:
    """Positive scales rounded up to float16. Rounded down, a subnormal one could leave out a third of its range."""
    rounded = _nearest(scale).to(torch.float16)
    above = (rounded.view(torch.int16) + 1).view(torch.float16)
    return torch.where((rounded < scale) & (rounded < LARGEST_SCALE), above, rounded).to(torch.float32)
