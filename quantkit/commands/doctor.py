"""`quantkit doctor`: what is installed, which backend will be used and why."""

import importlib.util
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from quantkit import kernels
from quantkit.errors import BackendError
from quantkit.version import VERSION

EVERYTHING = "everything"
# Distribution → what stops working without it.
PACKAGES = {
    "torch": EVERYTHING,
    "numpy": EVERYTHING,
    "numba": EVERYTHING,
    "safetensors": EVERYTHING,
    "tokenizers": EVERYTHING,
    "jinja2": EVERYTHING,
    "typer": EVERYTHING,
    "rich": EVERYTHING,
    "tqdm": EVERYTHING,
    "datasets": "named calibration and evaluation data sets (local files work)",
    "huggingface_hub": "hub ids (local folders work)",
    "pyarrow": "calibration and evaluation text from .parquet",
    "gguf": "`quantkit convert gguf-to-hf`",
    "cupy": "CUDA kernels",
    "matplotlib": "plots",
}
# Distributions that provide one import name under several names.
ALSO_KNOWN_AS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy")}


@dataclass(frozen=True, slots=True)
class Package:
    """One dependency: its version, or None when it is absent, and what is missing then."""

    name: str
    version: str | None
    needed_for: str


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What was found. `healthy` is False when a package that everything needs is absent."""

    quantkit: str
    python: str
    system: str
    cpu_features: tuple[str, ...]
    threads: int
    memory_gib: float
    backend: str
    backend_reason: str
    cuda: str
    packages: tuple[Package, ...]

    @property
    def healthy(self) -> bool:
        return all(package.version or package.needed_for != EVERYTHING for package in self.packages)

    def rows(self) -> list[list[str]]:
        """Name, found, remark: for the console."""
        rows = [
            ["quantkit", self.quantkit, ""],
            ["python", self.python, self.system],
            ["cpu", ", ".join(self.cpu_features) or "no vector extension known to torch", f"{self.threads} threads"],
            ["memory", f"{self.memory_gib:.1f} GiB", ""],
            ["backend", self.backend, self.backend_reason],
            ["cuda", self.cuda, ""],
        ]
        rows += [
            [package.name, package.version or "absent", "" if package.version else f"needed for {package.needed_for}"]
            for package in self.packages
        ]
        return rows

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "healthy": self.healthy}


def run() -> DoctorReport:
    """Look around. Imports no optional package; asks the kernels which backend they would choose."""
    try:
        backend = kernels.backend("auto")
        name, reason = backend.name, backend.reason
    except BackendError as error:
        name, reason = "none", error.message
    return DoctorReport(
        quantkit=VERSION,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}, {sys.executable}",
        cpu_features=_cpu_features(),
        threads=torch.get_num_threads(),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        backend=name,
        backend_reason=reason,
        cuda=_cuda(),
        packages=tuple(_package(name, needed_for) for name, needed_for in PACKAGES.items()),
    )


def _package(name: str, needed_for: str) -> Package:
    for distribution in ALSO_KNOWN_AS.get(name, (name,)):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        # A distribution whose metadata is left but whose module is gone is as good as absent.
        if importlib.util.find_spec(name) is not None:
            return Package(name, found, needed_for)
    return Package(name, None, needed_for)


def _cpu_features() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    checks = {
        "avx512_bf16": getattr(torch.cpu, "_is_avx512_bf16_supported", None),
        "avx512_vnni": getattr(torch.cpu, "_is_vnni_supported", None),
        "amx": getattr(torch.cpu, "_is_amx_tile_supported", None),
    }
    return (capability, *(name for name, check in checks.items() if check is not None and check()))


def _cuda() -> str:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return f"torch is built for CUDA {built}, no usable device" if built else "torch is a build without CUDA"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}: {', '.join(names)}"
