"""The GPU benchmark without a GPU: its parts run on the CPU executor, and without a card it claims nothing."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import compiler
from cuda_on_cpu.launcher import ExecutorLauncher

from quantkit.kernels import self_test as self_tests
from quantkit.kernels.cuda import CudaBackend

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "bench" / "gpu.py"
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("bench_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_gpu"] = module
    spec.loader.exec_module(module)
    return module


def seconds_of_call(launches) -> float:
    start = time.perf_counter()
    launches()
    return time.perf_counter() - start


@pytest.fixture
def machine(gpu):
    return gpu.Machine(CudaBackend(ExecutorLauncher()), torch.device("cpu"), seconds_of_call)


@needs_compiler
def test_every_measurement_runs(gpu, machine, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "BLOCK", (((512, 64),),))
    products = gpu.product_rows(machine, [(512, 64)], rotated=1 << 16)
    assert [row[:3] for row in products[:2]] == [["512 x 64", "GPTQ 4 bits", "1"], ["512 x 64", "GPTQ 4 bits", "8"]]
    assert len(products) == 4 * 5
    assert len(gpu.prefill_rows(machine, [(128, 64)], (65,))) == 1
    assert gpu.decode_row(machine, blocks=1, head=(512, 64))[0] == "2 linears"
    assert gpu.quantize_row(machine, [[(128, 8)]])[0].endswith(" s")


def test_random_tiles_have_the_size_of_real_ones(gpu) -> None:
    from quantkit.kernels import random_weights, tiles
    from quantkit.kernels.reference import ReferenceBackend

    reference = ReferenceBackend()
    weight = random_weights.gptq(512, 128, 3, 128)
    real = tiles.gptq_tiles(reference.unpack(weight.words, 3), weight)
    made = gpu.gptq(512, 128, 3, torch.device("cpu"))
    assert (made.size_bytes, made.words.shape, made.group_shift) == (real.size_bytes, real.words.shape, real.group_shift)
    mixed = gpu.exl2(512, 128, torch.device("cpu"))
    assert mixed.words.numel() * 32 == 4 * 512 * 128
    assert sum(rows for _, rows in mixed.groups) == 512


@needs_compiler
def test_the_check_says_what_is_wrong(gpu, monkeypatch) -> None:
    monkeypatch.setattr(self_tests, "CASES", {name: self_tests.CASES[name] for name in ("pack", "grid_error")})

    class Wrong(CudaBackend):
        def grid_error(self, *args) -> torch.Tensor:
            return super().grid_error(*args) * 2

    text, right = gpu.check(Wrong(ExecutorLauncher()), torch.device("cpu"))
    assert not right
    assert "| grid_error | 6 | 1.0e+00 | wrong: 2 bits; 3 bits; 4 bits; 5 bits; 6 bits; 8 bits |" in text
    assert "| pack | 12 | 0.0e+00 | right |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_claimed(tmp_path) -> None:
    """In a Python that does not have quantkit: the source tree is enough."""
    before = set((ROOT / "docs" / "results").iterdir())
    packages = [path for path in sys.path if path.endswith("site-packages")]
    code = f"import sys, runpy; sys.path += {packages!r}; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ), check=False
    )
    assert done.returncode == 15, done.stderr
    assert done.stdout.startswith("error: torch ")
    assert "hint: " in done.stdout
    assert set((ROOT / "docs" / "results").iterdir()) == before
