"""How CPU kernels are compiled and spread over threads."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
import torch
from numba.core.registry import cpu_target

# Waking another thread costs some 40 µs; below this many weights (about 100 µs of work) one thread is faster.
LEAST_WORK = 2_000_000


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at first use, without the interpreter lock, and keep the result on disk where a folder can be written.

    Numba looks for NUMBA_CACHE_DIR, the folder of the source, then the user's cache folder.
    """
    function = marked(function)
    try:
        return numba.njit(cache=True, nogil=True, **options())(function)
    except RuntimeError:  # no folder can be written
        return numba.njit(nogil=True, **options())(function)


def marked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, kept under another name for each state of the kernels' sources: Numba's cache looks at the file of the
    kernel alone, and would miss a change of what it calls."""
    function.__qualname__ = f"{function.__qualname__}_{_state_of_sources()}"
    return function


@cache
def _state_of_sources() -> str:
    digest = sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def options() -> dict[str, Any]:
    """What every kernel is compiled with: multiply-adds may be fused, nothing else is rearranged."""
    return {"fastmath": {"contract"}, "error_model": "numpy"}


@cache
def targets(feature: str) -> bool:
    """Whether Numba compiles for a processor with this feature, by LLVM's name: the host's, or what NUMBA_CPU_NAME and
    NUMBA_CPU_FEATURES say instead."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{feature}" in features.split(",")


def spread(kernel: Callable[..., Any], count: int, multiple: int, work: int, *arguments: Any) -> None:
    """Call `kernel(first, last, *arguments)` on parts of `range(count)` cut at multiples of `multiple`, one per thread.

    Uses at most `torch.get_num_threads()` threads, and one when `work` (weights touched) is small.
    """
    if not count:
        return
    steps = -(-count // multiple)
    parts = min(torch.get_num_threads(), steps, max(1, 2 * work // LEAST_WORK))
    if parts == 1:
        kernel(0, count, *arguments)
        return
    cuts = [min(count, steps * part // parts * multiple) for part in range(parts + 1)]
    workers = pool(os.getpid(), parts - 1)
    others = [workers.submit(kernel, cuts[part], cuts[part + 1], *arguments) for part in range(1, parts)]
    kernel(0, cuts[1], *arguments)
    for other in others:
        other.result()


@cache
def pool(process: int, workers: int) -> ThreadPoolExecutor:
    """Keyed by process, as threads do not survive a fork."""
    return ThreadPoolExecutor(workers, thread_name_prefix="quantkit-kernel")
