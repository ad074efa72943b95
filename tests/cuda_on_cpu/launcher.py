"""The CUDA backend on the CPU executor: the same methods, shapes, arguments and sources, with no GPU."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cuda_on_cpu.launch import Module
from cuda_on_cpu.memory import guarded
from quantkit.kernels.launcher import Argument
from quantkit.kernels.sources import Defines

# As torch aligns what it allocates, at least.
ALIGNMENT = 16
POISON = 0xFB


class ExecutorLauncher:
    """Stands where CuPy's launcher stands. Memory to write into is poisoned, and ends at an unreadable page, or a few
    bytes before it that are looked at after each launch."""

    def __init__(
        self,
        order: str = "forward",
        seed: int = 0,
        *,
        architecture: int = 80,
        processors: int = 4,
        folder: Path = Path(str(files("quantkit.kernels") / "cuda")),
    ) -> None:
        self._folder = folder
        self._schedule = {"order": order, "seed": seed}
        self._architecture = architecture
        self._processors = processors
        self._counters = torch.zeros(4096, dtype=torch.int32)
        self._beyond: list[np.ndarray] = []
        self.launched: list[tuple[str, tuple[int, ...]]] = []

    def device(self) -> torch.device:
        return torch.device("cpu")

    def reaches(self, tensor: Tensor) -> bool:
        return True

    def architecture(self, device: torch.device) -> int:
        return self._architecture

    def processors(self, device: torch.device) -> int:
        return self._processors

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        memory = guarded(torch.full((-(-size // ALIGNMENT) * ALIGNMENT,), POISON, dtype=torch.uint8))
        if size < len(memory):
            self._beyond.append(memory[size:].numpy())  # looked at after each launch: NumPy is quicker than torch
        return memory[:size].view(dtype).view(tuple(shape))

    def counters(self, count: int, device: torch.device) -> Tensor:
        assert not self._counters.any(), "a kernel left its counters behind"
        return self._counters

    def run(
        self,
        name: str,
        defines: Defines,
        entry: str,
        grid: Sequence[int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        device: torch.device,
        shared_bytes: int = 0,
    ) -> None:
        module = _module(self._folder / f"{name}.cu", tuple(sorted(defines.items())), self._architecture)
        function = module.get_function(entry)
        function(grid, (threads,), arguments, shared_mem=shared_bytes, **self._schedule)
        assert all((bytes_left == POISON).all() for bytes_left in self._beyond), f"`{entry}` wrote past its output"
        self.launched.append((entry, tuple(grid)))


@cache
def _module(path: Path, defines: tuple[tuple[str, int | str], ...], architecture: int) -> Module:
    options = [f"-D{key}={value}" for key, value in defines]
    return Module(path, options=[*options, f"-D__CUDA_ARCH__={architecture}0"])
