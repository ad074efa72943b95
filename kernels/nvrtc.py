"""Compile a `.cu` file to machine code for one exact architecture. Needs NVRTC alone: no driver, no GPU, no headers.

    cubin_file("gptq_matmul", {"BITS": 4}, architecture=90) -> Path

Results are kept on disk under a hash of source, headers, options and NVRTC version: in QUANTKIT_CACHE, else in the
user's cache folder, else (where nothing can be written) in a folder that lives as long as the process.
"""

import contextlib
import ctypes
import ctypes.util
import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from quantkit.errors import BackendError
from quantkit.kernels.sources import Defines, Source, headers, source

INSTALL = "install it with `pip install nvidia-cuda-nvrtc`, or use `QUANTKIT_BACKEND=cpu`"
FALLBACK = "`QUANTKIT_BACKEND=reference` does the same in plain torch"


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code, and what the assembler said of registers, spills and shared memory."""

    code: bytes
    log: str


class Nvrtc:
    """One NVRTC library. Raises BackendError where `path` is not one that can be loaded."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        except (OSError, AttributeError) as error:
            raise BackendError(f"`{path}` is not a usable NVRTC library: {error}", hint=INSTALL) from error
        self.version = (major.value, minor.value)

    def architectures(self) -> list[int]:
        """What it can compile for, such as 75, 80, 90."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        found = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(found))
        return list(found)

    def compile(self, kernel: Source, defines: Defines, architecture: int) -> Cubin:
        """Raises BackendError with the first error of the compiler."""
        options = compiler_options(defines, architecture)
        program = ctypes.c_void_p()
        names, texts = zip(*headers().items(), strict=True)
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program),
                kernel.text.encode(),
                f"{kernel.name}.cu".encode(),
                len(names),
                _strings(texts),
                _strings(names),
            )
        )
        try:
            failed = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if failed:
                raise BackendError(_failure(kernel, options, log), hint=FALLBACK)
            return Cubin(self._read(program, "CUBIN"), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, content))
        return content.raw

    def _check(self, code: int) -> None:
        if code:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise BackendError(f"NVRTC failed: {self._library.nvrtcGetErrorString(code).decode()}", hint=FALLBACK)


def compiler_options(defines: Defines, architecture: int) -> tuple[str, ...]:
    """Denormals stay, divisions are exact: the kernels must agree with the reference."""
    macros = (f"-D{key}={value}" for key, value in sorted(defines.items()))
    return (f"-arch=sm_{architecture}", "-std=c++17", "--ptxas-options=-v", *macros)


def cubin_file(name: str, defines: Defines, architecture: int) -> Path:
    """The compiled kernel file, from the cache or made now. Raises BackendError: no NVRTC, or a compile error."""
    kernel, compiler = source(name), library()
    if architecture not in compiler.architectures():
        raise BackendError(
            f"NVRTC {compiler.version[0]}.{compiler.version[1]} cannot compile for sm_{architecture}: "
            f"it knows {', '.join(f'sm_{known}' for known in compiler.architectures())}",
            hint="`pip install --upgrade nvidia-cuda-nvrtc`, or use `QUANTKIT_BACKEND=reference`",
        )
    key = hashlib.sha256()
    for part in (kernel.text, *headers().values(), *compiler_options(defines, architecture), repr(compiler.version)):
        key.update(part.encode() + b"\0")
    file = f"{name}-sm_{architecture}-{key.hexdigest()[:24]}.cubin"
    for folder in (_user_folder(), _process_folder()):
        with contextlib.suppress(OSError):
            if (folder / file).stat().st_size:
                return folder / file
    code = compiler.compile(kernel, defines, architecture).code
    try:
        return _write(_user_folder() / file, code)
    except OSError:
        return _write(_process_folder() / file, code)


@cache
def library() -> Nvrtc:
    """The NVRTC of this environment: the newest wheel, else the system's. Raises BackendError when there is none."""
    found = find_libraries()
    if not found:
        raise BackendError("NVRTC, the CUDA compiler library, is not installed", hint=INSTALL)
    return Nvrtc(found[0])


def find_libraries() -> list[Path]:
    """NVRTC libraries, best first."""
    spec = find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    patterns = ("*/lib/libnvrtc.so.*", "*/bin/nvrtc64_*.dll", "*/bin/x86_64/nvrtc64_*.dll")
    found = [path for root in roots for pattern in patterns for path in Path(root).glob(pattern)]
    wheels = [path for path in found if ".alt." not in path.name]  # a second build that CUDA 12 wheels carry
    system = ctypes.util.find_library("nvrtc")
    return [*sorted(wheels, key=_soname_version, reverse=True), *([Path(system)] if system else [])]


def _soname_version(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.name.replace("_", ".").split(".") if part.isdigit())


def _failure(kernel: Source, options: tuple[str, ...], log: str) -> str:
    first = next((line for line in log.splitlines() if "error" in line), log.strip() or "no message")
    return f"the CUDA kernel `{kernel.name}` does not compile with `{' '.join(options)}`: {first.strip()}"


def _user_folder() -> Path:
    if chosen := os.environ.get("QUANTKIT_CACHE"):
        return Path(chosen, "cuda")
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "quantkit", "cuda").expanduser()


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="quantkit-cuda-")


def _process_folder() -> Path:
    return Path(_temporary().name)


def _write(path: Path, content: bytes) -> Path:
    """Whole or not at all, whatever other processes do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(unfinished).replace(path)
    except OSError:
        Path(unfinished).unlink(missing_ok=True)
        raise
    return path


def _strings(values: tuple[str, ...]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))
