"""Arithmetic on bits: knows tensors and integers only. `backend` is the one place where a backend is chosen."""

import os
from functools import cache

from quantkit.errors import BackendError
from quantkit.kernels.protocol import Backend
from quantkit.kernels.team import keep_whole

NAMES = ("cpu", "reference", "cuda")
VARIABLE = "QUANTKIT_BACKEND"


def backend(device: str = "cpu", name: str | None = None) -> Backend:
    """The backend for tensors on `device` (`cpu`, `cuda`, or `auto`: the best this machine has).

    `name` (`cpu`, `reference`, `cuda`), or else the environment variable QUANTKIT_BACKEND, overrides the choice. Raises
    BackendError for a backend that cannot be used here; never falls back from one that was asked for by name.
    """
    keep_whole()
    return _choose(str(device).split(":")[0], name or os.environ.get(VARIABLE) or None)


@cache
def _choose(device: str, name: str | None) -> Backend:
    if name is not None and name not in NAMES:
        raise BackendError(f"unknown backend `{name}`", hint=f"use one of {', '.join(f'`{known}`' for known in NAMES)}")
    if device not in ("cpu", "cuda", "auto"):
        raise BackendError(f"unknown device `{device}`", hint="use `auto`, `cpu` or `cuda`")
    if name == "cuda" or (name is None and device == "cuda"):
        return _cuda("asked for by name" if name else "the device is a GPU")
    if name == "reference":
        return _reference("asked for by name")
    reason = "asked for by name" if name else "the device is a CPU"
    if device == "auto" and name is None:
        try:
            return _cuda("the best device of this machine")
        except BackendError as error:
            reason = error.message
    missing = _cpu_missing()
    if name == "cpu" and missing:
        message = f"the CPU kernels were asked for, but {missing}"
        raise BackendError(message, hint="use `QUANTKIT_BACKEND=reference`: slower, equally right")
    if missing:
        return _reference(f"plain torch, as {missing}")
    return _cpu(reason)


def _cuda(reason: str) -> Backend:
    from quantkit.kernels.probe import cuda_backend

    return cuda_backend(reason)


def _cpu_missing() -> str | None:
    """Why the CPU kernels cannot be used, in words; None when they can."""
    try:
        from quantkit.kernels.cpu import unusable
    except ImportError as error:
        return f"they cannot be imported: {error}"
    return unusable()


def _cpu(reason: str) -> Backend:
    from quantkit.kernels.cpu import CpuBackend

    return CpuBackend(reason)


def _reference(reason: str) -> Backend:
    from quantkit.kernels.reference import ReferenceBackend

    return ReferenceBackend(reason)
