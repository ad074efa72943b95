"""How the C library of this process holds memory: blocks are used again, and what is left goes back block by block.

By itself glibc maps large blocks until the first of them is freed and then raises the limit step by step to 32 MiB
(mallopt(3)). Activations, which are of that size, come and go inside one heap then, with small results between them,
and memory grows with every decoder block that is passed. Mapping them all again for good would end that, but the system
has to clear every page anew: a quarter of the time of a backward pass. So they stay in the heap, and its gaps are given
back where a decoder block has been left.

Elsewhere than on glibc this does nothing.
"""

import ctypes
import re
import sys
from functools import cache
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MAPPED_BYTES = 32 << 20
KEPT_BYTES = 1 << 30
SPARING_BYTES = 1 << 18


def settle() -> None:
    """For a process: blocks below 32 MiB are used again, and the end of the heap is not given back on its own."""
    library = _glibc()
    if library is not None:
        library.mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)
        library.mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def spare() -> None:
    """For a process that has little memory: what is freed goes back at once, which takes time."""
    library = _glibc()
    if library is not None:
        library.mallopt(_MMAP_THRESHOLD, SPARING_BYTES)
        library.mallopt(_TRIM_THRESHOLD, SPARING_BYTES)
        library.malloc_trim(0)


def give_back() -> None:
    """Every free page of the heap to the system."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim.argtypes = [ctypes.c_size_t]
        library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    except (AttributeError, OSError):
        return None
    return library


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
