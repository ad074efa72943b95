"""Families, metadata and tensor names: what has a place is put there, what has none is refused by name."""

import math

import numpy as np
import pytest
import tiny_gguf
import torch

from quantkit.checkpoint import gguf_model
from quantkit.checkpoint.gguf import open_gguf
from quantkit.errors import CheckpointError, UnsupportedModel

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# What the tiny models leave at the value that also holds when config.json does not say it.
DEFAULTS = {
    "attention_bias": False, "mlp_bias": False, "initializer_range": 0.02, "use_sliding_window": False, "sliding_window": None,
    "max_window_layers": 28, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def describe(path):
    with open_gguf(path) as file:
        return gguf_model.describe(file)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_config_and_names_of_every_family(family, tied, tmp_path) -> None:
    window = {"sliding_window": 16} if family == "MistralForCausalLM" else {}
    tiny = tiny_gguf.write_model(tmp_path / "x.gguf", family, tie_word_embeddings=tied, rope_theta=12345.0, **window)
    model = describe(tiny.path)
    assert model.architecture == family
    for key, value in tiny.config.items():
        if key not in ("torch_dtype", *DEFAULTS) or key in window:
            assert model.config[key] == value, key
        elif key in DEFAULTS:
            assert value == DEFAULTS[key] or key in window, f"the import would lose `{key}`"
    assert model.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 12345.0}
    assert {placement.target: placement.shape for placement in model.placements} == {
        name: tuple(tensor.shape) for name, tensor in tiny.tensors.items()
    }


def test_every_family_is_tested() -> None:
    entries = {family.architecture for table in (gguf_model.FAMILIES, gguf_model.WINDOWED) for family in table.values()}
    assert entries == set(FAMILIES)


@pytest.mark.parametrize(("heads", "head_dim", "columns"), [(1, 2, 3), (3, 8, 5), (4, 6, 0)])
def test_unpermute_undoes_rotary_pairs(heads, head_dim, columns) -> None:
    shape = (heads * head_dim, columns) if columns else (heads * head_dim,)
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    stored = torch.from_numpy(tiny_gguf.to_pairs(weight, heads))
    assert torch.equal(gguf_model.unpermute(stored, heads), torch.from_numpy(weight))


def test_permutation_keeps_the_rotated_products() -> None:
    """The reason for it: neighbours turned by llama.cpp's rule give the scores that halves turned by the other give."""
    head_dim, position = 8, 5
    q, k = torch.randn((2, head_dim), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    angles = position * 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def turn_pairs(x):
        even, odd = x[0::2], x[1::2]
        return torch.stack([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], 1).flatten()

    def turn_halves(x):
        first, second = x.chunk(2)
        return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()])

    halves = turn_halves(gguf_model.unpermute(q, 1)) @ gguf_model.unpermute(k, 1)
    assert math.isclose(turn_pairs(q) @ k, halves, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("values", "scaling"),
    [
        ({}, None),
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, None),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 512,
                "llama.rope.scaling.finetuned": True,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
    ],
)
def test_rope_scaling_in_both_spellings(values, scaling, tmp_path) -> None:
    config = describe(tiny_gguf.write_model(tmp_path / "x.gguf", values=values).path).config
    assert config["rope_scaling"] == scaling
    assert config["rope_parameters"] == {"rope_type": "default", **(scaling or {}), "rope_theta": config["rope_theta"]}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_from_its_divisors(factor, tmp_path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shape = {"hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1, "rope_theta": 500000.0}
    tiny = tiny_gguf.write_model(tmp_path / "x.gguf", rope_scaling=scaling, **shape)
    between = set(tiny_gguf.llama3_divisors(tiny.config).tolist()) - {1.0, factor}
    assert len(between) > 3
    assert describe(tiny.path).config["rope_scaling"] == scaling


@pytest.mark.parametrize(("key", "value"), [("low_freq_factor", 2.0), ("original_max_position_embeddings", 4096)])
def test_llama3_scaling_of_other_constants_is_refused(key, value, tmp_path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, key: value}
    shape = {"hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1, "rope_theta": 500000.0}
    path = tiny_gguf.write_model(tmp_path / "x.gguf", rope_scaling=scaling, **shape).path
    with pytest.raises(UnsupportedModel, match=r"not the scaling of Llama 3\.1"):
        describe(path)


def test_divisors_of_one_scale_nothing(tmp_path) -> None:
    ones = {"rope_freqs.weight": (np.ones(8, np.float32), "F32")}
    assert describe(tiny_gguf.write_model(tmp_path / "x.gguf", extra=ones).path).config["rope_scaling"] is None


def test_one_number_for_each_block_is_taken_when_all_agree(tmp_path) -> None:
    values = {"llama.attention.head_count": [4, 4], "llama.feed_forward_length": [128, 128]}
    config = describe(tiny_gguf.write_model(tmp_path / "x.gguf", values=values).path).config
    assert (config["num_attention_heads"], config["intermediate_size"]) == (4, 128)


REFUSED = {
    "architecture": ({"values": {"general.architecture": "deepseek2"}}, UnsupportedModel, "`deepseek2`, expected one of llama, qwen2, qwen3"),
    "unread": ({"values": {"llama.logit_scale": 0.5}}, UnsupportedModel, "`llama.logit_scale` = `0.5` cannot be honoured"),
    "experts": ({"values": {"llama.expert_count": 8}}, UnsupportedModel, "`llama.expert_count` = `8` cannot be honoured"),
    "rope type": ({"values": {"llama.rope.scaling.type": "longrope"}}, UnsupportedModel, "`longrope` cannot be honoured"),
    "partial rotation": ({"values": {"llama.rope.dimension_count": 8}}, UnsupportedModel, "`llama.rope.dimension_count` = `8`"),
    "value heads": ({"values": {"llama.attention.value_length": 32}}, UnsupportedModel, "`llama.attention.value_length` = `32`"),
    "window": ({"family": "Qwen2ForCausalLM", "values": {"qwen2.attention.sliding_window": 8}}, UnsupportedModel, "`qwen2.attention.sliding_window`"),
    "heads by block": ({"values": {"llama.attention.head_count": [4, 2]}}, UnsupportedModel, "differs between blocks"),
    "divisors": ({"extra": {"rope_freqs.weight": (np.linspace(1, 9, 8, dtype=np.float32), "F32")}}, UnsupportedModel, "not the scaling of Llama 3.1"),
    "divisor shape": ({"extra": {"rope_freqs.weight": (np.ones(4, np.float32), "F32")}}, CheckpointError, "has shape [4], expected [8]"),
    "scaled twice": (
        {"values": {"llama.rope.scaling.type": "linear"}, "extra": {"rope_freqs.weight": (np.ones(8, np.float32), "F32")}},
        UnsupportedModel,
        "`llama.rope.scaling.type` `linear` and `rope_freqs.weight`",
    ),
    "unplaced": ({"extra": {"blk.0.attn_q.bias": (np.ones(64, np.float32), "F32")}}, UnsupportedModel, "`blk.0.attn_q.bias` of"),
    "missing key": ({"values": {"llama.block_count": None}}, CheckpointError, "has no metadata `llama.block_count`"),
    "missing tensor": ({"drop": "blk.1.ffn_up.weight"}, CheckpointError, "has no tensor `blk.1.ffn_up.weight`, which LlamaForCausalLM needs"),
    "missing embedding": ({"drop": "token_embd.weight"}, CheckpointError, "has no tensor `token_embd.weight`"),
    "missing block": ({"values": {"llama.block_count": 3}}, CheckpointError, "has no tensor `blk.2.attn_norm.weight`"),
    "many blocks": ({"values": {"llama.block_count": 2**32 - 1}}, CheckpointError, "announces 4294967295 blocks, but has 21 tensors"),
    "shape": ({"values": {"llama.feed_forward_length": 96}}, CheckpointError, "has shape [128, 64], expected [96, 64]"),
    "zero": ({"values": {"llama.attention.head_count": 0}}, CheckpointError, "x.gguf` is 0, expected at least 1"),
    "odd heads": ({"values": {"llama.attention.key_length": 15}}, CheckpointError, "heads of size 15, expected an even size"),
    "mistyped": ({"values": {"llama.block_count": "two"}}, CheckpointError, "is a str, expected a int"),
    "theta": ({"values": {"llama.rope.freq_base": math.nan}}, CheckpointError, "is nan, expected a positive number"),
    "eps": ({"values": {"llama.attention.layer_norm_rms_epsilon": -1.0}}, CheckpointError, "is -1.0, expected a positive number"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_place_is_refused_by_name(kind, tmp_path) -> None:
    arguments, error_class, message = REFUSED[kind]
    path = tiny_gguf.write_model(tmp_path / "x.gguf", **arguments).path
    with pytest.raises(error_class) as error:
        describe(path)
    assert message in error.value.message
    assert error.value.hint
