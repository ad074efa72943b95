"""The catalog against the second statement of every family in tiny.py, and against config.json of each."""

import pytest
import tiny

from quantkit.errors import UnsupportedModel
from quantkit.models import catalog
from quantkit.models.architecture import Architecture, by_stage
from quantkit.models.config import ModelConfig

VARIANTS = [
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("Gemma2ForCausalLM", {"attention_bias": True, "tie_word_embeddings": False}),
    ("Qwen3ForCausalLM", {"attention_bias": True, "head_dim": 48}),
    ("Qwen2MoeForCausalLM", {"decoder_sparse_step": 2, "qkv_bias": False}),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0], "num_experts": 3}),
    *((family, {}) for family in tiny.FAMILIES),
]


def described(family: str, **overrides: object) -> tuple[Architecture, ModelConfig]:
    config = tiny.make_config(family, **overrides)
    return catalog.find(config), ModelConfig.read(config)


def test_tiny_has_every_family() -> None:
    assert list(tiny.FAMILIES) == list(catalog.FAMILIES)
    assert set(catalog.MODEL_TYPES.values()) == set(catalog.FAMILIES)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_names_and_shapes_of_every_tensor(family: str, overrides: dict[str, object]) -> None:
    architecture, config = described(family, **overrides)
    expected = {name: shape for name, shape, _ in tiny.tensor_list(tiny.make_config(family, **overrides))}
    assert architecture.tensors(config) == expected


def test_linears_run_in_order_and_routers_stay_as_they_are() -> None:
    architecture, config = described("Qwen2MoeForCausalLM", num_experts=2, num_hidden_layers=1)
    block = "model.layers.0."
    specs = architecture.linears(config)
    assert [(spec.name.removeprefix(block), spec.role) for spec in specs] == [
        ("self_attn.q_proj", "q"),
        ("self_attn.k_proj", "k"),
        ("self_attn.v_proj", "v"),
        ("self_attn.o_proj", "o"),
        ("mlp.gate", "router"),
        ("mlp.experts.0.gate_proj", "gate"),
        ("mlp.experts.0.up_proj", "up"),
        ("mlp.experts.0.down_proj", "down"),
        ("mlp.experts.1.gate_proj", "gate"),
        ("mlp.experts.1.up_proj", "up"),
        ("mlp.experts.1.down_proj", "down"),
        ("mlp.shared_expert.gate_proj", "gate"),
        ("mlp.shared_expert.up_proj", "up"),
        ("mlp.shared_expert.down_proj", "down"),
        ("mlp.shared_expert_gate", "router"),
    ]
    kept = [spec.name.removeprefix(block) for spec in specs if not spec.quantizable]
    assert kept == ["mlp.gate", "mlp.shared_expert_gate"]
    assert [group[0].stage.removeprefix(block) for group in by_stage(specs)] == [
        "self_attn.q_k_v",
        "self_attn.o",
        "mlp.experts.0.gate_up",
        "mlp.experts.0.down",
        "mlp.experts.1.gate_up",
        "mlp.experts.1.down",
        "mlp.shared_expert.gate_up",
        "mlp.shared_expert.down",
    ]


def test_fused_linears_are_one_with_several_roles() -> None:
    architecture, config = described("Phi3ForCausalLM")
    qkv, _, gate_up, _ = architecture.block_linears(config, 1)
    assert (qkv.name, qkv.roles, qkv.widths) == ("model.layers.1.self_attn.qkv_proj", ("q", "k", "v"), (64, 32, 32))
    assert (qkv.role, qkv.out_features, qkv.in_features) == ("q+k+v", 128, 64)
    assert (gate_up.name, gate_up.role, gate_up.widths) == ("model.layers.1.mlp.gate_up_proj", "gate+up", (128, 128))
    assert by_stage([qkv, gate_up]) == [[qkv], [gate_up]]


@pytest.mark.parametrize(("model_type", "family"), catalog.MODEL_TYPES.items())
def test_either_key_finds_the_family(model_type: str, family: str) -> None:
    assert catalog.find({"model_type": model_type}) is catalog.FAMILIES[family]
    assert catalog.find({"architectures": [family]}) is catalog.FAMILIES[family]
    assert catalog.find({"architectures": [family], "model_type": model_type}) is catalog.FAMILIES[family]


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    for config, shown in (
        ({"architectures": ["FalconForCausalLM"]}, "`FalconForCausalLM`"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "`LlamaForCausalLM`, `Other`"),
        ({"model_type": "falcon"}, "model type `falcon`"),
        ({"model_type": ["llama"]}, "model type `['llama']`"),
        ({}, "model type `None`"),
    ):
        with pytest.raises(UnsupportedModel) as caught:
            catalog.find(config, "m/config.json")
        assert str(caught.value) == f"unknown architecture {shown} in `m/config.json`"
        assert all(family in caught.value.hint for family in catalog.FAMILIES)


@pytest.mark.parametrize("names", ["LlamaForCausalLM", {"LlamaForCausalLM": 1}, [1], [["LlamaForCausalLM"]]])
def test_architectures_that_are_no_list_of_names_are_refused(names: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"`architectures` in `m/config\.json` is no list of names") as caught:
        catalog.find({"architectures": names}, "m/config.json")
    assert caught.value.hint


def test_two_families_in_one_config_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="they name two families"):
        catalog.find({"architectures": ["LlamaForCausalLM"], "model_type": "gemma2"})


def test_the_multimodal_gemma_says_what_to_do() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        catalog.find({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"})
    assert "Gemma3ForCausalLM" in caught.value.hint
