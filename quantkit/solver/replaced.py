"""What a weight loses that is there already, by the measure that its successor is judged by."""

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.solver.gptq import SUMMED_COLUMNS, find_energies
from quantkit.solver.inverse import Factor


def relative_error(columns: Callable[[slice], Tensor], other: Tensor, factor: Factor | None) -> float:
    """`Solution.error` of `other`, floats [in, out], as a stand-in for the weight of which `columns` gives some
    outputs, float32 [in, n]. Some columns at a time."""
    lost = energy = 0.0
    for start in range(0, other.shape[1], SUMMED_COLUMNS):
        own = slice(start, start + SUMMED_COLUMNS)
        weight = columns(own)
        missed = weight - other[:, own].to(weight.device, torch.float32)
        lost += _energy(missed, factor)
        energy += _energy(weight, factor)
    return lost / energy if energy > 0 else 0.0


def _energy(weight: Tensor, factor: Factor | None) -> float:
    if factor is None:
        return float(weight.square().sum(dtype=torch.float64))
    return float(find_energies([weight], factor)[0].sum())
