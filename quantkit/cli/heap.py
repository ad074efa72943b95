"""How the C library of this process holds memory: large blocks go back to the system as soon as they are freed."""

import ctypes
import sys

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
BLOCK_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Map every block of 1 MiB or more by itself, as glibc does until the first such block is freed.

    After that it raises the limit step by step to 32 MiB (mallopt(3)), and activations, which are of that size, come
    and go inside one heap with small results between them, so that memory grows with every block that is passed. It
    costs some time of the system, which has to clear the pages. Elsewhere than on glibc this does nothing.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_MMAP_THRESHOLD, BLOCK_BYTES)
