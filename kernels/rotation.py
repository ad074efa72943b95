"""Rotation of the heads of many tokens on the CPU, in bfloat16, as an operation of a `Program`: in one sweep.

    turned = turn(x, cos, sin, threads=2)        # [b, s, heads, d] → the same

By torch's operations one after another the float32 between them goes to the outer cache and back half a dozen times.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.operations import narrow, wide
from quantkit.kernels.program import Program, operation
from quantkit.kernels.views import array_at


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, threads: int) -> Tensor:
    """x bfloat16 [b, s, heads, d] of any strides but 1 between the elements of a head; cos and sin float32 [b or 1, s,
    pairs] → bfloat16 [b, s, heads, d]: every operation rounded to float32, as torch does it, the result to bfloat16."""
    batch, length, heads, dim = x.shape
    rows, _, pairs = cos.shape
    assert cos.shape == sin.shape == (rows, length, pairs) and rows in (1, batch) and 2 * pairs <= dim
    assert x.stride(3) == 1 and x.dtype == torch.bfloat16 and cos.dtype == sin.dtype == torch.float32
    y = torch.empty(x.shape, dtype=x.dtype)
    program = Program()
    sizes = (*x.stride()[:3], batch, length, heads, dim, pairs, 0 if rows == 1 else length)
    program.add(rotate(), (x.data_ptr(), cos.contiguous(), sin.contiguous(), y, *sizes))
    program.run(threads)
    return y


@cache
def rotate() -> Any:
    """The operation that turns heads; tokens are shared out.

    Operands: x bfloat16; cos, sin float32 [rows, s, pairs]; y bfloat16 [b, s, heads, d]; elements of x from a row, a
    token and a head to the next; b, s, heads, d, pairs; s, or 0 where all rows have the same angles.
    """

    def kernel(thread, threads, arguments):  # type: ignore[no-untyped-def]
        a = array_at(arguments, 13, np.int64)
        length, heads, dim, pairs = a[8], a[9], a[10], a[11]
        tokens = a[7] * length
        for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
            row, place = token // length, token % length
            angle = 4 * pairs * (row * a[12] + place)
            cos, sin = array_at(a[1] + angle, pairs, np.float32), array_at(a[2] + angle, pairs, np.float32)
            for head in range(heads):
                x_at = a[0] + 2 * (row * a[4] + place * a[5] + head * a[6])
                y_at = a[3] + 2 * (token * heads + head) * dim
                first, second = array_at(x_at, pairs, np.uint16), array_at(x_at + 2 * pairs, pairs, np.uint16)
                near, far = array_at(y_at, pairs, np.uint16), array_at(y_at + 2 * pairs, pairs, np.uint16)
                for pair in range(pairs):
                    one, other = wide(first[pair]), wide(second[pair])
                    near[pair] = narrow(one * cos[pair] - other * sin[pair])
                    far[pair] = narrow(other * cos[pair] + one * sin[pair])
                left = dim - 2 * pairs
                rest, kept = array_at(x_at + 4 * pairs, left, np.uint16), array_at(y_at + 4 * pairs, left, np.uint16)
                for k in range(left):
                    kept[k] = rest[k]

    return operation(kernel, fastmath=False)
