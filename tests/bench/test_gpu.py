"""The GPU benchmark without a GPU: its parts run on the CPU executor, and without a card it claims nothing."""

import importlib.util
import os
import re
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import compiler
from cuda_on_cpu.graphs import TapeLauncher, TapeRecorder
from cuda_on_cpu.launcher import ExecutorLauncher
from simulated_card import SimulatedCard, kernels_of

from quantkit import kernels
from quantkit.kernels import self_test as self_tests
from quantkit.kernels.cuda import CudaBackend
from quantkit.kernels.graphs import CudaGraphs
from quantkit.runtime.decode_step import DecodeStep

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "bench" / "gpu.py"
ABSENT = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError("No module named " + name, name=name)

sys.meta_path.insert(0, Absent())
sys.path += {packages!r}
runpy.run_path({script!r}, run_name="__main__")
"""
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
def tapes(monkeypatch) -> TapeRecorder:
    """The backend of the whole process is that of the executor, which records on these."""
    launcher = TapeLauncher()
    monkeypatch.setattr(kernels, "backend", lambda *_: CudaBackend(launcher))
    return TapeRecorder(launcher)


@pytest.fixture
def machine(gpu):
    return gpu.Machine(CudaBackend(ExecutorLauncher()), torch.device("cpu"), seconds_of_call)


@needs_compiler
def test_every_measurement_runs(gpu, machine, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "BLOCK", (((512, 64),),))
    products = gpu.product_rows(machine, [(512, 64)], rotated=1 << 16)
    assert [row[:3] for row in products[:2]] == [["512 x 64", "GPTQ 4 bits", "1"], ["512 x 64", "GPTQ 4 bits", "8"]]
    assert len(products) == 4 * 5
    assert [row[4] for row in products[::5]] == ["1.00"] * 4, "of one row's time"
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
@pytest.mark.parametrize("kind", ["EXL2 4.0", "GPTQ 4"])
def test_steps_are_checked_in_captured_launches(gpu, tapes, monkeypatch, kind) -> None:
    """As on a card, where CUDA graphs stand in the place of these tapes."""
    monkeypatch.setattr("gpu_decode.PAGE", 12)  # no page ends: short prompts
    rows = list(gpu.check_rows(tapes, torch.device("cpu"), 2, (kind,), (None, "int8")))
    assert [line[1:4] for line, _ in rows] == [[kv, texts, "graphs"] for kv in ("fp16", "int8") for texts in ("1", "3")]
    assert all(right and line[-1] == "right" for line, right in rows)
    assert tapes.replayed


@needs_compiler
def test_a_step_that_is_wrong_is_called_so(gpu, tapes, monkeypatch) -> None:
    launch = DecodeStep.launch

    def wrong(step: DecodeStep) -> None:
        launch(step)
        step.logits.mul_(1.1)

    monkeypatch.setattr(DecodeStep, "launch", wrong)
    monkeypatch.setattr("gpu_decode.PAGE", 12)
    monkeypatch.setattr(gpu, "CudaGraphs", lambda device: tapes)
    monkeypatch.setattr(gpu, "check_rows", partial(gpu.check_rows, steps=1, caches=(None,)))
    text, right = gpu.check_steps(gpu.Machine(None, torch.device("cpu"), seconds_of_call))
    assert not right
    assert text.count("| wrong |") == 4


@needs_compiler
def test_steps_are_held_against_what_they_must_read(gpu, tapes, monkeypatch) -> None:
    import gpu_decode

    rate = 1e6
    loads = ((None, 1, 300), ("int8", 3, 5))
    rows = list(gpu.decode_rows(lambda launches: launches() or 0.5, rate, torch.device("cpu"), gpu_decode.SMALL, loads))
    assert [row[:4] for row in rows] == [
        [kind, kv, texts, positions]
        for kind in gpu_decode.KINDS
        for kv, texts, positions in (("fp16", "1", "300"), ("int8", "3", "5"))
    ]
    weights = 2 * (128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 256) + 128 * 320
    codes, keys = weights / 2, 300 * 2 * 2 * 64 * 2
    limit = float(rows[0][5])
    assert rate / (codes * 1.2 + keys) < limit < rate / (codes + keys), "4.0 bits a weight, scales, keys and values"
    assert rows[0][4] == "2.0" and rows[1][4] == "6.0", "tokens of all texts together"
    assert rows[0][6] == f"{1 / float(rows[0][5]) / 0.5:.0%}"


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


@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_on_a_card_everything_is_where_it_belongs(gpu, monkeypatch) -> None:
    """The card is simulated and has no graphs: a tensor of the host among those of the card would be refused."""
    import gpu_decode

    card, device = SimulatedCard(), torch.device("cuda", 0)
    card.backend = kernels_of(card, ExecutorLauncher())
    monkeypatch.setattr("gpu_decode.PAGE", 12)
    monkeypatch.setattr(gpu, "BLOCK", (((512, 64),),))
    with card.inserted(monkeypatch):
        machine = gpu.Machine(kernels.backend("cuda"), device, seconds_of_call)
        for kind in gpu_decode.KINDS:
            for line, right in gpu.check_rows(CudaGraphs(device), device, 1, (kind,), ("int8",)):
                assert right and line[3].startswith("kernels the launches of a step could not be captured")
        assert len(list(gpu.decode_rows(machine.seconds, 1e6, device, gpu_decode.SMALL, (("int8", 2, 5),)))) == 2
        assert len(gpu.product_rows(machine, [(512, 64)], rotated=1 << 14)) == 4 * 5
        assert len(gpu.prefill_rows(machine, [(128, 64)], (65,))) == 1
        assert gpu.decode_row(machine, blocks=1, head=(512, 64))[0] == "2 linears"
        assert gpu.quantize_row(machine, [[(128, 8)]])[0].endswith(" s")


def test_make_runs_it_in_any_python() -> None:
    """No set-up, no virtual environment: these would need a network."""
    lines = (ROOT / "Makefile").read_text().split("\n")
    for target, arguments in (("gpu-check", ""), ("bench-gpu", " --benchmark-only")):
        (at,) = (number for number, line in enumerate(lines) if line.startswith(f"{target}:"))
        assert lines[at].split("##")[0].strip() == f"{target}:"
        assert lines[at + 1] == f"\t$(PYTHON) docs/bench/gpu.py{arguments}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_claimed(tmp_path) -> None:
    """In a Python that has torch and what torch needs, but neither quantkit nor anything else that it lists."""
    before = set((ROOT / "docs" / "results").iterdir())
    packages = [path for path in sys.path if path.endswith("site-packages")]
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    absent = {re.split(r"\W", line.replace("-", "_"))[0] for line in listed} - {"torch", "numpy", "jinja2"}
    code = ABSENT.format(absent=absent, packages=packages, script=str(SCRIPT))
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ), check=False
    )
    assert done.returncode == 15, done.stderr
    assert done.stdout.startswith("error: torch ")
    assert "hint: " in done.stdout
    assert set((ROOT / "docs" / "results").iterdir()) == before
