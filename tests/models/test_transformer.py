"""Every family against transformers: logits, and greedy generation through a cache.

Each case is a tiny model that transformers has read and written again, so that config.json and tensor names are its
own. The positions run past every limit of the case: the attention window, the context of the pretraining, and the
point where `dynamic` and LongRoPE change their frequencies.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

import quantkit
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.errors import RequestError
from quantkit.models import catalog
from quantkit.models.config import ModelConfig
from quantkit.models.fan import Activations
from quantkit.models.transformer import Model, Rotary, load_block, load_embedding, load_head
from quantkit.runtime.cache import KVCache

PROMPT, NEW = 24, 64
FACTORS = 8  # half of the heads that the rope cases use, 16 wide

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 40},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 40,
        },
        "rope_theta": 500.0,
    },
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40},
        "max_position_embeddings": 160,
        "rope_theta": 500.0,
    },
    "longrope": {
        "rope_scaling": {
            "rope_type": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": 40,
            "short_factor": [1.0 + 0.1 * pair for pair in range(FACTORS)],
            "long_factor": [2.0 + 0.5 * pair for pair in range(FACTORS)],
        },
        "max_position_embeddings": 160,
    },
}
# Phi-3 states its pretraining length beside the rope, and its config class allows no other variant.
PHI3_LONG = {
    "rope_scaling": {key: ROPES["longrope"]["rope_scaling"][key] for key in ("short_factor", "long_factor")}
    | {"type": "longrope"},
    "original_max_position_embeddings": 40,
    "max_position_embeddings": 160,
}


@dataclass(frozen=True)
class Case:
    """One model: family, what its config says besides, and how many shards it lies in."""

    family: str
    overrides: dict[str, Any] = field(default_factory=dict)
    shards: int = 1


def rope_cases() -> dict[str, Case]:
    cases = {}
    for family in tiny.FAMILIES:
        for name, overrides in ROPES.items() if family != "Phi3ForCausalLM" else (("default", {}), ("longrope", PHI3_LONG)):
            cases[f"{family}-{name}"] = Case(family, {"head_dim": 2 * FACTORS} | overrides)
    return cases


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 16}
ODDITIES = {
    "llama-biases": Case("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": Case("LlamaForCausalLM", {"head_dim": 48}),
    "llama-tied": Case("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-one-kv-head": Case("LlamaForCausalLM", {"num_key_value_heads": 1, "num_hidden_layers": 3}, shards=3),
    "llama-all-kv-heads-gelu": Case("LlamaForCausalLM", {"num_key_value_heads": 4, "hidden_act": "gelu"}),
    "mistral-window": Case("MistralForCausalLM", {"sliding_window": 16}),
    "qwen2-window-above": Case("Qwen2ForCausalLM", {**QWEN_WINDOW, "max_window_layers": 1}),
    "qwen2-layer-types": Case("Qwen2ForCausalLM", {**QWEN_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2-tied": Case("Qwen2ForCausalLM", {"tie_word_embeddings": True}, shards=2),
    "qwen3-window-bias": Case("Qwen3ForCausalLM", {**QWEN_WINDOW, "max_window_layers": 0, "attention_bias": True}),
    "gemma2-no-caps": Case("Gemma2ForCausalLM", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-low-caps": Case("Gemma2ForCausalLM", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5}),
    "gemma2-untied-bias": Case("Gemma2ForCausalLM", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2-yarn-window": Case("Gemma2ForCausalLM", {"head_dim": 16, "num_hidden_layers": 3, **ROPES["yarn"]}),
    "gemma3-pattern-of-3": Case("Gemma3ForCausalLM", {"num_hidden_layers": 4, "sliding_window_pattern": 3}),
    "gemma3-logit-cap": Case("Gemma3ForCausalLM", {"final_logit_softcapping": 0.5}),
    "phi3-window": Case("Phi3ForCausalLM", {"sliding_window": 16}),
    "phi3-partial-rotary": Case("Phi3ForCausalLM", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "phi3-partial-longrope": Case("Phi3ForCausalLM", {"hidden_size": 128, "partial_rotary_factor": 0.5, **PHI3_LONG}),
    "mixtral-window": Case("MixtralForCausalLM", {"sliding_window": 16, "num_experts_per_tok": 3}),
    "qwen2moe-window": Case("Qwen2MoeForCausalLM", {**QWEN_WINDOW, "max_window_layers": 2}),
    "qwen2moe-sparse-step": Case("Qwen2MoeForCausalLM", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "qwen2moe-no-bias": Case("Qwen2MoeForCausalLM", {"qkv_bias": False, "mlp_only_layers": [1]}),
    "qwen3moe-window": Case("Qwen3MoeForCausalLM", {**QWEN_WINDOW, "norm_topk_prob": False, "mlp_only_layers": [0]}),
    "yarn-mscale": Case(
        "LlamaForCausalLM",
        {
            "rope_theta": 500.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 40,
                "mscale": 1.3,
                "mscale_all_dim": 0.7,
                "beta_fast": 8.0,
                "beta_slow": 0.5,
                "truncate": False,
            },
        },
    ),
    "yarn-attention-factor": Case(
        "Qwen3ForCausalLM",
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 40,
                "attention_factor": 1.4,
            }
        },
    ),
}
CASES = rope_cases() | ODDITIES


def write_both(folder: Path, case: Case) -> tuple[Path, Path, Any]:
    """The folder of tiny.py, the one transformers makes of it, and the transformers model."""
    source = tiny.write_model(folder / "old", case.family, shards=case.shards, tokenizer=False, **case.overrides)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    reference.generation_config.eos_token_id = None
    reference.save_pretrained(folder / "new")
    return source, folder / "new", reference


def greedy(model: Model, prompt: torch.Tensor, count: int) -> list[int]:
    """The most likely continuation, one position at a time through a cache."""
    ids = prompt.clone()
    cache = KVCache(model.config, 1, prompt.shape[1] + count, model.dtype)
    while ids.shape[1] < prompt.shape[1] + count:
        if model.must_restart(cache.length, ids.shape[1]):
            cache = KVCache(model.config, 1, prompt.shape[1] + count, model.dtype)
        logits = model(ids[:, cache.length :], cache=cache, last_only=True)
        ids = torch.cat((ids, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return ids[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    old, new, reference = write_both(tmp_path, CASES[name])
    ids = torch.randint(5, 320, (2, PROMPT + NEW), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids).logits
        continued = reference.generate(ids[:1, :PROMPT], max_new_tokens=NEW, do_sample=False)
    model = quantkit.load(new)

    logits = model(ids)
    assert logits.dtype == torch.float32
    assert float((logits - expected).abs().max()) < 1e-4 * float(expected.std())
    assert greedy(model, ids[:1, :PROMPT], NEW) == continued[0, PROMPT:].tolist()
    assert torch.equal(quantkit.load(old)(ids), logits)  # the older spelling of the same config


def load_parts(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """What the streaming functions take: source, config, architecture, dtype."""
    checkpoint = open_checkpoint(path)
    return checkpoint, ModelConfig.read(checkpoint.config), catalog.find(checkpoint.config), dtype


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_block_at_a_time_is_the_whole_model(family: str, tmp_path: Path) -> None:
    source, config, architecture, dtype = load_parts(tiny.write_model(tmp_path, family, tokenizer=False))
    ids = torch.arange(5, 45).reshape(2, 20)
    hidden = load_embedding(source, config, architecture, dtype)(ids)
    rotary = Rotary.at(config.ropes, torch.arange(20)[None])
    for index in range(config.num_layers):
        hidden = load_block(source, config, architecture, index, dtype).forward(hidden, rotary)
    logits = load_head(source, config, architecture, dtype)(hidden)
    assert torch.equal(logits, quantkit.load(tmp_path)(ids))
    assert torch.equal(logits, Model.stream(source, config, architecture, dtype)(ids))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_observers_see_what_goes_through_every_linear(family: str, tmp_path: Path) -> None:
    source, config, architecture, dtype = load_parts(tiny.write_model(tmp_path, family, tokenizer=False))
    block = load_block(source, config, architecture, 0, dtype)
    seen: dict[str, torch.Tensor] = {}
    tokens: dict[str, torch.Tensor | None] = {}

    def observe(activations: Activations) -> None:
        x, outputs = activations.inputs, activations.outputs
        for name, output in zip(activations.stage.linears, outputs, strict=True):
            assert x.shape[1] == block.linears[name].in_features
            assert torch.equal(output.reshape(len(x), -1), block.linears[name](x))
            seen[name], tokens[name] = x, activations.tokens

    ids = torch.arange(5, 205).reshape(2, 100)
    hidden = load_embedding(source, config, architecture, dtype)(ids)
    rotary = Rotary.at(config.ropes, torch.arange(100)[None])
    block.forward(hidden, rotary, observe=observe)
    shown: list[Activations] = []
    block.show(hidden, rotary, shown.append)
    assert [name for activations in shown for name in activations.stage.linears] == list(seen)
    for activations in shown:
        assert all(torch.equal(activations.inputs, seen[name]) for name in activations.stage.linears)
        last = activations.stage.linears[0].endswith(("down_proj", "w2"))
        assert len(activations.outputs) == (0 if last else len(activations.stage.linears))
    quantizable = [spec.name for spec in architecture.block_linears(config, 0) if spec.quantizable]
    assert list(block.linears) == quantizable
    assert [name for stage in block.stages() for name in stage.linears] == quantizable
    assert set(seen) == set(quantizable)
    routed = [name for name in quantizable if ".experts." in name and name.endswith(("gate_proj", "w1"))]
    if routed:
        assert sum(len(seen[name]) for name in routed) == ids.numel() * config.experts.chosen
        every = torch.cat([tokens[name] for name in routed])
        assert torch.equal(every.bincount(), torch.full((ids.numel(),), config.experts.chosen))
        attended = hidden + block.attention(block.before_attention(hidden), rotary, None, None)
        fed = block.before_mlp(attended).flatten(0, 1)
        assert all(torch.equal(seen[name], fed[tokens[name]]) for name in routed)
    assert all(tokens[name] is None for name in set(quantizable) if ".experts." not in name)
    assert all(len(seen[name]) == ids.numel() for name in set(quantizable) if ".experts." not in name)


def test_an_expert_that_no_token_reaches_is_not_run(tmp_path: Path) -> None:
    """The logit of expert 3 is the mean of the others', so it is never the highest."""
    config = tiny.make_config("MixtralForCausalLM", num_experts_per_tok=1)
    tensors = tiny.make_tensors(config, 0, torch.float32)
    for layer in range(2):
        router = tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
        router[3] = router[:3].mean(dim=0)
    tiny.write_model(tmp_path / "old", "MixtralForCausalLM", tokenizer=False, num_experts_per_tok=1)
    tiny.write_tensors(tmp_path / "old", tensors)
    source, sizes, architecture, dtype = load_parts(tmp_path / "old")
    ids = torch.arange(5, 105).reshape(2, 50)
    stages = []
    hidden = load_embedding(source, sizes, architecture, dtype)(ids)
    rotary = Rotary.at(sizes.ropes, torch.arange(50)[None])
    load_block(source, sizes, architecture, 0, dtype).forward(hidden, rotary, observe=lambda seen: stages.append(seen.stage))
    names = {stage.name for stage in stages}
    assert any(".experts.2." in name for name in names)
    assert not any(".experts.3." in name for name in names)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "old", dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(ids).logits
    assert float((quantkit.load(tmp_path / "old")(ids) - expected).abs().max()) < 1e-4 * float(expected.std())


@pytest.mark.parametrize("name", ["LlamaForCausalLM-dynamic", "Phi3ForCausalLM-longrope", "gemma2-low-caps", "mistral-window"])
def test_a_prompt_in_pieces_is_the_prompt_at_once(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = quantkit.load(tiny.write_model(tmp_path, case.family, tokenizer=False, **case.overrides))
    ids = torch.randint(5, 320, (2, 60), generator=torch.Generator().manual_seed(2))
    cache = KVCache(model.config, 2, 60, torch.float32)
    pieces = [model(part, cache=cache, length=60) for part in ids.split([7, 1, 30, 22], dim=1)]
    whole = model(ids)
    assert cache.length == 60
    assert torch.allclose(torch.cat(pieces, dim=1), whole, atol=1e-5)
    last = model(ids, last_only=True)
    assert last.shape == (2, 1, 320)
    assert torch.allclose(last, whole[:, -1:], atol=1e-6)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_a_row_does_not_depend_on_longer_rows_beside_it(rope: str, tmp_path: Path) -> None:
    model = quantkit.load(tiny.write_model(tmp_path, tokenizer=False, **ROPES[rope]))
    ids = torch.randint(5, 320, (2, 30), generator=torch.Generator().manual_seed(3))
    near, far = torch.arange(30), torch.arange(100, 130)
    together = model(ids, positions=torch.stack((near, far)))
    assert torch.allclose(together[:1], model(ids[:1], positions=near[None]), atol=1e-6)
    assert torch.allclose(together[1:], model(ids[1:], positions=far[None]), atol=1e-6)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bf16_stays_close_to_fp32(family: str, tmp_path: Path) -> None:
    """Rounding to 8 bits costs 1 % of the spread, 6 % where it moves a token to another expert."""
    tiny.write_model(tmp_path, family, dtype="bfloat16", tokenizer=False)
    ids = torch.arange(5, 45).reshape(2, 20)
    exact = quantkit.load(tmp_path)(ids)
    model = quantkit.load(tmp_path, dtype="bf16")
    cache = KVCache(model.config, 2, 20, torch.bfloat16)
    logits = model(ids, cache=cache)
    assert logits.dtype == torch.float32
    assert float((logits - exact).pow(2).mean().sqrt()) < 0.1 * float(exact.std())


def test_the_residual_stream_may_outgrow_fp16(tmp_path: Path) -> None:
    """Each down projection adds tens of thousands; their sum passes 65504 and stays finite."""
    config = tiny.make_config("LlamaForCausalLM", num_hidden_layers=12)
    tensors = tiny.make_tensors(config, 0, torch.float16)
    for layer in range(12):
        down = tensors[f"model.layers.{layer}.mlp.down_proj.weight"]
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] = down * 8000
    tiny.write_model(tmp_path, dtype="float16", tokenizer=False, num_hidden_layers=12)
    tiny.write_tensors(tmp_path, tensors)
    ids = torch.arange(5, 21).reshape(1, 16)
    source, sizes, architecture, dtype = load_parts(tmp_path, torch.float16)
    hidden = load_embedding(source, sizes, architecture, dtype)(ids)
    rotary = Rotary.at(sizes.ropes, torch.arange(16)[None])
    for index in range(12):
        hidden = load_block(source, sizes, architecture, index, dtype).forward(hidden, rotary)
    assert hidden.dtype == torch.float32
    assert 65504 < float(hidden.abs().max()) < float("inf")
    logits = quantkit.load(tmp_path, dtype="fp16")(ids)
    exact = quantkit.load(tmp_path)(ids)
    assert float((logits - exact).pow(2).mean().sqrt()) < 0.05 * float(exact.std())


def test_token_ids_are_checked(tmp_path: Path) -> None:
    model = quantkit.load(tiny.write_model(tmp_path, tokenizer=False))
    for wrong in (320, -1):
        with pytest.raises(RequestError, match=f"token id {wrong} is outside the model's vocabulary of 320"):
            model(torch.tensor([[5, wrong]]))
    with pytest.raises(RequestError, match=r"expected token ids of shape \[batch, positions\], found \[3\]"):
        model(torch.tensor([5, 6, 7]))
