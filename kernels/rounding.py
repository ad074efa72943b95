"""x as integers of 16 bits, with a scale for each unit of 32 values: what integer products begin with."""

from functools import cache
from typing import Any

import numpy as np

from quantkit.kernels.columns import nearest
from quantkit.kernels.planes import UNIT
from quantkit.kernels.program import operation
from quantkit.kernels.views import array_at, larger, room

# The high byte of the largest integer is 127.
LARGEST = 127 * 256


@cache
def round_rows() -> Any:
    """The operation that rounds x to 16-bit integers, in units of 32: `x ≈ X · scale`, X = 256·h + l.

    Operands: x float32 [m, width], int64 order [units·32] in which its values are taken, or 0; m, width, units; what
    comes out: codes int8 [m, units, 64], h of the 32 values and then l, scales float32 [m, units], NaN where a value is
    NaN or infinite, which makes the products NaN, and sums int32 [m, units] of X.
    """
    return operation(_round)


def _round(thread, threads, arguments):  # type: ignore[no-untyped-def]
    a = array_at(arguments, 8, np.int64)
    m, width, units = a[2], a[3], a[4]
    x = array_at(a[0], (m, width), np.float32)
    order = array_at(a[1], units * UNIT, np.int64)
    codes = array_at(a[5], (m, units, 2 * UNIT), np.int8)
    scales = array_at(a[6], (m, units), np.float32)
    sums = array_at(a[7], (m, units), np.int32)
    values, integers = room(UNIT, np.float32), room(UNIT, np.int32)
    for place in range(m * units * thread // threads, m * units * (thread + 1) // threads):
        row, unit = place // units, place % units
        if a[1]:
            for k in range(UNIT):
                values[k] = x[row, order[unit * UNIT + k]]
        else:
            for k in range(UNIT):
                values[k] = x[row, unit * UNIT + k]
        top, wrong = np.float32(0), np.float32(0)
        for k in range(UNIT):
            top = larger(abs(values[k]), top)
            wrong += values[k] * np.float32(0)
        inverse = np.float32(0)
        if wrong == 0 and top > np.float32(1e-30):
            inverse = np.float32(LARGEST) / top
        total = np.int32(0)
        for k in range(UNIT):
            integers[k] = np.int32(nearest(values[k] * inverse)) if inverse > 0 else np.int32(0)
        for k in range(UNIT):
            upper = (integers[k] + 128) >> 8
            codes[row, unit, k] = upper
            codes[row, unit, UNIT + k] = integers[k] - (upper << 8)
            total += integers[k]
        scales[row, unit] = top * np.float32(1 / LARGEST) + wrong
        sums[row, unit] = total
