"""One operation of the CPU in a program of its own, and numbers to give it."""

from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.program import Program


def random(*shape: int, seed: int = 0) -> Tensor:
    """float32, normally distributed, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run_alone(operation: Any, operands: Any, threads: int) -> None:
    program = Program()
    program.add(operation, operands)
    program.run(threads)
