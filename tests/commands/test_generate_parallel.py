"""`quantkit generate` under `torchrun`: one voice, the answer of one process, and what cannot be shared out refused."""

import json
import os
import subprocess
import sys

import pytest
import tiny
import tiny_exl2
import tiny_lora

import quantkit
from quantkit.commands.generation import queue
from quantkit.commands.generation.setup import Setup
from quantkit.errors import UsageError
from quantkit.runtime.ranks import Ranks, is_first
from quantkit.runtime.request import Request
from quantkit.settings import GenerateSettings

SHAPE = {"hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 12, "num_key_value_heads": 6}


def test_torchrun_gives_one_answer_that_of_one_process(tmp_path) -> None:
    model = tiny_exl2.write_model(tmp_path / "model", head=True, **SHAPE)
    options = ["--prompt", "the thing", "--max-new-tokens", "12", "--ignore-eos", "--dtype", "fp32", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [*launcher, "quantkit", "generate", str(model), *options], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)  # one object: the second process is silent
    alone = quantkit.generate(model, "the thing", max_new_tokens=12, ignore_eos=True, dtype="fp32")
    assert said["token_ids"] == list(alone.completion.token_ids)
    assert said["processes"] == 2
    assert said["cache_bytes"] * 2 == alone.completion.cache.cache_bytes


@pytest.fixture
def three(monkeypatch):
    """As if `torchrun` had started three processes, of which this is one; refusals need no others."""
    monkeypatch.setattr(Ranks, "join", lambda device: Ranks(1, 3))


def test_heads_that_cannot_be_shared_out_are_refused_before_any_weight_is_read(tmp_path, three) -> None:
    model = tiny.write_model(tmp_path / "model")
    with pytest.raises(UsageError, match="4 attention heads on 2 key-value heads cannot be shared out to 3") as caught:
        quantkit.generate(model, "the thing")
    assert caught.value.hint == "--nproc-per-node with one of 1, 2, 4"


def test_what_goes_by_the_clock_is_refused(tmp_path, three) -> None:
    model = tiny.write_model(tmp_path / "model", **SHAPE)
    with pytest.raises(UsageError, match="`--latency-ms` goes by the clock") as caught:
        Setup.open(GenerateSettings(str(model), "the thing", latency_ms=50.0))
    assert caught.value.hint == "use a smaller `--token-budget`"


def test_adapters_on_the_fly_are_refused(tmp_path, three) -> None:
    model = tiny.write_model(tmp_path / "model", **SHAPE)
    adapter = tmp_path / "adapter"
    tiny_lora.write_adapter(adapter, {"model.layers.0.mlp.up_proj": (384, 192, 8)})
    with pytest.raises(UsageError, match="on the fly to a model shared by 3 processes") as caught:
        quantkit.generate(model, "the thing", loras=(str(adapter),))
    assert "--merge-lora" in caught.value.hint


def test_processes_of_one_machine_divide_its_memory(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Ranks, "join", lambda device: Ranks(0, 2))
    monkeypatch.setattr(Ranks, "least", lambda self, number: number)
    page = 2 * 2 * 3 * 16 * 4 * 256  # keys and values, layers, heads of this process, numbers, bytes, positions
    monkeypatch.setattr(queue, "free_bytes", lambda device: 12 * page)
    setup = Setup.open(GenerateSettings(str(tiny.write_model(tmp_path / "model", **SHAPE)), cache_fraction=0.5))
    lines = [queue.Line(number, None, Request([5] * 300, 10, seed=number)) for number in range(4)]
    assert queue._fit(setup, setup.load(), lines)[0] == 3 * 256


@pytest.mark.parametrize(
    ("size", "rank", "speaks"), [(None, None, True), (None, "1", True), ("2", "0", True), ("2", "1", False)]
)
def test_who_speaks(monkeypatch, size, rank, speaks) -> None:
    for name, value in (("WORLD_SIZE", size), ("RANK", rank)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert is_first() is speaks
