"""Decode steps in one call on the CPU against the plain forward, which computes in bfloat16 what they do in float32."""

from dataclasses import replace

import pytest
import tiny
import tiny_exl2
import tiny_gptq
import torch
from twin_texts import TwinTexts, pool_of

import quantkit
from quantkit.kernels import cpu, cuda, multiply
from quantkit.kernels.steps import PAGE
from quantkit.models.transformer import Model
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.decode_path import NATIVE, PLAIN, decode_path
from quantkit.runtime.decoding import Decoding
from quantkit.runtime.generator import WARM_UP_ROWS
from quantkit.runtime.load import load
from quantkit.runtime.placement import has_native_bf16

pytestmark = pytest.mark.skipif(not multiply.HAS_BYTE_PRODUCTS, reason="this processor multiplies no bytes")
BOUND = 0.02
"""Of the largest logit: what bfloat16 leaves out between the operations."""
MODELS = {
    "gptq": lambda path: tiny_gptq.write_model(path, bits=4, dtype="bfloat16"),
    "gptq 3 bits, act-order, biases": lambda path: tiny_gptq.write_model(
        path, bits=3, act_order=True, sym=False, family="Qwen2ForCausalLM"
    ),
    "gptq 8 bits, head norms": lambda path: tiny_gptq.write_model(path, bits=8, family="Qwen3ForCausalLM"),
    "exl2 with a head": lambda path: tiny_exl2.write_model(path, head=True),
    "dense": lambda path: tiny.write_model(path, "Qwen3ForCausalLM", dtype="bfloat16"),
    "wide heads": lambda path: tiny_gptq.write_model(
        path, bits=4, num_attention_heads=2, num_key_value_heads=1, vocab_size=288
    ),
    "dense, window": lambda path: tiny.write_model(path, "MistralForCausalLM", dtype="bfloat16", sliding_window=20),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made: dict[str, Model] = {}

    def of(name: str) -> Model:
        if name not in made:
            made[name] = load(MODELS[name](tmp_path_factory.mktemp("model") / "m"), dtype=torch.bfloat16)
        return made[name]

    return of


class Twins(TwinTexts):
    """One pool is read in single calls."""

    def __init__(self, model: Model, lengths: list[int], kv: str | None = None) -> None:
        super().__init__(model, lengths, kv, Decoding.of)
        assert self.decoding.path.name == NATIVE, self.decoding.path.reason

    def check(self, tokens: list[list[int]], bound: float = BOUND) -> torch.Tensor:
        return super().check(tokens, bound)


@pytest.mark.parametrize("name", MODELS)
def test_one_text_across_the_end_of_a_page(models, name) -> None:
    twins, token = Twins(models(name), [PAGE - 2]), 3
    for _ in range(4):
        token = int(twins.check([[token]])[0].argmax())
    assert twins.texts[1][0].length == PAGE + 2


@pytest.mark.parametrize(("kv", "bound"), [("int8", 0.02), ("k8v4", 0.06), ("q4_0", 0.06)])
def test_a_cache_in_fewer_bits(models, kv, bound) -> None:
    """What both ways store may differ by a step of a code."""
    twins = Twins(models("wide heads"), [PAGE - 2, 30], kv)
    for tokens in ([[1], [2]], [[3], [4]], [[5, 6], [7]]):
        twins.check(tokens, bound)


def test_heads_that_a_cache_in_fewer_bits_cannot_be_read_for(models) -> None:
    model = models("gptq")
    head_dim = model.config.head_dim
    assert head_dim % 32
    told = f"heads have {head_dim} elements, a cache in int8 is read in groups of 32"
    assert decode_path(model, pool_of(model, "int8")).reason == told


@pytest.mark.parametrize("name", MODELS)
def test_three_texts_of_other_lengths(models, name) -> None:
    twins = Twins(models(name), [40, 5, PAGE - 1])
    for tokens in ([[1], [2], [3]], [[4], [5], [6]]):
        twins.check(tokens)


@pytest.mark.parametrize("name", ["gptq", "exl2 with a head"])
def test_guesses_are_checked_and_taken_back(models, name) -> None:
    twins = Twins(models(name), [PAGE - 3, 9])
    twins.check([[1, 2, 3, 4, 5], [7]])
    for texts in twins.texts:
        texts[0].truncate(PAGE - 1)
    twins.check([[9], [8]])


@torch.inference_mode()
def test_a_row_gets_the_same_bits_alone_among_others_and_in_any_number_of_threads(models, monkeypatch) -> None:
    model = models("exl2 with a head")
    texts = [[5, 6, 7], [8], [9, 10], [11, 12, 13]]

    def read(groups: list[list[int]], threads: int) -> list[torch.Tensor]:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        pool = pool_of(model)
        decoding = Decoding.of(model, pool)
        found: list[torch.Tensor] = []
        for group in groups:
            tokens = [texts[index] for index in group]
            logits = decoding.logits([CacheSequence(pool) for _ in group], tokens)
            found += logits.split([len(some) for some in tokens])
        return found

    alone = read([[0], [1], [2], [3]], 1)
    for groups in ([[0, 1, 2, 3]], [[0, 1], [2, 3]]):
        for threads in (1, 2, 3):
            assert all(torch.equal(*pair) for pair in zip(read(groups, threads), alone, strict=True))


def test_torch_keeps_to_one_thread_meanwhile_and_has_its_own_again(models) -> None:
    model = models("gptq")
    count = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        decoding = Decoding.of(model, pool_of(model))
        with pytest.raises(ValueError, match="on the way"), decoding.undisturbed():
            assert torch.get_num_threads() == 1
            raise ValueError("on the way")
        assert torch.get_num_threads() == 3
        plain = Decoding.of(model, pool_of(model, window=300))
        with plain.undisturbed():
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(count)


@torch.inference_mode()
def test_one_by_one_is_as_several_at_once(models) -> None:
    """What a guess is checked with is what would have been computed without it."""
    model = models("gptq")
    pool = pool_of(model)
    decoding = Decoding.of(model, pool)
    together = decoding.logits([CacheSequence(pool)], [[4, 5, 6, 7, 8]])
    text = CacheSequence(pool)
    apart = torch.cat([decoding.logits([text], [[token]]) for token in (4, 5, 6, 7, 8)])
    assert torch.equal(apart, together)


@torch.inference_mode()
def test_a_weight_that_is_not_finite_is_in_the_logits(tmp_path) -> None:
    model = load(MODELS["gptq"](tmp_path / "m"), dtype=torch.bfloat16)
    model.blocks[0].before_mlp.weight[3] = float("nan")
    pool = pool_of(model)
    logits = Decoding.of(model, pool).logits([CacheSequence(pool)], [[4]])
    assert bool(logits.isnan().all())


@pytest.mark.parametrize(
    ("kv", "options", "reason"),
    [
        ("q4_0", {"resident": 256}, "a part of the cache is in host memory"),
        (None, {"window": 300}, "the cache has a window of its own"),
        ("fp16", {}, "the cache is in fp16, which is not what the model computes in"),
    ],
)
def test_caches_that_take_the_plain_path(models, kv, options, reason) -> None:
    model = models("gptq")
    found = decode_path(model, pool_of(model, kv, **options))
    assert (found.name, found.reason) == (PLAIN, reason)


def test_models_that_take_the_plain_path(models, tmp_path, monkeypatch) -> None:
    def reason(model: Model) -> str:
        found = decode_path(model, pool_of(model))
        assert found.name == PLAIN
        return found.reason

    model = models("gptq")
    wide = load(MODELS["gptq"](tmp_path / "wide"), dtype=torch.float32)
    assert reason(wide) == "one call for all layers is made for bf16, the model computes in another dtype"
    short = load(tiny_gptq.write_model(tmp_path / "short", bits=4, group_size=16), dtype=torch.bfloat16)
    assert reason(short) == "the groups of `model.layers.0.self_attn.q_proj` do not fit the layout that the processor reads"
    capped = replace(model, blocks=tuple(replace(b, attention=replace(b.attention, cap=50.0)) for b in model.blocks))
    assert reason(capped) == "the scores of attention are capped"
    monkeypatch.setattr(multiply, "HAS_BYTE_PRODUCTS", False)
    assert reason(model) == "this processor has no instruction for products of bytes (AVX-512 VNNI)"


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_generate_says_so(tmp_path, draft) -> None:
    path = MODELS["gptq"](tmp_path / "m")
    report = quantkit.generate(path, "the", max_new_tokens=6, device="cpu", dtype="bf16", draft=draft, ignore_eos=True)
    assert report.as_json()["decode_path"] == {"name": NATIVE, "reason": ""}
    assert len(report.as_json()["token_ids"]) == 6


@pytest.mark.skipif(not has_native_bf16(), reason="bfloat16 is not faster on this processor")
@pytest.mark.parametrize(("stored", "expected"), [("bfloat16", "bf16"), ("float16", "bf16"), ("float32", "fp32")])
def test_the_usual_arithmetic_of_generate(tmp_path, stored, expected) -> None:
    path = tiny.write_model(tmp_path / "m", dtype=stored)
    found = quantkit.generate(path, "the", max_new_tokens=2, device="cpu").as_json()
    assert found["dtype"] == expected
    assert found["decode_path"]["name"] == (NATIVE if expected == "bf16" else PLAIN)
    assert quantkit.generate(path, "the", max_new_tokens=2, device="cpu", dtype="fp32").as_json()["dtype"] == "fp32"


def test_a_warm_up_reads_more_rows_than_any_kernel_treats_one_by_one() -> None:
    """Else what a prompt compiles would be compiled in its own time."""
    assert max(cpu.FEW_ROWS, cpu.FEW_ROWS_OF_INTEGERS, cuda.FEW_ROWS) < WARM_UP_ROWS
