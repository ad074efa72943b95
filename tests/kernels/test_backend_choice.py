"""One place chooses a backend; the choice has a reason, and a backend asked for by name is never replaced."""

import os
import platform
import subprocess
import sys

import pytest

from quantkit import kernels
from quantkit.errors import BackendError


@pytest.fixture(autouse=True)
def no_override(monkeypatch) -> None:
    monkeypatch.delenv("QUANTKIT_BACKEND", raising=False)


def test_cpu_device_gets_the_cpu_kernels() -> None:
    backend = kernels.backend("cpu")
    assert (backend.name, backend.reason) == ("cpu", "the device is a CPU")


def test_the_same_backend_is_given_each_time() -> None:
    assert kernels.backend("cpu") is kernels.backend("cpu")


def test_a_name_overrides_and_so_does_the_environment(monkeypatch) -> None:
    assert kernels.backend("cpu", "reference").name == "reference"
    monkeypatch.setenv("QUANTKIT_BACKEND", "reference")
    assert kernels.backend("auto").name == "reference"
    assert kernels.backend("auto", "cpu").name == "cpu"
    monkeypatch.setenv("QUANTKIT_BACKEND", "")
    assert kernels.backend("cpu").name == "cpu"


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [("cpu", "tpu", "unknown backend `tpu`"), ("tpu", None, "unknown device `tpu`")],
)
def test_what_does_not_exist_is_refused_with_what_does(device: str, name: str | None, message: str) -> None:
    with pytest.raises(BackendError, match=message) as caught:
        kernels.backend(device, name)
    assert "`cpu`" in str(caught.value.hint)


# On a processor without float16 instructions the kernels would call functions that do not exist.
x86_only = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="other processors have float16 instructions"
)
OLD_PROCESSOR = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}


def _in_new_process(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", f"from quantkit import kernels\n{code}"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@x86_only
def test_old_processor_gets_the_reference_and_is_told_why() -> None:
    code = "backend = kernels.backend(); print(backend.name, '-', backend.reason)"
    found = _in_new_process(code, **OLD_PROCESSOR)
    assert found == "reference - plain torch, as this processor has no float16 instructions (F16C)"


@x86_only
def test_old_processor_refuses_the_kernels_by_name() -> None:
    code = "from quantkit.errors import BackendError\ntry: kernels.backend('cpu', 'cpu')\nexcept BackendError as e: print(e)"
    found = _in_new_process(code, **OLD_PROCESSOR)
    assert found == "the CPU kernels were asked for, but this processor has no float16 instructions (F16C)"


@pytest.mark.parametrize("folder", ["/dev/null/none", ""])
def test_kernels_run_where_nothing_can_be_cached(folder: str, tmp_path) -> None:
    code = (
        "import torch, numba.core.caching as caching\n"
        "caching.InTreeCacheLocator.from_function = classmethod(lambda *_: None)\n"
        "caching.UserWideCacheLocator.from_function = classmethod(lambda *_: None)\n"
        "codes = torch.arange(32, dtype=torch.uint8)[:, None] % 8\n"
        "backend = kernels.backend('cpu', 'cpu')\n"
        "print(torch.equal(backend.unpack(backend.pack(codes, 3), 3), codes))"
    )
    assert _in_new_process(code, NUMBA_CACHE_DIR=folder) == "True"


def test_compiled_kernels_are_kept_where_the_environment_says(tmp_path) -> None:
    code = "import torch; kernels.backend('cpu', 'cpu').unpack(torch.zeros(1, 1, dtype=torch.int32), 4)"
    _in_new_process(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert list(tmp_path.rglob("columns.unpack_*.nbi"))
