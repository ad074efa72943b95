"""The choice of scales for one EXL2 group: one multiplier for the group, a 4-bit code for each column.

A column's scale is `S = fp16((c + 1)² · unit)` with `unit = fp16(q_scale_max / 256)`, so that all columns must find
their step on one lattice of squares. The unit is therefore searched, over the float16 numbers that a reader can come
to, and every candidate is judged by the error that its columns are left with once each has chosen its own code.
Units from 2⁻²⁴ on are held exactly by `q_scale_max = 256 · unit`, subnormal ones included.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit import kernels
from quantkit.errors import FormatError
from quantkit.formats.codec import Grid

# The units that a file can hold: above the largest one, scale code 15 would be infinite.
SMALLEST_UNIT, LARGEST_UNIT = 2.0**-24, 65504 / 256
ROOTS = torch.arange(1.0, 17.0)  # c + 1
# Steps tried for each column by itself, as shares of the one that clips nothing: 0.2 … 1.26.
STEPS = torch.logspace(-0.7, 0.1, 24)
# Units tried, as shares of the one that gives the column of the widest step that very step with the highest code.
UNITS = torch.logspace(-0.3, 0.15, 24)  # 0.5 … 1.41, 4.6 % apart
# Then the neighbours of the best few units, nearer each time.
NEIGHBOURS = (0.02, 0.01, 0.005)
BEST = 3

Cost = Callable[[Tensor], Tensor]


def scales(roots: Tensor, units: Tensor) -> Tensor:
    """What a reader computes from `c + 1` and float16-exact units, which broadcast: float32, rounded to float16."""
    return (roots.square() * units).to(torch.float16).to(torch.float32)


def fit(rows: Tensor, bits: int, importance: Tensor | None) -> Grid:
    """The grid of one group: rows float32 [g, out], importance float32 [g] → `stored` q_scale, q_scale_max.

    Codes reach from -2^(bits-1) to 2^(bits-1) - 1 steps, so that a step covers more on the negative side. Without
    importances no weight is more than half a step outside. With them the weighted squared error over all columns is
    searched for its least, and is never above that of the grid without. Raises FormatError for weights that are not
    finite or need a scale beyond float16.
    """
    lows, highs = rows.amin(0), rows.amax(0)  # NaN and infinity come through to them
    if not bool((torch.isfinite(lows) & torch.isfinite(highs)).all()):
        raise FormatError("a group of weights holds NaN or infinity", hint="use a checkpoint with finite weights")
    half = 1 << bits - 1
    steps = torch.maximum(lows / -half, highs / (half - 0.5)).clamp(min=0)
    if float(steps.max()) > 256 * LARGEST_UNIT:
        largest = float(rows.abs().max())
        raise FormatError(f"a weight of {largest:.3g} needs a scale beyond float16 at {bits} bits")
    unit, roots = plain = covering(steps)
    if importance is not None:
        unit, roots = search(_weighted_error(rows, half, importance), steps, plain)
    zero = torch.full_like(steps, half, dtype=torch.int32)
    stored = {"q_scale": (roots - 1).to(torch.uint8), "q_scale_max": (256 * unit).to(torch.float16)}
    return Grid(scales(roots, unit), zero, (1 << bits) - 1, stored)


def covering(steps: Tensor) -> tuple[Tensor, Tensor]:
    """Scales that no column's step [out] exceeds → unit [], roots [out]; of some units that with the smallest squares,
    as rounding to nearest costs the square of the scale."""
    least = _above(steps.max() / 256)
    units = _float16(least * torch.linspace(1, 1.4, 9, device=steps.device))[:, None]
    roots = (steps / units).sqrt().ceil().clamp(min=1)
    roots += scales(roots, units) < steps  # where rounding has taken the scale below
    best = int(_totals(scales(roots, units).square()).argmin())
    return units[best, 0], roots[best]


def search(cost: Cost, steps: Tensor, plain: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The unit and the roots of the least total cost → unit [], roots [out].

    cost   the error of each column under each of some scales, float32 [n, out] → [n, out]
    steps  the least step of each column that clips nothing, [out]
    plain  a unit and roots that the result must not be worse than

    Each column first shows which step it would take by itself. Units are then compared by the total that is left when
    every column has the better of the two codes around its own step; at last all 16 codes are tried under the winner.
    """
    steps = steps.clamp(min=SMALLEST_UNIT)
    alone = STEPS.to(steps.device)[:, None] * steps
    own = alone.gather(0, cost(alone).min(0, keepdim=True).indices)[0]  # `argmin` takes ten times as long

    def totals(units: Tensor) -> Tensor:
        below = (own / units[:, None]).sqrt().floor()
        roots = torch.stack((below, below + 1)).clamp(1, 16)
        errors = cost(scales(roots, units[:, None]).flatten(0, 1))
        return _totals(errors.view(roots.shape).amin(0))

    units = _float16(own.max() / 256 * UNITS.to(steps.device)).unique()
    left = totals(units)
    for distance in NEIGHBOURS:
        best = left.argsort(stable=True)[:BEST]
        beside = _float16(units[best, None] * torch.tensor([1 - distance, 1 + distance], device=steps.device)).flatten()
        units, left = torch.cat((units[best], beside)), torch.cat((left[best], totals(beside)))
    unit = units[left.argmin()]
    errors, codes = cost(scales(ROOTS.to(steps.device)[:, None], unit).expand(-1, len(steps))).min(0)
    if _totals(errors) > _totals(cost(scales(plain[1], plain[0])[None])[0]):
        return plain
    return unit, codes + 1.0


def _weighted_error(rows: Tensor, half: int, importance: Tensor) -> Cost:
    if not bool(torch.isfinite(importance).all()) or bool((importance < 0).any()):
        raise FormatError("importances must be finite and not negative")
    if not bool(importance.any()):
        importance = torch.ones_like(importance)
    backend = kernels.backend(rows.device.type)
    most = max(len(STEPS), 2 * len(UNITS), len(ROOTS))
    zeros = torch.full((most, rows.shape[1]), half, dtype=torch.int32, device=rows.device)
    return lambda candidates: backend.grid_error(rows, importance, candidates, zeros[: len(candidates)], 2 * half - 1)


def _totals(errors: Tensor) -> Tensor:
    """Sums over the last axis that do not depend on the number of threads, to float32."""
    return errors.sum(-1, dtype=torch.float64).to(torch.float32)


def _float16(units: Tensor) -> Tensor:
    """The nearest units that a file can hold, as float32."""
    return units.clamp(SMALLEST_UNIT, LARGEST_UNIT).to(torch.float16).to(torch.float32)


def _above(unit: Tensor) -> Tensor:
    """The least unit that a file can hold and that is not below this one."""
    rounded = _float16(unit).to(torch.float16)
    above = (rounded.view(torch.int16) + 1).view(torch.float16)
    return torch.where(rounded.to(torch.float32) < unit, above, rounded).to(torch.float32)
