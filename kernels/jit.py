"""How CPU kernels are compiled and spread over threads."""

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numba
import torch
from numba.core import sigutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target

# Waking another thread costs some 40 µs; below this many weights (about 100 µs of work) one thread is faster.
LEAST_WORK = 2_000_000


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at first use, without the interpreter lock, and keep the result on disk where a folder can be written.

    Numba looks for NUMBA_CACHE_DIR, the folder of the source, then the user's cache folder.
    """
    function = marked(function)
    return kept(numba.njit(nogil=True, **options())(function), function)


def compiled_as_c(signature: Any, function: Callable[..., Any], **more: Any) -> Any:
    """The same as a C function of this signature, now; `.address` is where it is."""
    function = marked(function)
    made = CFunc(function, sigutils.normalize_signature(signature), locals={}, options={**options(), **more})
    kept(made, function).compile()
    return made


def kept(made: Any, function: Callable[..., Any]) -> Any:
    """What Numba made, with its files on the disk where there is room for them."""
    with suppress(RuntimeError):  # no folder can be written
        made._cache = KernelFiles(function)
    return made


class KernelFiles(FunctionCache):
    """Numba's files of what it has compiled. None of them is worth a failure: a damaged one, such as a full disk or a
    power cut leaves, is written anew, and what cannot be written is compiled again next time. What older sources left
    of the same kernel is removed."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged pickle raises whatever it likes
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError, EOFError, UnpicklingError):
            super().save_overload(sig, data)
            self._remove_older()

    def _remove_older(self) -> None:
        name, state, _ = self._cache_file._index_name.partition(f"_{_state_of_sources()}-")
        older = re.compile(rf"{re.escape(name)}_(?!{_state_of_sources()})[0-9a-f]{{12}}-")
        for file in Path(self._cache_path).iterdir():
            if state and older.match(file.name):
                file.unlink(missing_ok=True)


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
