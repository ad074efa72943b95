"""Arrays that end at an unreadable page."""

import ctypes
import mmap
from typing import Any

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)


def guarded(array: Any) -> Any:
    """A copy of a NumPy array or CPU tensor: an access past its end by a kernel raises KernelError."""
    if hasattr(array, "data_ptr"):
        import torch

        plain = array.contiguous().view(-1).view(torch.uint8).numpy()
        return torch.from_numpy(guarded(plain)).view(array.dtype).view(array.shape)
    array = np.ascontiguousarray(array)
    body = -(-max(array.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    base = np.frombuffer(mmap.mmap(-1, body + mmap.PAGESIZE), np.uint8)
    if _libc.mprotect(ctypes.c_void_p(base.ctypes.data + body), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = base[body - array.nbytes : body].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
