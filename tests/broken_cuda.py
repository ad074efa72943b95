"""Machines whose CUDA is broken, one kind at a time: what each lacks is taken from a simulated card that is fine.

    with broken("two CuPy wheels", monkeypatch): ...
"""

import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from simulated_card import SimulatedCard

from quantkit import kernels
from quantkit.errors import BackendError
from quantkit.kernels import launcher, nvrtc, probe

FITTING_CUPY = SimpleNamespace(name="cupy-cuda13x")
COMPILE_ERROR = "the CUDA kernel `pack` does not compile with `-arch=sm_90`: pack.cu(12): error: expected a `;`"


class DriverError(Exception):
    pass


class Cupy(ModuleType):
    """What is used of CuPy. Its kernels cannot be loaded: no machine here gets that far."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
        self.driver_error = ""
        runtime = SimpleNamespace(
            getDeviceCount=self._count,
            runtimeGetVersion=lambda: 13000,
            driverGetVersion=lambda: 13000,
            CUDARuntimeError=DriverError,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime, driver=SimpleNamespace(CUDADriverError=DriverError), Device=lambda index: _nothing()
        )

    def _count(self) -> int:
        if self.driver_error:
            raise DriverError(self.driver_error)
        return 1

    def RawModule(self, path: str) -> Any:  # noqa: N802 - CuPy's name
        raise DriverError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class Compiler:
    """NVRTC, of CUDA 13.0, for cards from sm_75 on; what it makes is nothing."""

    version = (13, 0)

    def architectures(self) -> list[int]:
        return [75, 80, 90]

    def compile(self, kernel: Any, defines: Any, architecture: int) -> nvrtc.Cubin:
        return nvrtc.Cubin(b"\x7fELF", "")


def _fail_to_compile(*_: Any) -> nvrtc.Cubin:
    raise BackendError(COMPILE_ERROR, hint=nvrtc.FALLBACK)


def _driver(cupy: Cupy) -> None:
    cupy.driver_error = "cudaErrorInsufficientDriver: CUDA driver version is insufficient"


FAULTS: dict[str, Callable[[Any, Cupy, SimulatedCard], Any]] = {
    "torch without CUDA": lambda patch, *_: patch.setattr(torch.version, "cuda", None),
    "no GPU": lambda patch, *_: patch.setattr(torch.cuda, "is_available", lambda: False),
    "no CuPy": lambda patch, *_: patch.setattr(probe, "find_spec", lambda name: None),
    "CuPy without a driver": lambda patch, cupy, card: _driver(cupy),
    "two CuPy wheels": lambda patch, *_: patch.setattr(
        probe, "distributions", lambda: [FITTING_CUPY, SimpleNamespace(name="cupy-cuda12x")]
    ),
    "mixed CUDA majors": lambda patch, *_: patch.setattr(torch.version, "cuda", "12.8"),
    "a driver that loads nothing": lambda *_: None,
    "no NVRTC": lambda patch, *_: (patch.setattr(nvrtc, "library", _library), patch.setattr(nvrtc, "find_libraries", list)),
    "NVRTC older than the card": lambda patch, cupy, card: setattr(card, "capability", (12, 0)),
    "a kernel that does not compile": lambda patch, *_: patch.setattr(Compiler, "compile", _fail_to_compile),
    "a card older than the kernels": lambda patch, cupy, card: setattr(card, "capability", (6, 1)),
}
_library = nvrtc.library


@contextmanager
def broken(fault: str, monkeypatch: Any) -> Iterator[None]:
    """This machine has the fault meanwhile, and a card otherwise."""
    card = SimulatedCard(backend=probe.cuda_backend)
    cached = (launcher._kernel, launcher._architecture, launcher._named, _library, kernels._choose)
    with card.inserted(monkeypatch), monkeypatch.context() as patch:
        cupy, compiler = Cupy(), Compiler()
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setattr(probe, "find_spec", lambda name: object())
        patch.setattr(probe, "distributions", lambda: [FITTING_CUPY])
        patch.setattr(nvrtc, "library", lambda: compiler)
        patch.delenv("QUANTKIT_BACKEND", raising=False)
        FAULTS[fault](patch, cupy, card)
        for one in cached:
            one.cache_clear()
        try:
            yield
        finally:
            for one in cached:
                one.cache_clear()
