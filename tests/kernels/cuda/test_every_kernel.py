"""No `.cu` file without a sweep: the self-test that a user runs on a card, here on the CPU executor."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import SCHEDULES, compiler
from cuda_on_cpu.launcher import ExecutorLauncher

from quantkit.kernels import self_test as self_tests
from quantkit.kernels.cuda import CudaBackend
from quantkit.kernels.protocol import Backend
from quantkit.kernels.self_test import CASES, Outcome, self_test
from quantkit.kernels.sources import names, source
from quantkit.kernels.steps import Steps

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")


def without_cases(sources: Iterable[str]) -> set[str]:
    return set(sources) - set(CASES)


def test_every_kernel_has_cases() -> None:
    assert not without_cases(names())
    assert set(CASES) <= set(names())
    assert without_cases((*names(), "planted")) == {"planted"}


def test_every_kernel_is_in_the_table() -> None:
    table = (Path(__file__).parents[3] / "docs" / "results" / "cuda-kernels.md").read_text()
    for name in names():
        assert f"| `{name}` | {len(source(name).variants)} | `{source(name).reference}` | `test_the_self_test[{name}]` |" in table


TORCH_DOES = {"attend_many", "attends_many", "rotate_heads", "rotates_heads", "add_gram", "adds_gram"}


def test_every_operation_has_a_kernel() -> None:
    """But for those that move a weight between its two forms, which are torch functions, and what torch computes well on
    a GPU: attention of many queries, rotation of their heads, and Hessians."""
    operations = {name for owner in (Backend, Steps) for name in vars(owner) if not name.startswith("_")}
    served = {source(name).reference.split(".")[1] for name in names()}
    assert operations - served - {"name", "reason", *TORCH_DOES} == {f"{kind}_{act}" for kind in ("gptq", "exl2") for act in ("repack", "restore")}


def check(kernel: str, launcher: ExecutorLauncher) -> None:
    outcomes = [Outcome(kernel, *case) for case in CASES[kernel](CudaBackend(launcher), torch.device("cpu"))]
    assert outcomes
    assert not [outcome for outcome in outcomes if not outcome.passed]
    assert kernel in {name for name, _ in launcher.launched}, "the cases do not reach the kernel"


@needs_compiler
@pytest.mark.parametrize("kernel", CASES)
def test_the_self_test(kernel) -> None:
    check(kernel, ExecutorLauncher())


@needs_compiler
@pytest.mark.proof
@pytest.mark.parametrize(("order", "seed"), SCHEDULES[1:])
@pytest.mark.parametrize("kernel", CASES)
def test_the_self_test_under_every_schedule(kernel, order, seed) -> None:
    check(kernel, ExecutorLauncher(order, seed))


@needs_compiler
@pytest.mark.proof
@pytest.mark.parametrize("kernel", CASES)
def test_the_self_test_below_sm_80(kernel) -> None:
    """What an sm_75 card is given: bfloat16 weights are expanded, not fused."""
    check(kernel, ExecutorLauncher(architecture=75))


@needs_compiler
def test_a_wrong_kernel_fails_the_self_test(monkeypatch) -> None:
    monkeypatch.setattr(self_tests, "CASES", {name: CASES[name] for name in ("pack", "grid_error")})

    class Wrong(CudaBackend):
        def grid_error(self, *args) -> torch.Tensor:
            return super().grid_error(*args) * (1 + 1e-4)

    outcomes = list(self_test(Wrong(ExecutorLauncher()), torch.device("cpu")))
    assert {outcome.kernel for outcome in outcomes if not outcome.passed} == {"grid_error"}
