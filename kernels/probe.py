"""Whether the CUDA backend works here: each thing that it needs is looked for in turn, then a kernel has to run."""

from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any

import torch

from quantkit.errors import BackendError
from quantkit.kernels import nvrtc
from quantkit.kernels.cuda import CudaBackend
from quantkit.kernels.launcher import CupyLauncher
from quantkit.kernels.reference import ReferenceBackend


def cuda_backend(reason: str) -> CudaBackend:
    """Raises BackendError that says what is missing, with a hint that can be pasted."""
    if torch.version.cuda is None:
        raise BackendError("torch is a build without CUDA", hint="install a CUDA build of torch, or use `--device cpu`")
    if not torch.cuda.is_available():
        raise BackendError(
            f"torch, built for CUDA {torch.version.cuda}, finds no usable GPU",
            hint="look at `nvidia-smi`, or use `--device cpu`",
        )
    cupy = _cupy()
    versions = _versions(cupy)
    backend = CudaBackend(CupyLauncher(), reason)
    try:
        _run_one_kernel(backend)
    except BackendError as error:
        majors = {name: version[0] for name, version in versions.items()}
        if len(set(majors.values())) == 1:
            raise
        found = ", ".join(f"{name} {major}" for name, major in majors.items())
        raise BackendError(
            f"CUDA versions are mixed ({found}) and a first kernel failed: {error.message}", hint=_install()
        ) from error
    return backend


def _cupy() -> Any:
    """The module. Raises BackendError where it is absent, twice there, or cannot reach a driver."""
    if find_spec("cupy") is None:
        raise BackendError("CuPy is not installed", hint=_install())
    names = sorted({str(found.name) for found in distributions() if str(found.name).startswith("cupy-cuda")})
    if len(names) > 1:
        raise BackendError(
            f"{' and '.join(f'`{name}`' for name in names)} are both installed, and overwrite each other's files",
            hint=f"`pip uninstall {' '.join(names)}`, then {_install()}",
        )
    try:
        cupy = import_module("cupy")
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy raises its own kinds, which cannot be named before it is imported
        raise BackendError(
            f"CuPy cannot use the NVIDIA driver: {error}", hint="update the driver, or use `--device cpu`"
        ) from error
    if count == 0:
        raise BackendError("CuPy finds no GPU", hint="look at `nvidia-smi`, or use `--device cpu`")
    return cupy


def _versions(cupy: Any) -> dict[str, tuple[int, int]]:
    """CUDA (major, minor) of each part. Raises BackendError where there is no compiler."""
    assert torch.version.cuda is not None
    torch_major, torch_minor = (int(part) for part in torch.version.cuda.split(".")[:2])
    runtime, driver = cupy.cuda.runtime.runtimeGetVersion(), cupy.cuda.runtime.driverGetVersion()
    return {
        "torch": (torch_major, torch_minor),
        "CuPy": (runtime // 1000, runtime % 1000 // 10),
        "NVRTC": nvrtc.library().version,
        "driver": (driver // 1000, driver % 1000 // 10),
    }


def _run_one_kernel(backend: CudaBackend) -> None:
    codes = (torch.arange(32 * 4, dtype=torch.uint8) % 16).view(32, 4)
    try:
        words = backend.pack(codes.to("cuda"), 4).to("cpu")
    except RuntimeError as error:  # what torch raises for anything that went wrong on the device
        raise BackendError(f"a first CUDA kernel failed: {error}", hint=nvrtc.FALLBACK) from error
    if not torch.equal(words, ReferenceBackend().pack(codes, 4)):
        raise BackendError("a first CUDA kernel gave a wrong result", hint=nvrtc.FALLBACK)


def _torch_major() -> str:
    return (torch.version.cuda or "").split(".")[0]


def _install() -> str:
    return f"`pip install 'quantkit[cuda{_torch_major()}]'`"
