"""`quantkit doctor --kernels`: on a simulated card, and where there is none."""

import json

import pytest
import torch
from cuda_on_cpu import compiler
from cuda_on_cpu.launcher import ExecutorLauncher

from quantkit import cli, kernels
from quantkit.kernels import self_test
from quantkit.kernels.cuda import CudaBackend

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")


@pytest.fixture
def two_kernels(monkeypatch) -> None:
    monkeypatch.setattr(self_test, "CASES", {name: self_test.CASES[name] for name in ("pack", "solve_rows")})


@needs_compiler
def test_every_case_is_shown(monkeypatch, capsys, two_kernels) -> None:
    monkeypatch.setattr(kernels, "backend", lambda *_: CudaBackend(ExecutorLauncher()))
    assert cli.run(["doctor", "--kernels", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["card"], found["healthy"]) == ("simulated", True)
    assert {outcome["kernel"] for outcome in found["outcomes"]} == {"pack", "solve_rows"}
    assert all(outcome["passed"] for outcome in found["outcomes"])
    assert cli.run(["doctor", "--kernels"]) == 0
    assert "solve_rows" in capsys.readouterr().out


@needs_compiler
def test_a_wrong_kernel_exits_with_3(monkeypatch, capsys, two_kernels) -> None:
    class Wrong(CudaBackend):
        def pack(self, codes: torch.Tensor, bits: int) -> torch.Tensor:
            return super().pack(codes, bits) ^ 1

    monkeypatch.setattr(kernels, "backend", lambda *_: Wrong(ExecutorLauncher()))
    assert cli.run(["doctor", "--kernels"]) == 3
    assert "wrong: 2 bits, 5 columns" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_card(capsys) -> None:
    assert cli.run(["doctor", "--kernels"]) == 15
    assert capsys.readouterr().err.startswith("error: torch ")
