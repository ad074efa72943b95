import math
from typing import Any

import pytest
import tiny

from quantkit.errors import QuantkitError
from quantkit.models.config import ModelConfig
from quantkit.models.rope import DynamicRope, LinearRope, Llama3Rope, LongRope, Rope, YarnRope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def ropes(family: str = "LlamaForCausalLM", **overrides: Any) -> tuple[Rope, ...]:
    return ModelConfig.read(tiny.make_config(family, **overrides)).ropes


def rope(family: str = "LlamaForCausalLM", **overrides: Any) -> Rope:
    first, *others = ropes(family, **overrides)
    assert all(other == first for other in others)
    return first


SPELLINGS = [
    ({"type": "linear", "factor": 2.0}, LinearRope(500.0, 16, 2.0)),
    ({"type": "dynamic", "factor": 2}, DynamicRope(500.0, 16, 2.0, 2048)),
    ({"type": "llama3", **LLAMA3}, Llama3Rope(500.0, 16, 8.0, 1.0, 4.0, 64)),
    ({"type": "yarn", "factor": 4.0, "finetuned": True}, YarnRope(500.0, 16, 4.0, 2048, 0.1 * math.log(4) + 1, 32, 1, True)),
    ({"type": "longrope", "factor": 1.0, **LONG}, LongRope(500.0, 16, (1.0,) * 8, (2.0,) * 8, 2048, 1.0, False)),
    ({"type": "default"}, Rope(500.0, 16)),
]


@pytest.mark.parametrize(("stated", "expected"), SPELLINGS)
def test_all_spellings_of_one_rope(stated: dict[str, Any], expected: Rope) -> None:
    renamed = {"rope_type" if key == "type" else key: value for key, value in stated.items()}
    assert rope(rope_theta=500.0, rope_scaling=stated) == expected
    assert rope(rope_theta=500.0, rope_scaling=renamed) == expected
    assert rope(rope_theta=500.0, rope_scaling=renamed | stated) == expected
    assert rope(rope_parameters=renamed | {"rope_theta": 500.0}) == expected
    both = tiny.make_config("LlamaForCausalLM", rope_theta=500.0, rope_scaling=stated)
    assert ModelConfig.read(both | {"rope_parameters": renamed | {"rope_theta": 500.0}}).ropes[0] == expected


def test_yarn_with_all_it_may_say() -> None:
    stated = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 2.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    }
    scores = (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert rope(rope_scaling=stated) == YarnRope(10000.0, 16, 4.0, 64, scores, 16.0, 2.0, False)
    assert rope(rope_scaling=stated | {"attention_factor": 1.5}).table_factor == 1.5


def test_phi3_states_its_pretraining_beside_the_rope() -> None:
    sizes = {"original_max_position_embeddings": 64, "max_position_embeddings": 256}
    expected = LongRope(10000.0, 16, (1.0,) * 8, (2.0,) * 8, 64, math.sqrt(1 + math.log(4) / math.log(64)), True)
    for kind in ("longrope", "su", "yarn"):
        assert rope("Phi3ForCausalLM", rope_scaling={"type": kind, **LONG}, **sizes) == expected
    assert rope("Phi3ForCausalLM", partial_rotary_factor=0.75) == Rope(10000.0, 12)


def test_gemma3_has_one_rope_for_each_layer_type() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    expected = (Rope(10000.0, 32), LinearRope(1e6, 32, 8.0))
    assert ropes("Gemma3ForCausalLM", rope_scaling=linear) == expected
    nested = {"full_attention": linear | {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}
    assert ropes("Gemma3ForCausalLM", rope_parameters=nested) == expected
    assert ropes("Gemma3ForCausalLM", rope_parameters={"full_attention": linear}) == expected
    nested["sliding_attention"] = {"rope_type": "default", "rope_theta": 300.0}
    assert ropes("Gemma3ForCausalLM", rope_parameters=nested) == (Rope(300.0, 32), expected[1])


REFUSED = [
    ({"rope_scaling": {"rope_type": "spiral"}}, "unknown rope type `spiral` (`rope_type` in `config.json: rope_scaling`)"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "unknown rope type `mrope` (`type` in"),
    ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, "`type` is 'mrope'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, "`beta_fast` is 32"),
    ({"rope_scaling": {"type": "linear"}}, "`factor` is missing in `config.json: rope_scaling`"),
    ({"rope_scaling": {"type": "yarn", "factor": 0}}, "`factor` is 0"),
    ({"rope_scaling": {"factor": 4.0}}, "`factor` is 4.0 in `config.json: rope_scaling`: rope type `default` has no"),
    ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "`high_freq_factor` is 1.0"),
    ({"rope_scaling": {"type": "longrope", **LONG, "short_factor": [1.0]}}, "expected a list of 8 positive numbers"),
    ({"rope_scaling": {"type": "default", "rope_theta": 5.0}}, "`rope_theta` is 5.0"),
    ({"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, "`partial_rotary_factor` is 0.5"),
    ({"rope_scaling": [1]}, "`rope_scaling` is [1] in `config.json`: expected an object"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "`full_attention`"),
    (
        {"rope_scaling": {"type": "yarn", **LLAMA3}, "original_max_position_embeddings": 32},
        "`low_freq_factor` is 1.0",
    ),
    (
        {"rope_scaling": {"type": "llama3", **LLAMA3}, "original_max_position_embeddings": 32},
        "`original_max_position_embeddings` is 64",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_cannot_be_honoured_is_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantkitError) as caught:
        rope(**overrides)
    assert message in str(caught.value)


def test_two_ropes_for_one_model_are_refused() -> None:
    config = tiny.make_config("LlamaForCausalLM", rope_scaling={"type": "linear", "factor": 2.0})
    config["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    with pytest.raises(QuantkitError, match="`rope_parameters` says something else"):
        ModelConfig.read(config)
    flat = tiny.make_config("Gemma3ForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    with pytest.raises(QuantkitError, match="one rope for `full_attention` and one for `sliding_attention`"):
        ModelConfig.read(flat)


def test_how_far_a_rope_reaches() -> None:
    """Extended models state the length of the pretraining and the factor, Gemma 3 and Llama 3.1 the final length."""

    def context(family: str = "LlamaForCausalLM", **overrides: Any) -> int:
        return ModelConfig.read(tiny.make_config(family, max_position_embeddings=100, **overrides)).context

    assert context() == 100
    assert context(rope_scaling={"type": "linear", "factor": 2.5}) == 250
    assert context(rope_scaling={"type": "dynamic", "factor": 2.0}) == 200
    assert context(rope_scaling={"type": "yarn", "factor": 4.0}) == 400
    assert context(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 25}) == 100
    assert context(rope_scaling={"type": "llama3", **LLAMA3}) == 100
    assert context(rope_scaling={"type": "longrope", "factor": 4.0, **LONG}) == 100
    assert context("Gemma3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 8.0}) == 100
