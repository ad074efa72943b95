"""Which way decode steps take, and what is said of it: every reason has a model or a cache that it is for."""

from dataclasses import replace

import pytest
import tiny
import tiny_exl2
import tiny_gptq
import torch
from cuda_on_cpu import compiler
from cuda_on_cpu.launcher import ExecutorLauncher
from simulated_card import SimulatedCard, kernels_of

import quantkit
from quantkit import kernels
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.kernels.cuda import CudaBackend
from quantkit.models.low_rank import LowRank
from quantkit.models.transformer import Model
from quantkit.runtime.cache_format import cache_format
from quantkit.runtime.decode_path import KERNELS, PLAIN, decode_path
from quantkit.runtime.load import load
from quantkit.runtime.page_pool import PagePool

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def cuda(monkeypatch) -> ExecutorLauncher:
    launcher = ExecutorLauncher()
    monkeypatch.setattr(kernels, "backend", lambda *_: CudaBackend(launcher))
    return launcher


def model_of(path, family: str = "LlamaForCausalLM", dtype=torch.bfloat16, **overrides) -> Model:
    return load(tiny.write_model(path / "m", family, dtype="bfloat16", **{**HEADS, **overrides}), dtype=dtype)


def pool_of(model: Model, kv: str | None = None, **options) -> PagePool:
    return PagePool(model.config, 2, cache_format(kv, model.config.head_dim, model.dtype), **options)


def refusal(model: Model, pool: PagePool | None = None) -> str:
    path = decode_path(model, pool or pool_of(model))
    assert (path.name == PLAIN) == (path.reason != "nothing was captured yet")
    return path.reason if path.name == PLAIN else ""


@pytest.mark.parametrize("kv", [None, "int8", "k8v4", "q4_0"])
@pytest.mark.parametrize("write", [tiny_gptq.write_model, tiny_exl2.write_model])
def test_a_quantized_llama_is_covered(cuda, tmp_path, write, kv) -> None:
    model = load(write(tmp_path / "m", **HEADS), dtype=torch.float16)
    assert decode_path(model, pool_of(model, kv)).name == KERNELS


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_families_that_are_covered(cuda, tmp_path, family) -> None:
    assert refusal(model_of(tmp_path, family)) == ""


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("MixtralForCausalLM", {}, "the model has a mixture of experts"),
        ("Gemma2ForCausalLM", {}, "the activation is not silu"),
        ("LlamaForCausalLM", {"hidden_act": "relu"}, "the activation is not silu"),
        ("Gemma2ForCausalLM", {"hidden_activation": "silu"}, "the model normalises what joins the residual stream"),
        ("Phi3ForCausalLM", {}, "several linears of the model are stored as one"),
        ("LlamaForCausalLM", {"head_dim": 160}, "heads have 160 elements, the kernels take multiples of 32 up to 128"),
        ("LlamaForCausalLM", {"head_dim": 48}, "heads have 48 elements, the kernels take multiples of 32 up to 128"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "the rotation depends on the length of the text",
        ),
    ],
)
def test_models_that_are_not(cuda, tmp_path, family, overrides, reason) -> None:
    assert refusal(model_of(tmp_path, family, **overrides)) == reason


def test_fused_linears_of_exl2_are_in_parts(cuda, tmp_path) -> None:
    model = load(tiny_exl2.write_model(tmp_path / "m", family="Phi3ForCausalLM", **HEADS), dtype=torch.bfloat16)
    assert refusal(model) == "several linears of the model are stored as one"


@pytest.mark.parametrize(
    ("kv", "options", "reason"),
    [
        ("q4_0", {"resident": 256}, "a part of the cache is in host memory"),
        (None, {"window": 300}, "the cache has a window of its own"),
        ("fp16", {}, "the cache is in fp16, which is not what the model computes in"),
        (None, {"device": "meta"}, "the cache is on another device than the model"),
    ],
)
def test_caches_that_are_not(cuda, tmp_path, kv, options, reason) -> None:
    model = model_of(tmp_path)
    assert refusal(model, pool_of(model, kv, **options)) == reason


def test_arithmetic_and_devices_that_are_not(cuda, tmp_path, monkeypatch) -> None:
    model = model_of(tmp_path)
    assert refusal(replace(model, dtype=torch.float32)) == "the kernels compute in fp16 and bf16, the model in fp32"
    old = ExecutorLauncher(architecture=75)
    monkeypatch.setattr(kernels, "backend", lambda *_: CudaBackend(old))
    assert refusal(model) == "this card is too old for products in bf16, fp16 is faster there"
    monkeypatch.setattr(old, "reaches", lambda tensor: False)
    assert refusal(model) == "the kernels do not reach tensors on `cpu`"
    elsewhere = replace(model.embedding, weight=model.embedding.weight.to("meta"))
    assert refusal(replace(model, embedding=elsewhere)) == "the layers of the model are on several devices"


def test_streamed_blocks_and_adapters_are_not(cuda, tmp_path) -> None:
    model = model_of(tmp_path)
    checkpoint = open_checkpoint(tmp_path / "m")
    streamed = Model.stream(checkpoint, model.config, model.architecture, torch.bfloat16)
    assert refusal(streamed) == "the blocks of the model are read anew whenever they run"
    factors = LowRank(torch.zeros(model.config.hidden_size, 2), torch.zeros(2, model.config.vocab_size))
    adapted = replace(model, head=replace(model.head, linear=model.head.linear.adapted(factors)))
    assert refusal(adapted) == "adapters are applied while the model runs"


def test_on_a_cpu_the_plain_path_runs_and_the_report_says_so(tmp_path) -> None:
    path = tiny.write_model(tmp_path / "m")
    report = quantkit.generate(path, "the", max_new_tokens=3, device="cpu")
    found = report.as_json()
    assert found["decode_path"]["name"] == PLAIN
    told = "one call for all layers is made for bf16, the model computes in another dtype"
    assert found["decode_path"]["reason"] in (told, "this processor has no instruction for products of bytes (AVX-512 VNNI)")
    assert not [row for row in report.rows() if row[0] == "decode steps"]


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_generate_takes_the_kernels_and_says_so(cuda, tmp_path, draft) -> None:
    """The same text as plainly; a second process of thought for guesses, which are rows of their own."""
    path = tiny_gptq.write_model(tmp_path / "m", dtype="bfloat16", **HEADS)
    options = {"max_new_tokens": 6, "device": "cpu", "dtype": "bf16", "kv": "int8", "draft": draft, "ignore_eos": True}
    report = quantkit.generate(path, "the theory of the theory of the", **options)
    launched = [name for name, _ in cuda.launched]
    assert {"rope_append", "attend", "turn_heads", "silu_mul"} <= set(launched)
    assert report.as_json()["decode_path"] == {"name": KERNELS, "reason": "this device has no CUDA graphs"}
    told = "kernels, launched one by one: this device has no CUDA graphs"
    assert ["decode steps", told] in report.rows()


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("write", [tiny_gptq.write_model, tiny_exl2.write_model])
def test_on_a_card_everything_is_where_it_belongs(tmp_path, monkeypatch, write) -> None:
    """The card is simulated, and has no graphs: the way there is tried, and said to be closed, once."""
    card, executor = SimulatedCard(), ExecutorLauncher()
    card.backend = kernels_of(card, executor)
    path = write(tmp_path / "m", **HEADS)
    with card.inserted(monkeypatch):
        report = quantkit.generate(path, "the theory", max_new_tokens=4, device="cuda", kv="int8", ignore_eos=True)
    assert {"rope_append", "attend", "turn_heads"} <= {name for name, _ in executor.launched}
    found = report.as_json()
    assert (found["device"], found["dtype"], found["backend"]) == ("cuda", "fp16", "cuda")
    assert found["decode_path"]["name"] == KERNELS
    assert found["decode_path"]["reason"].startswith("the launches of a step could not be captured: ")
    assert len(found["token_ids"]) == 4


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")
def test_a_queue_takes_them_too(cuda, tmp_path) -> None:
    path = tiny_gptq.write_model(tmp_path / "m", dtype="bfloat16", **HEADS)
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "the"}\n{"prompt": "of the"}\n{"prompt": "an"}\n')
    report = quantkit.generate(
        path, prompts_file=file, max_new_tokens=3, device="cpu", dtype="bf16", ignore_eos=True, cache_tokens=1024
    )
    assert report.as_json()["decode_path"]["name"] == KERNELS
    batches = {grid[2] for name, grid in cuda.launched if name == "attend"}
    assert 4 in batches, "three texts in one step of four rows"
    assert all(served.completion.decode_path.name == KERNELS for _, served in report.answers)
