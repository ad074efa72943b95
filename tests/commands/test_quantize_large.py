"""Quantizing real sizes: what it costs, and that it does not cost more for a deeper model."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import smollm2
import tiny
import torch

from quantkit.checkpoint.writer import CheckpointWriter

pytestmark = pytest.mark.proof

LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}


def write_random_llama(path: Path, layers: int) -> Path:
    """A random Llama in bfloat16 shards, 1.1B parameters at 22 layers, written with one tensor in memory."""
    config = tiny.make_config("LlamaForCausalLM", "bfloat16", num_hidden_layers=layers, **LLAMA_1B)
    generator = torch.Generator().manual_seed(0)
    with CheckpointWriter(path, shard_bytes=600 << 20) as writer:
        for name, shape, kind in tiny.tensor_list(config):
            noise = torch.randn(shape, generator=generator)
            weight = 1 + 0.1 * noise if kind == "norm" else noise / math.sqrt(shape[-1])
            writer.add(name, weight.to(torch.bfloat16))
        writer.finish(config)
    tiny.write_tokenizer(path)
    return path


def quantize(model: Path, out: Path, *options: str) -> dict:
    """The report of the command, run in a process of its own so that its peak memory is its own."""
    command = [sys.executable, "-m", "quantkit", "quantize", str(model), "-o", str(out), "--group-size", "64", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_smollm2(tmp_path: Path) -> None:
    """All defaults but the group size: 128 × 512 tokens."""
    report = quantize(smollm2.for_test(), tmp_path / "out")
    assert len(report["linears"]) == 210
    assert report["total_peak_memory_bytes"] < 1.5e9
    damage = report["evaluation"]
    assert damage["kl_mean"] < 0.2
    assert "gravity" in damage["answer"].lower()


def test_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    peaks = {}
    for layers in (22, 44):
        model = write_random_llama(tmp_path / f"random-{layers}", layers)
        assert len(list(model.glob("model-*.safetensors"))) >= 3
        report = quantize(model, tmp_path / f"out-{layers}", "--samples", "8", "--no-eval")
        peaks[layers] = report["peak_memory_bytes"]
    assert peaks[22] < 3e9
    assert peaks[44] < 1.05 * peaks[22]


def test_a_model_of_one_billion_with_measuring(tmp_path: Path) -> None:
    report = quantize(write_random_llama(tmp_path / "random", 22), tmp_path / "out", "--samples", "32")
    assert report["total_peak_memory_bytes"] < 3e9
