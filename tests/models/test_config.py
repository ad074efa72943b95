import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from quantkit.errors import CheckpointError, QuantkitError, UnsupportedModel
from quantkit.models.config import NEUTRAL, ModelConfig


def read(family: str = "LlamaForCausalLM", **overrides: Any) -> ModelConfig:
    return ModelConfig.read(tiny.make_config(family, **overrides))


def refusal(family: str = "LlamaForCausalLM", **overrides: Any) -> QuantkitError:
    with pytest.raises(QuantkitError) as caught:
        read(family, **overrides)
    return caught.value


def test_numbers_of_a_plain_config() -> None:
    config = read()
    assert (config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size) == (2, 64, 128, 320)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_positions) == (4, 2, 16, 2048)
    assert (config.norm_eps, config.activation, config.tie_embeddings, config.dtype) == (1e-6, "silu", False, "float32")
    assert (config.attention_scale, config.embedding_scale) == (0.25, 1.0)
    assert config.biased == frozenset()
    assert config.windows == (None, None)
    assert config.experts is None


def test_absent_keys_that_have_one_meaning() -> None:
    config = read(num_key_value_heads=tiny.ABSENT, tie_word_embeddings=tiny.ABSENT, rope_theta=tiny.ABSENT)
    assert (config.num_kv_heads, config.tie_embeddings, config.ropes[0].theta) == (4, False, 10000.0)
    assert read("Gemma2ForCausalLM", tie_word_embeddings=tiny.ABSENT).tie_embeddings
    assert read("MixtralForCausalLM", rope_theta=tiny.ABSENT).ropes[0].theta == 1e6
    assert read(architectures=tiny.ABSENT) == read()


REQUIRED = [
    ("LlamaForCausalLM", "hidden_size"),
    ("LlamaForCausalLM", "num_hidden_layers"),
    ("LlamaForCausalLM", "num_attention_heads"),
    ("LlamaForCausalLM", "intermediate_size"),
    ("LlamaForCausalLM", "vocab_size"),
    ("LlamaForCausalLM", "rms_norm_eps"),
    ("LlamaForCausalLM", "max_position_embeddings"),
    ("LlamaForCausalLM", "hidden_act"),
    ("MistralForCausalLM", "sliding_window"),
    ("Gemma2ForCausalLM", "hidden_activation"),
    ("Gemma2ForCausalLM", "query_pre_attn_scalar"),
    ("Gemma2ForCausalLM", "attn_logit_softcapping"),
    ("Gemma2ForCausalLM", "final_logit_softcapping"),
    ("Gemma2ForCausalLM", "sliding_window"),
    ("MixtralForCausalLM", "num_experts_per_tok"),
    ("Qwen2MoeForCausalLM", "norm_topk_prob"),
    ("Qwen2MoeForCausalLM", "shared_expert_intermediate_size"),
    ("Qwen3MoeForCausalLM", "moe_intermediate_size"),
]


@pytest.mark.parametrize(("family", "key"), REQUIRED)
def test_a_missing_key_is_named_with_its_file(family: str, key: str) -> None:
    config = tiny.make_config(family, **{key: tiny.ABSENT})
    with pytest.raises(CheckpointError, match=f"`{key}` is missing in `models/x/config.json`") as caught:
        ModelConfig.read(config, "models/x/config.json")
    assert f"add `{key}`" in caught.value.hint


UNUSABLE = [
    ("LlamaForCausalLM", {"hidden_size": "64"}, "`hidden_size` is '64' in `config.json`: expected a positive integer"),
    ("LlamaForCausalLM", {"num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
    ("LlamaForCausalLM", {"vocab_size": True}, "`vocab_size` is True"),
    ("LlamaForCausalLM", {"rms_norm_eps": -1.0}, "`rms_norm_eps` is -1.0"),
    ("LlamaForCausalLM", {"tie_word_embeddings": "no"}, "`tie_word_embeddings` is 'no'"),
    ("LlamaForCausalLM", {"num_key_value_heads": 3}, "`num_key_value_heads` is 3 in `config.json`: 4 query heads"),
    ("LlamaForCausalLM", {"hidden_size": 66}, "`hidden_size` is 66"),
    ("LlamaForCausalLM", {"hidden_act": "mish"}, "`hidden_act` is 'mish' in `config.json`: supported are silu"),
    ("LlamaForCausalLM", {"head_dim": 15}, "15 of 15 elements of a head would rotate"),
    ("MixtralForCausalLM", {"num_experts_per_tok": 5}, "`num_experts_per_tok` is 5 in `config.json`: there are only 4"),
    ("Qwen3MoeForCausalLM", {"num_local_experts": 8}, "`num_experts` is 4 in `config.json`: `num_local_experts` is 8"),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": 1}, "`mlp_only_layers` is 1"),
    ("MistralForCausalLM", {"sliding_window": 0}, "`sliding_window` is 0"),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": None}, "`sliding_window` is missing"),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["linear_attention"] * 2}, "`layer_types`"),
    ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention", "full_attention"]}, "`layer_types`"),
    ("MistralForCausalLM", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, "`layer_types`"),
    ("LlamaForCausalLM", {"layer_types": ["full_attention"]}, "expected 2 times `full_attention` or `sliding_attention`"),
    ("MistralForCausalLM", {"attention_bias": True}, "`attention_bias` is True in `config.json`: this model family"),
    ("Qwen2ForCausalLM", {"mlp_bias": True}, "`mlp_bias` is True"),
    ("LlamaForCausalLM", {"sliding_window": 4096}, "`sliding_window` is 4096"),
    ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "`use_bidirectional_attention` is True"),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` is 50.0"),
    ("LlamaForCausalLM", {"logit_scale": 0.5}, "`logit_scale` is 0.5"),
    ("LlamaForCausalLM", {"num_local_experts": 8}, "`num_local_experts` is 8"),
    ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5"),
    ("Phi3ForCausalLM", {"lm_head_bias": True}, "`lm_head_bias` is True"),
    ("LlamaForCausalLM", {"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000"),
    ("Qwen3MoeForCausalLM", {"num_experts": 10**9}, "`num_experts` is 1000000000"),
    ("LlamaForCausalLM", {"text_config": {"hidden_size": 64}}, "`text_config` in `config.json`"),
]


@pytest.mark.parametrize(("family", "overrides", "message"), UNUSABLE)
def test_a_value_that_cannot_be_honoured_is_named(family: str, overrides: dict[str, Any], message: str) -> None:
    error = refusal(family, **overrides)
    assert message in str(error)
    assert error.hint


@pytest.mark.parametrize("key", NEUTRAL)
def test_every_key_of_other_models_is_refused_unless_it_changes_nothing(key: str) -> None:
    if key not in ("attention_bias", "mlp_bias"):  # Llama has these two
        assert isinstance(refusal(**{key: "strange"}), UnsupportedModel)
    for harmless in (*NEUTRAL[key], None):
        assert read(**{key: harmless}) == read()


def test_either_name_of_the_number_of_experts() -> None:
    renamed = read("Qwen3MoeForCausalLM", num_experts=tiny.ABSENT, num_local_experts=4)
    assert renamed == read("Qwen3MoeForCausalLM")


def test_other_keys_are_no_concern_of_the_model() -> None:
    config = tiny.make_config("LlamaForCausalLM") | {"auto_map": {"AutoModel": "x"}, "pretraining_tp": 2, "comment": "x"}
    assert ModelConfig.read(config) == read()


def test_biases_scales_and_caps() -> None:
    assert read(attention_bias=True).biased == {"q", "k", "v", "o"}
    assert read(mlp_bias=True).biased == {"gate", "up", "down"}
    assert read("Qwen2ForCausalLM").biased == {"q", "k", "v"}
    assert read("Qwen2MoeForCausalLM", qkv_bias=False).biased == frozenset()
    gemma = read("Gemma2ForCausalLM")
    assert (gemma.attention_scale, gemma.embedding_scale) == (24**-0.5, 8.0)
    assert (gemma.attention_cap, gemma.logit_cap) == (20.0, 10.0)
    assert read("Gemma2ForCausalLM", attn_logit_softcapping=None).attention_cap is None


def test_windows_as_each_family_means_them() -> None:
    on = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 6, "max_window_layers": 4}
    assert read("MistralForCausalLM", sliding_window=8).windows == (8, 8)
    assert read("Qwen2ForCausalLM", **on).windows == (None, None, None, None, 8, 8)
    assert read("Qwen2ForCausalLM", **on | {"use_sliding_window": False}).windows == (None,) * 6
    assert read("Qwen3ForCausalLM", **on | {"max_window_layers": 0}).windows == (8,) * 6
    assert read("Qwen2MoeForCausalLM", **on).windows == (8, None, 8, None, None, None)
    assert read("Qwen3MoeForCausalLM", **on).windows == (8,) * 6
    assert read("Gemma2ForCausalLM", num_hidden_layers=3).windows == (16, None, 16)
    assert read("Gemma3ForCausalLM", num_hidden_layers=5, sliding_window_pattern=3).windows == (16, 16, None, 16, 16)
    default = read("Gemma3ForCausalLM", num_hidden_layers=7, sliding_window_pattern=tiny.ABSENT)
    assert default.windows == (16,) * 5 + (None, 16)
    stated = ["full_attention", "sliding_attention"]
    assert read("Gemma3ForCausalLM", layer_types=stated).windows == (None, 16)


def test_which_layers_are_mixtures() -> None:
    layers = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    experts = read("Qwen2MoeForCausalLM", **layers).experts
    assert experts is not None
    assert experts.layers == (False, False, False, True)
    assert (experts.count, experts.chosen, experts.width, experts.shared_width, experts.normalise) == (4, 2, 64, 96, False)
    mixtral = read("MixtralForCausalLM").experts
    assert mixtral is not None
    assert (mixtral.layers, mixtral.width, mixtral.shared_width, mixtral.normalise) == ((True, True), 128, 0, True)


def test_a_config_survives_json(tmp_path: Path) -> None:
    """Reading goes by values alone: nothing depends on how the dictionary came about."""
    path = tiny.write_model(tmp_path, "Qwen3MoeForCausalLM", tokenizer=False)
    assert ModelConfig.read(json.loads((path / "config.json").read_text())) == read("Qwen3MoeForCausalLM")
