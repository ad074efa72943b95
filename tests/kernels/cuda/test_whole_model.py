"""A model quantized and run with the CUDA kernels in place of all others, on the CPU executor."""

from pathlib import Path

import pytest
import tiny
import torch
from cuda_on_cpu import compiler
from cuda_on_cpu.launcher import ExecutorLauncher

import quantkit
from quantkit import kernels
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.quantize import run
from quantkit.kernels import cpu
from quantkit.kernels.cuda import CudaBackend
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")
IDS = torch.randint(0, 250, (1, 6), generator=torch.Generator().manual_seed(7))


def quantize(model: Path, out: Path) -> None:
    settings = QuantizeSettings(str(model), out, bits=4, group_size=32, samples=4, length=64, evaluate=False)
    run(settings, Silent())


def test_quantize_and_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "HAS_PAIR_PRODUCTS", False)  # one attention for both: labels are drawn from it
    model = tiny.write_model(tmp_path / "model", dtype="bfloat16")
    quantize(model, tmp_path / "expected")
    expected = quantkit.load(tmp_path / "expected", dtype=torch.bfloat16)(IDS)

    launcher = ExecutorLauncher()
    monkeypatch.setattr(kernels, "backend", lambda *_: CudaBackend(launcher))
    quantize(model, tmp_path / "found")
    assert {name for name, _ in launcher.launched} == {"pack", "grid_error", "solve_rows", "gptq_dequantize", "unpack"}
    same = []
    before, after = open_checkpoint(tmp_path / "expected"), open_checkpoint(tmp_path / "found")
    for name in before.names():
        if name.endswith("qweight"):
            codes = [CudaBackend(launcher).unpack(checkpoint.tensor(name), 4) for checkpoint in (before, after)]
            same.append(float((codes[0] == codes[1]).float().mean()))
        elif not name.endswith(("scales", "qzeros")):
            assert torch.equal(before.tensor(name), after.tensor(name))
    assert min(same) > 0.95, "codes may differ only where sums in another order cross the middle between two"

    found = quantkit.load(tmp_path / "expected", dtype=torch.bfloat16)(IDS)
    assert launcher.launched[-1][0] == "gptq_matmul"
    assert float((found - expected).abs().max()) < 0.03 * float(expected.abs().max())
