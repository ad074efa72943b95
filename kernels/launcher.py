"""What the CUDA backend asks of a device, and CuPy's answer: the only module that imports CuPy.

Torch allocates everything; a kernel gets `data_ptr()`, and runs on torch's current stream of the tensor's device, both
read at each launch. Tests put an executor of the same sources in this place.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import BackendError
from quantkit.kernels import nvrtc
from quantkit.kernels.sources import Defines, source

# More than this much shared memory has to be asked for.
FREELY_SHARED_BYTES = 48 * 1024
# Enough for the widest layers, so that counters are not replaced while a captured graph still points at them.
LEAST_COUNTERS = 1 << 16

Argument = Tensor | np.generic | int


class Launcher(Protocol):
    """Runs the kernels of `cuda/*.cu` on one kind of device."""

    def device(self) -> torch.device:
        """The device that is current."""

    def reaches(self, tensor: Tensor) -> bool:
        """Whether its kernels can use the memory of `tensor`."""

    def architecture(self, device: torch.device) -> int:
        """Compute capability, such as 80 or 90."""

    def processors(self, device: torch.device) -> int:
        """Multiprocessors: how many blocks it takes to fill the device once."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory to write into."""

    def counters(self, count: int, device: torch.device) -> Tensor:
        """int32 zeros, at least `count`, of the current stream: every kernel that changes them leaves zeros behind."""

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
        """Launch kernel `entry` of `cuda/{name}.cu` compiled with `defines`. Raises BackendError."""


class CupyLauncher:
    """NVIDIA GPUs, through CuPy."""

    def __init__(self) -> None:
        self._counters: dict[tuple[int, int], Tensor] = {}

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def reaches(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def architecture(self, device: torch.device) -> int:
        return _architecture(_index(device))

    def processors(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def counters(self, count: int, device: torch.device) -> Tensor:
        key = _index(device), torch.cuda.current_stream(device).cuda_stream
        kept = self._counters.get(key)
        if kept is None or kept.numel() < count:
            kept = self._counters[key] = torch.zeros(max(count, LEAST_COUNTERS), dtype=torch.int32, device=device)
        return kept

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
        import cupy

        for value in arguments:
            if isinstance(value, Tensor) and value.device != device:  # a kernel would read it as if it were there
                raise BackendError(f"kernel `{entry}` expected tensors on `{device}`, found one on `{value.device}`")
        index = _index(device)
        kernel = _kernel(name, tuple(sorted(defines.items())), entry, index, shared_bytes)
        values = tuple(value.data_ptr() if isinstance(value, Tensor) else value for value in arguments)
        stream = torch.cuda.current_stream(index).cuda_stream
        try:
            with cupy.cuda.Device(index), cupy.cuda.ExternalStream(stream, index):
                kernel(tuple(grid), (threads,), values, shared_mem=shared_bytes)
        except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError) as error:
            raise BackendError(
                f"the CUDA kernel `{entry}` failed to launch on {_named(index)} with grid {tuple(grid)}, "
                f"{threads} threads, {shared_bytes} bytes of shared memory: {error}",
                hint=nvrtc.FALLBACK,
            ) from error


@cache
def _kernel(name: str, defines: tuple[tuple[str, int | str], ...], entry: str, index: int, shared_bytes: int) -> Any:
    import cupy

    architecture = _architecture(index)
    least = source(name).least_architecture(dict(defines))
    if architecture < least:
        raise BackendError(
            f"the CUDA kernel `{name}` needs sm_{least}, {_named(index)} is sm_{architecture}", hint=nvrtc.FALLBACK
        )
    path = nvrtc.cubin_file(name, dict(defines), architecture)
    try:
        with cupy.cuda.Device(index):
            kernel = cupy.RawModule(path=str(path)).get_function(entry)
            if shared_bytes > FREELY_SHARED_BYTES:
                kernel.max_dynamic_shared_size_bytes = shared_bytes
    except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError) as error:
        raise BackendError(
            f"the driver cannot load the CUDA kernel `{name}` compiled for sm_{architecture} by "
            f"NVRTC {'.'.join(map(str, nvrtc.library().version))}: {error}",
            hint="update the NVIDIA driver, or install the `nvidia-cuda-nvrtc` of its CUDA version",
        ) from error
    return kernel


@cache
def _architecture(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@cache
def _named(index: int) -> str:
    return f"`cuda:{index}` ({torch.cuda.get_device_name(index)})"


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
