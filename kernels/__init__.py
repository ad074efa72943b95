"""Arithmetic on bits: knows tensors and integers only. `backend` is the one place where a backend is chosen."""

import os
from functools import cache
from importlib.util import find_spec

from quantkit.errors import BackendError
from quantkit.kernels.protocol import Backend

NAMES = ("cpu", "reference", "cuda")
VARIABLE = "QUANTKIT_BACKEND"


def backend(device: str = "cpu", name: str | None = None) -> Backend:
    """The backend for tensors on `device` (`cpu`, `cuda`, or `auto`: the best this machine has).

    `name` (`cpu`, `reference`, `cuda`), or else the environment variable QUANTKIT_BACKEND, overrides the choice. Raises
    BackendError for a backend that cannot be used here; never falls back from one that was asked for by name.
    """
    return _choose(str(device).split(":")[0], name or os.environ.get(VARIABLE) or None)


@cache
def _choose(device: str, name: str | None) -> Backend:
    if name is not None and name not in NAMES:
        raise BackendError(f"unknown backend `{name}`", hint=f"use one of {', '.join(f'`{known}`' for known in NAMES)}")
    if device not in ("cpu", "cuda", "auto"):
        raise BackendError(f"unknown device `{device}`", hint="use `auto`, `cpu` or `cuda`")
    missing = _cuda_missing()
    if name == "cuda" or (name is None and device == "cuda"):
        raise BackendError(
            f"the CUDA backend was asked for, but {missing}", hint="use `--device cpu`, or `QUANTKIT_BACKEND=cpu`"
        )
    if name == "reference":
        return _reference("asked for by name")
    if name == "cpu":
        return _cpu("asked for by name")
    return _cpu("the device is a CPU" if device == "cpu" else missing)


def _cuda_missing() -> str:
    """Why CUDA cannot be used, in words."""
    if find_spec("cupy") is None:
        return "CuPy is not installed"
    return "this version has no CUDA kernels yet"


def _reference(reason: str) -> Backend:
    from quantkit.kernels.reference import ReferenceBackend

    return ReferenceBackend(reason)



def _cpu(reason: str) -> Backend:
    """The Numba kernels; where they cannot run, the reference, which says so."""
    try:
        from quantkit.kernels.cpu import CpuBackend, unusable
    except ImportError as error:
        return _reference(f"the CPU kernels cannot be imported: {error}")
    missing = unusable()
    return _reference(missing) if missing else CpuBackend(reason)
