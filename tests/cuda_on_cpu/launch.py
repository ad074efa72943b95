"""Call a compiled kernel with the arguments of `cupy.RawKernel.__call__`, each checked against the kernel's signature."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cuda_on_cpu.build import shared_library
from cuda_on_cpu.source import KernelError

# Orders in which threads run between two meeting points. A missing barrier changes the result under at least one.
SCHEDULES = (("forward", 0), ("reverse", 0), ("random", 1), ("random", 2))
_ORDERS = {"forward": 0, "reverse": 1, "random": 2}
_MESSAGE_BYTES = 2048


class Module:
    """The kernels of one source. `names`: template instances to export besides, such as `"gemv<4, 128>"`.
    `options`: flags of the compiler, such as `-DBITS=4` or `-D__CUDA_ARCH__=750` (800 unless given)."""

    def __init__(self, path: Path, names: Sequence[str] = (), options: Sequence[str] = ()) -> None:
        library, self.names = shared_library(Path(path), tuple(names), tuple(options))
        self._library = ctypes.CDLL(str(library))
        self._library.coc_static_shared.restype = ctypes.c_uint64

    def get_function(self, name: str) -> "Function":
        if name not in self.names:
            raise KernelError(f"no kernel `{name}` among {', '.join(self.names)}")
        return Function(self._library, self.names.index(name), name)

    @property
    def static_shared_bytes(self) -> int:
        """Static shared memory of the kernels that have run."""
        return self._library.coc_static_shared()


class Function:
    """One kernel."""

    def __init__(self, library: ctypes.CDLL, index: int, name: str) -> None:
        self.name = name
        self._launch = getattr(library, f"coc_launch_{index}")
        self._launch.restype = ctypes.c_int
        signature = getattr(library, f"coc_spec_{index}")
        signature.restype = ctypes.c_char_p
        self._kinds = [kind for kind in signature().decode().split(",") if kind]

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        order: str = "forward",
        seed: int = 0,
    ) -> None:
        if len(args) != len(self._kinds):
            raise KernelError(f"{self.name}: {len(args)} arguments given, {len(self._kinds)} wanted")
        values = [self._pack(i, kind, value) for i, (kind, value) in enumerate(zip(self._kinds, args, strict=True))]
        addresses = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        failed = self._launch(
            _dim3(grid),
            _dim3(block),
            ctypes.c_size_t(int(shared_mem)),
            _ORDERS[order],
            ctypes.c_uint64(seed),
            addresses,
            message,
            ctypes.c_size_t(_MESSAGE_BYTES),
        )
        if failed:
            raise KernelError(f"{self.name}: {message.value.decode(errors='replace')}")

    def _pack(self, index: int, wanted: str, value: Any) -> ctypes.Array[ctypes.c_char]:
        kind, size, content = _content(value, pointer=wanted[0] == "p")
        wanted_kind, wanted_size = wanted[0], int(wanted[1:])
        pointer_to_any = kind == "p" and not (size and wanted_size)
        if kind != wanted_kind or not (size == wanted_size or pointer_to_any):
            raise KernelError(
                f"{self.name}: argument {index} is {kind}{size}, the kernel takes {wanted} "
                "(p: pointer to elements of that size, i, f, b: scalar of that size)"
            )
        return ctypes.create_string_buffer(content, len(content))


def _content(value: Any, pointer: bool) -> tuple[str, int, bytes]:
    """(kind, size, bytes) of one argument as CuPy would pass it."""
    if hasattr(value, "data_ptr"):
        return "p", value.element_size(), value.data_ptr().to_bytes(8, "little")
    if isinstance(value, np.ndarray):
        return "p", value.itemsize, value.ctypes.data.to_bytes(8, "little")
    if isinstance(value, np.generic):
        return {"f": "f", "b": "b", "V": "s"}.get(value.dtype.kind, "i"), value.itemsize, value.tobytes()
    if isinstance(value, bool):
        return "b", 1, bytes([value])
    if isinstance(value, int):
        return ("p", 0, value.to_bytes(8, "little")) if pointer else ("i", 8, value.to_bytes(8, "little", signed=True))
    if isinstance(value, float):
        return "f", 8, np.float64(value).tobytes()
    raise TypeError(f"unsupported argument type {type(value).__name__}")


def _dim3(extent: Sequence[int]) -> Any:
    return (ctypes.c_uint * 3)(*[*map(int, extent), 1, 1][:3])
