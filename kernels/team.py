"""The team of threads that torch computes with, for programs to run in.

Threads of torch look out for more work for a while after each of its operations. Others beside them would find no
processor free: on two of them, a second thread of ours gained nothing in the milliseconds after a product. So its
OpenMP runtime is asked to let the same threads run our code, by the entry point that GCC compiles `omp parallel` to,
which LLVM's runtime has as well. (libgomp manual, "Implementing PARALLEL construct")
"""

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

HOME = os.getpid()


@dataclass(frozen=True, slots=True)
class Team:
    """
    parallel  call it with the address of a C function of one pointer, that pointer, the number of threads, and 0
    number    address of the C function that tells a thread which one it is, from 0 on
    size      address of the one that tells it how many there are
    """

    parallel: Any
    number: int
    size: int


@cache
def torch_team(process: int) -> Team | None:
    """None where its runtime cannot be found, and in a fork, which has none of its threads."""
    if process != HOME:
        return None
    try:
        symbols = ctypes.CDLL(None)
        parallel = symbols.GOMP_parallel
        number, size = (address_of(symbols[name]) for name in ("omp_get_thread_num", "omp_get_num_threads"))
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return Team(parallel, number, size)


def keep_whole() -> None:
    """For the thread that calls it: torch has as many threads as it says. A product of bfloat16 is cut for so many, and
    where OMP_THREAD_LIMIT, OMP_DYNAMIC or OMP_MAX_ACTIVE_LEVELS lets OpenMP bring fewer, the parts of the others are
    never computed: torch returns what was in the memory before."""
    symbols = _settings()
    if symbols is None:
        return
    symbols.omp_set_dynamic(0)
    most = symbols.omp_get_thread_limit() if symbols.omp_get_max_active_levels() > 0 else 1
    if 0 < most < torch.get_num_threads():
        torch.set_num_threads(most)


@cache
def _settings() -> ctypes.CDLL | None:
    """The OpenMP runtime of torch; None where it cannot be found."""
    try:
        symbols = ctypes.CDLL(None)
        for name in ("omp_set_dynamic", "omp_get_thread_limit", "omp_get_max_active_levels"):
            symbols[name]
    except (AttributeError, OSError, TypeError):
        return None
    symbols.omp_set_dynamic.argtypes, symbols.omp_set_dynamic.restype = [ctypes.c_int], None
    return symbols


def address_of(function: Any) -> int:
    """Of a C function."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
