"""Models shared out to several processes: the plan in numbers, and 2 and 3 real processes against one."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import parallel_worker
import pytest
import tiny
import tiny_exl2
import tiny_gptq
import tiny_lora
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quantkit
from quantkit.checkpoint.adapter import open_adapter
from quantkit.checkpoint.merged import merge
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.errors import CheckpointError, UsageError
from quantkit.runtime.parallel import ParallelPlan, apportion
from quantkit.runtime.ranks import Ranks
from quantkit.runtime.share_source import ShareSource, load_share

WORKER = Path(parallel_worker.__file__)
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 16,
    "vocab_size": 384,
}
"""Two and three processes share all of it out evenly, in units of 32 where there are such."""
WIDE = {**SHAPE, "hidden_size": 384, "intermediate_size": 768, "head_dim": 32}
"""In so small a model the order of rows, 32 bits for each input, which a slice of columns keeps whole, has a weight."""


def _llama(path: Path) -> None:
    tiny.write_model(path, attention_bias=True, mlp_bias=True, **SHAPE)


def _tied(path: Path) -> None:
    tiny.write_model(path, "Qwen3ForCausalLM", dtype="bfloat16", tie_word_embeddings=True, **SHAPE)


def _gemma(path: Path) -> None:
    tiny.write_model(path, "Gemma2ForCausalLM", **{**SHAPE, "vocab_size": 320})


def _phi(path: Path) -> None:
    tiny.write_model(path, "Phi3ForCausalLM", **SHAPE)


def _one_kv_head(path: Path) -> None:
    tiny.write_model(path, **{**SHAPE, "num_key_value_heads": 1})


def _mixture(path: Path) -> None:
    experts = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 192}
    tiny.write_model(path, "Qwen2MoeForCausalLM", **SHAPE, **experts)


def _gptq(**options):
    return lambda path: tiny_gptq.write_model(path, sym=False, checkpoint_format="gptq_v2", **options, **SHAPE)


def _exl2(**options):
    return lambda path: tiny_exl2.write_model(path, **{**WIDE, **options})


MODELS = {
    "dense, biases": _llama,
    "dense, tied, head norms": _tied,
    "dense, windows, 320 words": _gemma,
    "dense, fused": _phi,
    "dense, experts": _mixture,
    "dense, one key-value head": _one_kv_head,
    "gptq": _gptq(),
    "gptq act-order": _gptq(act_order=True),
    "gptq 2 bits, groups of 64": _gptq(bits=2, group_size=64, act_order=True),  # random 8 bits are too large for fp32
    "gptq one group": _gptq(group_size=-1),
    "exl2": _exl2(),
    "exl2, head, biases": _exl2(head=True, attention_bias=True, mlp_bias=True),
    "exl2, fused": _exl2(family="Phi3ForCausalLM"),
    "exl2, width of no units": _exl2(intermediate_size=784),
}
UNEVEN = ("dense, windows, 320 words", "dense, one key-value head", "exl2, width of no units")
EVEN = [name for name in MODELS if name not in UNEVEN]


def run_together(size: int, arguments: list[str]) -> None:
    """`size` processes of this command line, as `torchrun` would start them."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * size, "\n".join(said)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for number, write in enumerate(MODELS.values()):
        write(root / str(number))
    return {name: root / str(number) for number, name in enumerate(MODELS)}


@pytest.fixture(scope="module")
def alone(folders) -> dict[str, dict]:
    return {name: parallel_worker.see(quantkit.load(folder)) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": "the thing", "id": "a"}, {"prompt": "of an and in " * 5, "temperature": 1.0, "seed": 3, "id": "b"}]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


@pytest.fixture(scope="module", params=[2, 3])
def together(request, folders, prompts, tmp_path_factory) -> list[dict[str, dict]]:
    """What each process saw, by the name of the model."""
    out = tmp_path_factory.mktemp("seen")
    run_together(request.param, [str(WORKER), str(out), str(prompts), *(str(folder) for folder in folders.values())])
    seen = [torch.load(out / f"{rank}.pt") for rank in range(request.param)]
    return [{**one, **{name: one[str(folder)] for name, folder in folders.items()}} for one in seen]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_one_process(name, alone, together) -> None:
    expected = alone[name]["logits"]
    for own in together:
        for way in ("logits", "cached"):
            assert float((own[name][way] - expected).abs().max() / expected.std()) < 1e-5


def test_answers_are_those_of_one_process(folders, prompts, together) -> None:
    expected = parallel_worker.answers(str(next(iter(folders.values()))), prompts)
    for own in together:
        assert own["answers"] == {**expected, "processes": (len(together), len(together))}
        assert len(own["answers"]["ids"]) == 24 and len(own["answers"]["queue"]) == 2


def test_processes_agree_on_what_each_finds_out_for_itself(together) -> None:
    assert [own["agreed"] for own in together] == [([7, 7], 10 - len(together))] * len(together)
    assert Ranks().of_first([3]) == [3] and Ranks().least(3) == 3


@pytest.mark.parametrize("name", MODELS)
def test_all_processes_have_the_same_bits(name, together) -> None:
    for own in together[1:]:
        assert torch.equal(own[name]["hidden"], together[0][name]["hidden"])
        assert torch.equal(own[name]["logits"], together[0][name]["logits"])


@pytest.mark.parametrize("name", EVEN)
def test_each_process_holds_its_share_of_the_bytes(name, alone, together) -> None:
    for own in together:
        share = own[name]["bytes"] * len(together) / alone[name]["bytes"]
        assert share == pytest.approx(1, abs=0.05)
        assert own[name]["cache_bytes"] * len(together) == alone[name]["cache_bytes"]


@pytest.mark.parametrize("name", [name for name in MODELS if "dense" in name and "one key" not in name])
def test_each_process_reads_its_share_of_the_bytes(name, folders, together) -> None:
    whole = open_checkpoint(folders[name]).stored_bytes
    for own in together:
        assert own[name]["read"] < 1.1 * whole / len(together) + 20_000  # config and headers


def test_outputs_are_summed_or_gathered_as_the_order_of_rows_allows(together) -> None:
    kinds = {name: {key.rpartition(".")[2]: kind for key, kind in together[0][name]["kinds"].items()} for name in MODELS}
    for name in MODELS:
        assert kinds[name]["down_proj"] == ("GatheredTensor" if "no units" in name else "SummedTensor")
        scattered = "exl2" in name or "act-order" in name or "groups of 64" in name
        assert kinds[name]["o_proj"] == ("GatheredTensor" if scattered else "SummedTensor")


def _config(tmp_path, **shape):
    return open_checkpoint(tiny.write_model(tmp_path / "model", **shape)).model_config


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "possible"),
    [(14, 2, 4, "1, 2, 14"), (4, 2, 3, "1, 2, 4"), (12, 6, 4, "1, 2, 3, 6, 12"), (52, 4, 8, "1, 2, 4, 52")],
)
def test_uneven_heads_are_refused_with_the_numbers_that_are_possible(tmp_path, heads, kv_heads, size, possible) -> None:
    config = _config(tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
    message = f"{heads} attention heads on {kv_heads} key-value heads cannot be shared out to {size} processes"
    with pytest.raises(UsageError, match=message) as caught:
        ParallelPlan.make(config, size, quantized=False)
    assert caught.value.hint == f"--nproc-per-node with one of {possible}"


def test_key_value_heads_are_held_twice_by_more_processes_than_there_are(tmp_path) -> None:
    plan = ParallelPlan.make(_config(tmp_path, num_attention_heads=8, num_key_value_heads=2), 4, quantized=False)
    assert [plan.heads(rank) for rank in range(4)] == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert [plan.kv_heads(rank) for rank in range(4)] == [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    assert plan.share(3).num_kv_heads == 1


def test_an_mlp_too_narrow_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="an MLP of 96 in units of 32 cannot be shared out to 4 processes") as caught:
        ParallelPlan.make(_config(tmp_path, intermediate_size=96), 4, quantized=True)
    assert caught.value.hint == "--nproc-per-node 3"


def test_widths_that_no_unit_divides_are_shared_out_one_by_one(tmp_path) -> None:
    plan = ParallelPlan.make(_config(tmp_path, intermediate_size=100), 2, quantized=True)
    assert [len(span) for span in plan.spans(100)] == [50, 50]
    assert [len(span) for span in plan.spans(96)] == [32, 64]


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 8))
def test_every_width_of_codes_is_shared_out_alike(runs, size) -> None:
    total = sum(runs)
    shares = [total * (rank + 1) // size - total * rank // size for rank in range(size)]
    rows = apportion(runs, shares)
    assert [sum(row) for row in rows] == runs
    assert [sum(column) for column in zip(*rows, strict=True)] == shares
    for run, row in zip(runs, rows, strict=True):
        for share, units in zip(shares, row, strict=True):
            assert units >= 0 and abs(units - run * share / total) < 2


def test_merged_adapters_are_shared_out_like_any_weight(tmp_path) -> None:
    """Parts of all processes put together, without any of them running."""
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "model"))
    names = [f"model.layers.1.{name}" for name in ("self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")]
    tiny_lora.write_adapter(tmp_path / "adapter", {name: (*checkpoint.tensor(f"{name}.weight").shape, 8) for name in names})
    merged = merge(checkpoint, [(open_adapter(tmp_path / "adapter"), 1.0)])
    config, architecture = checkpoint.model_config, checkpoint.architecture
    plan = ParallelPlan.make(config, 2, quantized=False)
    models = [load_share(merged, architecture, plan, Ranks(rank, 2), torch.float32) for rank in range(2)]
    for name, side in zip(names, (1, 1, 0), strict=True):
        parts = [model.linears[name].stored.dequantize() for model in models]
        assert torch.equal(torch.cat(parts, side), merged.linear(name).dequantize())
        assert not torch.equal(merged.linear(name).dequantize(), checkpoint.linear(name).dequantize())


def test_a_weight_of_another_shape_than_the_config_is_refused_not_cut(tmp_path) -> None:
    path = tiny_gptq.write_model(tmp_path / "model")
    checkpoint = open_checkpoint(path)
    config = replace(checkpoint.model_config, intermediate_size=64)
    source = ShareSource(checkpoint, checkpoint.architecture, ParallelPlan(config, 2, 32), Ranks(0, 2), torch.float32)
    with pytest.raises(CheckpointError, match=r"has shape \[64, 128\], its config.json asks for \[64, 64\]"):
        source.linear("model.layers.0.mlp.gate_proj")
