"""Broken CUDA set-ups as a user meets them: one line and a hint from every command, and `auto` goes on with the CPU."""

import json
from pathlib import Path

import pytest
import tiny
from broken_cuda import COMPILE_ERROR, FAULTS, broken

from quantkit import cli
from quantkit.commands.quantization.job import choose_placement
from quantkit.runtime.placement import Placement

SAID = {
    "torch without CUDA": ("torch is a build without CUDA", "install a CUDA build of torch"),
    "no GPU": ("torch, built for CUDA 13.0, finds no usable GPU", "`nvidia-smi`"),
    "no CuPy": ("CuPy is not installed", "`pip install 'quantkit[cuda13]'`"),
    "CuPy without a driver": ("CuPy cannot use the NVIDIA driver: cudaErrorInsufficientDriver", "update the driver"),
    "two CuPy wheels": ("`cupy-cuda12x` and `cupy-cuda13x` are both installed", "`pip uninstall cupy-cuda12x cupy-cuda13x`"),
    "mixed CUDA majors": ("CUDA versions are mixed (torch 12, CuPy 13", "`pip install 'quantkit[cuda12]'`"),
    "a driver that loads nothing": ("the driver cannot load the CUDA kernel `pack`", "update the NVIDIA driver"),
    "no NVRTC": ("NVRTC, the CUDA compiler library, is not installed", "`pip install nvidia-cuda-nvrtc`"),
    "NVRTC older than the card": ("cannot compile for sm_120: it knows sm_75", "`pip install --upgrade nvidia-cuda-nvrtc`"),
    "a kernel that does not compile": (COMPILE_ERROR, "`QUANTKIT_BACKEND=reference`"),
    "a card older than the kernels": ("the CUDA kernel `pack` needs sm_75, `cuda:0` (Simulated) is sm_61", "`QUANTKIT_BACKEND=reference`"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("source") / "model", num_hidden_layers=1)


def test_every_fault_is_tried() -> None:
    assert SAID.keys() == FAULTS.keys()


@pytest.mark.parametrize("fault", FAULTS)
def test_every_command_says_it_in_one_line(fault: str, model: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    message, hint = SAID[fault]
    out = tmp_path / "out"
    commands = [
        ["doctor", "--kernels"],
        ["generate", str(model), "--prompt", "a", "--device", "cuda"],
        ["quantize", str(model), "-o", str(out), "--device", "cuda"],
        ["measure", str(model), "-o", str(out), "--device", "cuda:0", "--dry-run"],
    ]
    with broken(fault, monkeypatch):
        for command in commands:
            assert cli.run(command) == 15, command
            captured = capsys.readouterr()
            first, *_ = captured.err.splitlines()
            said = " ".join(captured.err.split())
            assert first.startswith("error: ")
            assert message in said, command
            assert "hint: " in said
            assert hint in said.split("hint: ")[1]
            assert (captured.out, "Traceback" in captured.err) == ("", False)
        assert cli.run(["doctor", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["backend"] in ("cpu", "reference")
        assert message in found["backend_reason"]
        for chosen in (choose_placement("auto", "fp32"), Placement.choose("auto", "fp32")):
            assert chosen.device == "cpu"
            assert message in chosen.reason
    assert not out.exists()


def test_auto_goes_on_with_the_cpu_and_says_why(model: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    with broken("no CuPy", monkeypatch):
        options = ["--effort", "fast", "--samples", "2", "--length", "16", "--group-size", "32", "--no-eval", "--json"]
        assert cli.run(["quantize", str(model), "-o", str(tmp_path / "out"), *options]) == 0
        assert json.loads(capsys.readouterr().out)["backend"].endswith("CuPy is not installed")
        assert cli.run(["generate", str(tmp_path / "out"), "--prompt", "a", "--max-new-tokens", "2", "--json"]) == 0
