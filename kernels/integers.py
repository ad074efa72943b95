"""Products in integers: a row of x rounded once, and the products of it with weights in bit planes, as operations.

    inputs = Rounded(rows=4, width=2048)
    inputs.add_rounding(program, x, order)          # float32 x [rows, 2048] → integers
    inputs.add_product(program, planes, y, 0)       # y [rows, …] from column 0 on
"""

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels import multiply, rounding
from quantkit.kernels.planes import UNIT, Planes
from quantkit.kernels.program import Program

BLOCK_ROWS = 4
"""Rows that are multiplied at once where there are several: a weight is decoded once for them."""


def padded(rows: int) -> int:
    """So many rows have to be in memory for `rows` of them."""
    return rows if rows == 1 else -(-rows // BLOCK_ROWS) * BLOCK_ROWS


class Rounded:
    """Memory for `rows` rows of `width` inputs as `rounding.round_rows` leaves them; see `padded`."""

    def __init__(self, rows: int, width: int) -> None:
        assert rows == padded(rows) and width % UNIT == 0
        self.rows, self.width = rows, width
        units = width // UNIT
        self._parts = (
            np.zeros((rows, units, 2 * UNIT), np.int8),
            np.zeros((rows, units), np.float32),
            np.zeros((rows, units), np.int32),
        )

    def add_rounding(self, program: Program, x: Tensor, order: Tensor | None, *, waits: bool = True) -> None:
        """x float32 [rows, width], its values in `order`, int64 [width], or as they stand."""
        assert x.shape == (self.rows, self.width)
        operands = (x, order, self.rows, x.shape[1], self.width // UNIT, *self._parts)
        program.add(rounding.round_rows(), operands, waits=waits)

    def add_product(
        self, program: Program, planes: Planes, y: Tensor, column: int, bias: Tensor | None = None
    ) -> None:
        """y float32 [rows, …] from `column` on becomes x · weight + bias, float32 [out]; nobody waits behind it."""
        assert planes.in_features == self.width
        block = 1 if self.rows == 1 else BLOCK_ROWS
        for index, section in enumerate(planes.sections):
            operands = (
                *(*self._parts, self.rows, self.width // UNIT, *section.operands),
                *(y, y.shape[1], column, (0 if index else 1 if bias is None else 2), bias),
            )
            assert y.shape[1] >= column + section.out_features
            product = multiply.integer_product(section.bits, block, section.scale_bits)
            program.add(product, operands, waits=False)


def product(x: Tensor, planes: Planes, threads: int) -> Tensor:
    """x [m, in] of any float dtype → float32 [m, out], at least one row."""
    m, rows = len(x), padded(len(x))
    x = torch.nn.functional.pad(x.to(torch.float32), (0, 0, 0, rows - m)).contiguous()
    y = torch.empty(rows, planes.out_features)
    program, inputs = Program(), Rounded(rows, planes.in_features)
    inputs.add_rounding(program, x, planes.order)
    inputs.add_product(program, planes, y, 0)
    program.run(threads)
    return y[:m]
