"""Compile rewritten sources with `g++` or `clang++`; results are cached by content, headers are precompiled once."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from cuda_on_cpu import source
from cuda_on_cpu.source import KernelError

INCLUDE = Path(__file__).parent / "include"
# No contraction: the kernels ask for a fused multiply-add by name where they want one.
FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-march=native", "-fPIC", "-shared", "-w"),
    *("-fno-strict-aliasing", "-fno-stack-protector", "-ffp-contract=off"),
)


def compiler() -> str | None:
    """The host compiler, or None where there is none."""
    return next((name for name in (os.environ.get("CXX"), "g++", "clang++") if name and shutil.which(name)), None)


def shared_library(path: Path, names: tuple[str, ...], options: tuple[str, ...]) -> tuple[Path, list[str]]:
    """Compile `path` and export its kernels and `names` (template instances): the library, and what it exports."""
    cxx = compiler()
    if cxx is None:
        raise KernelError("no C++ compiler found")
    files = source.read(path)
    exported = source.kernels(files[path.name]) + list(names)
    files[path.name] += "\n" + "".join(f"COC_EXPORT({i}, {name})\n" for i, name in enumerate(exported))
    flags = (*FLAGS, *options)
    key = _digest(cxx, *flags, *_headers(), *(part for file in sorted(files.items()) for part in file))
    cache = Path(os.environ.get("CUDA_ON_CPU_CACHE") or Path(tempfile.gettempdir()) / f"cuda_on_cpu-{os.getuid()}")
    library = cache / f"{path.stem}-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _compile(cxx, flags, path.name, files, library)
    return library, exported


def _compile(cxx: str, flags: tuple[str, ...], name: str, files: dict[str, str], library: Path) -> None:
    include = _precompiled_headers(cxx, flags, library.parent)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        for file, text in files.items():
            Path(folder, file).write_text(text)
        made = Path(folder, "made.so")
        command = [cxx, *flags, "-I", str(include), "-include", "executor.h", "-x", "c++"]
        command += [str(Path(folder, name)), "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise KernelError(f"{name} does not compile for the CPU:\n{result.stderr[-4000:]}")
        made.replace(library)


def _precompiled_headers(cxx: str, flags: tuple[str, ...], cache: Path) -> Path:
    """A copy of the headers with a precompiled executor.h, which halves the time a kernel takes to compile."""
    flags = tuple(flag for flag in flags if flag != "-shared" and (flag[:2] != "-D" or "__CUDA_ARCH__" in flag))
    made = cache / f"include-{_digest(cxx, *flags, *_headers())}"
    if not made.exists():
        folder = Path(tempfile.mkdtemp(dir=cache))
        shutil.copytree(INCLUDE, folder, dirs_exist_ok=True)
        if "clang" not in Path(cxx).name:
            command = [cxx, *flags, "-x", "c++-header", "executor.h", "-o", "executor.h.gch"]
            subprocess.run(command, cwd=folder, check=True)
        try:
            folder.rename(made)
        except OSError:  # another process was faster
            shutil.rmtree(folder)
    return made


def _headers() -> list[str]:
    return [file.read_text() for file in sorted(INCLUDE.iterdir())]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
