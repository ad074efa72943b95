"""Machines whose CUDA is broken, one kind at a time, each simulated: what is said, and the hint that mends it."""

import contextlib
import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from quantkit import kernels
from quantkit.errors import BackendError
from quantkit.kernels import launcher, nvrtc, probe


class DriverError(Exception):
    pass


class RuntimeApiError(Exception):
    pass


class FakeKernel:
    """Notes how it was called, and fails when told to."""

    max_dynamic_shared_size_bytes = 0

    def __init__(self, cupy: "FakeCupy") -> None:
        self.cupy = cupy
        self.calls: list = []

    def __call__(self, grid, block, args, *, shared_mem=0) -> None:
        if self.cupy.launch_error:
            raise DriverError(self.cupy.launch_error)
        self.calls.append((grid, block, args, shared_mem, tuple(self.cupy.entered)))


class FakeCupy(ModuleType):
    """What the launcher uses of CuPy, without a GPU."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
        self.entered: list = []
        self.launch_error = self.load_error = self.driver_error = ""
        self.kernel = FakeKernel(self)
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                getDeviceCount=self._count,
                runtimeGetVersion=lambda: 13000,
                driverGetVersion=lambda: 13000,
                CUDARuntimeError=RuntimeApiError,
            ),
            driver=SimpleNamespace(CUDADriverError=DriverError),
            Device=lambda index: self._enter("device", index),
            ExternalStream=lambda pointer, index: self._enter("stream", pointer, index),
        )

    def _count(self) -> int:
        if self.driver_error:
            raise RuntimeApiError(self.driver_error)
        return 1

    @contextlib.contextmanager
    def _enter(self, *what):
        self.entered.append(what)
        yield
        self.entered.pop()

    def RawModule(self, path: str) -> SimpleNamespace:  # noqa: N802 - CuPy's name
        if self.load_error:
            raise DriverError(self.load_error)
        return SimpleNamespace(get_function=lambda name: self.kernel)


@pytest.fixture
def machine(monkeypatch) -> FakeCupy:
    """A machine where torch, CuPy and NVRTC all say that they are fine."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Simulated")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(probe, "find_spec", lambda name: object())
    monkeypatch.setattr(probe, "distributions", lambda: [SimpleNamespace(name="cupy-cuda13x")])
    monkeypatch.setattr(nvrtc, "library", lambda: SimpleNamespace(version=(13, 0)))
    monkeypatch.setattr(nvrtc, "cubin_file", lambda name, defines, architecture: f"{name}-{architecture}.cubin")
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for cached in (launcher._kernel, launcher._architecture, launcher._named):
        cached.cache_clear()
    yield cupy
    for cached in (launcher._kernel, launcher._architecture, launcher._named):
        cached.cache_clear()


def refused() -> BackendError:
    with pytest.raises(BackendError) as caught:
        probe.cuda_backend("asked for by name")
    return caught.value


def test_torch_without_cuda(machine, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    error = refused()
    assert error.message == "torch is a build without CUDA"
    assert error.hint == "install a CUDA build of torch, or use `--device cpu`"


def test_no_gpu(machine, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = refused()
    assert error.message == "torch, built for CUDA 13.0, finds no usable GPU"
    assert "nvidia-smi" in error.hint


def test_no_cupy(machine, monkeypatch) -> None:
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    error = refused()
    assert error.message == "CuPy is not installed"
    assert error.hint == "`pip install 'quantkit[cuda13]'`"


def test_the_hint_follows_torch(machine, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    assert refused().hint == "`pip install 'quantkit[cuda12]'`"


def test_two_cupys(machine, monkeypatch) -> None:
    found = [SimpleNamespace(name="cupy-cuda12x"), SimpleNamespace(name="cupy-cuda13x")]
    monkeypatch.setattr(probe, "distributions", lambda: found)
    error = refused()
    assert "`cupy-cuda12x` and `cupy-cuda13x` are both installed" in error.message
    assert error.hint == "`pip uninstall cupy-cuda12x cupy-cuda13x`, then `pip install 'quantkit[cuda13]'`"


def test_cupy_without_a_driver(machine) -> None:
    machine.driver_error = "cudaErrorInsufficientDriver: CUDA driver version is insufficient"
    error = refused()
    assert error.message == (
        "CuPy cannot use the NVIDIA driver: cudaErrorInsufficientDriver: CUDA driver version is insufficient"
    )
    assert error.hint == "update the driver, or use `--device cpu`"


def test_cupy_that_cannot_be_imported(machine, monkeypatch) -> None:
    def fail(name):
        raise ImportError("libcublas.so.13: cannot open shared object file")

    monkeypatch.setattr(probe, "import_module", fail)
    assert "libcublas.so.13" in refused().message


def test_no_nvrtc(machine, monkeypatch) -> None:
    monkeypatch.undo()
    nvrtc.library.cache_clear()
    monkeypatch.setattr(nvrtc, "find_libraries", list)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(BackendError, match="NVRTC, the CUDA compiler library, is not installed") as caught:
        probe._versions(machine)
    assert "pip install nvidia-cuda-nvrtc" in caught.value.hint


def test_mixed_cuda_majors(machine, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    machine.cuda.runtime.driverGetVersion = lambda: 12080
    machine.load_error = "CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid"
    monkeypatch.setattr(torch.Tensor, "to", _stays)
    monkeypatch.setattr(launcher.CupyLauncher, "reaches", lambda self, tensor: True)
    error = refused()
    assert error.message.startswith("CUDA versions are mixed (torch 12, CuPy 13, NVRTC 13, driver 12) and a first kernel failed")
    assert "CUDA_ERROR_INVALID_IMAGE" in error.message
    assert error.hint == "`pip install 'quantkit[cuda12]'`"


def test_a_launch_that_fails(machine, monkeypatch) -> None:
    machine.launch_error = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
    monkeypatch.setattr(torch.Tensor, "to", _stays)
    monkeypatch.setattr(launcher.CupyLauncher, "reaches", lambda self, tensor: True)
    error = refused()
    assert error.message == (
        "the CUDA kernel `pack` failed to launch on `cuda:0` (Simulated) with grid (1,), 256 threads, "
        "0 bytes of shared memory: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
    )
    assert error.hint == "`QUANTKIT_BACKEND=reference` does the same in plain torch"


def test_a_kernel_that_does_nothing_is_noticed(machine, monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "to", _stays)
    monkeypatch.setattr(launcher.CupyLauncher, "reaches", lambda self, tensor: True)
    assert refused().message == "a first CUDA kernel gave a wrong result"
    [(grid, block, args, shared, entered)] = machine.kernel.calls
    assert (grid, block, shared) == ((1,), (256,), 0)
    assert all(isinstance(pointer, int) for pointer in args[:2]), "pointers are passed as integers of eight bytes"
    assert [(int(size), size.dtype.name) for size in args[2:]] == [(4, "int32"), (4, "int32")]
    assert entered == (("device", 0), ("stream", 77, 0)), "on torch's current stream and device"


def test_tensors_on_two_devices(machine) -> None:
    tensors = (torch.zeros(4), torch.zeros(4, device="meta"))
    with pytest.raises(BackendError, match="expected tensors on `cpu`, found one on `meta`"):
        launcher.CupyLauncher().run("pack", {}, "pack", (1,), 256, tensors, device=torch.device("cpu"))


def test_a_card_older_than_a_kernel_needs(machine, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(BackendError, match=r"`exl2_matmul` needs sm_80, `cuda:0` \(Simulated\) is sm_75"):
        launcher._kernel("exl2_matmul", (("DTYPE", "MmaBF16"), ("TOKENS", 8)), "exl2_matmul", 0, 0)


def test_more_shared_memory_is_asked_for(machine) -> None:
    launcher._kernel("pack", (("BITS", 4), ("COLUMNS", 4)), "pack", 0, 60000)
    assert machine.kernel.max_dynamic_shared_size_bytes == 60000


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_choice_without_a_gpu(monkeypatch) -> None:
    monkeypatch.delenv("QUANTKIT_BACKEND", raising=False)
    with pytest.raises(BackendError, match="torch"):
        kernels.backend("cuda")
    with pytest.raises(BackendError, match="torch"):
        kernels.backend("cpu", "cuda")
    automatic = kernels.backend("auto")
    assert automatic.name in ("cpu", "reference")
    assert "torch" in automatic.reason


def _stays(tensor: torch.Tensor, target, *args, **kwargs) -> torch.Tensor:
    """`tensor.to` on a machine whose simulated GPU shares main memory."""
    return tensor if isinstance(target, str) else torch.Tensor.type(tensor, target)
