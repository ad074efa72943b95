"""The catalog: every supported family, one small entry each, and how a config finds its own.

To add a family: write its entry as the differences from Llama, give its `model_type`, add it to `tests/tiny.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantkit.errors import UnsupportedModel
from quantkit.models import windows
from quantkit.models.architecture import Architecture, Experts

QKV = ("q", "k", "v")
GATE_UP = ("gate", "up")
ATTENTION_BIAS = {"attention_bias": (*QKV, "o")}

GEMMA2 = Architecture(
    windows=windows.alternate,
    bias_keys=ATTENTION_BIAS,
    norm_offset=1.0,
    activation_key="hidden_activation",
    scale_embedding=True,
    post_norms=True,
    attention_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
    query_scalar=True,
    tied=True,
)
FAMILIES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(bias_keys={**ATTENTION_BIAS, "mlp_bias": (*GATE_UP, "down")}),
    "MistralForCausalLM": Architecture(windows=windows.everywhere),
    "Qwen2ForCausalLM": Architecture(windows=windows.upper_layers, bias=QKV),
    "Qwen3ForCausalLM": Architecture(windows=windows.upper_layers, bias_keys=ATTENTION_BIAS, head_norms=True),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": replace(
        GEMMA2,
        windows=windows.all_but_each_nth,
        head_norms=True,
        attention_cap=None,
        rope_theta=1_000_000.0,
        local_rope=True,
    ),
    "Phi3ForCausalLM": Architecture(
        windows=windows.everywhere,
        fused={"qkv_proj": QKV, "gate_up_proj": GATE_UP},
        partial_rotary=True,
        long_restart=True,
    ),
    "MixtralForCausalLM": Architecture(
        windows=windows.everywhere,
        rope_theta=1_000_000.0,
        experts=Experts(
            router="block_sparse_moe.gate",
            prefix="block_sparse_moe.experts",
            names=("w1", "w3", "w2"),
            width_key="intermediate_size",
            always=True,
        ),
    ),
    "Qwen2MoeForCausalLM": Architecture(
        windows=windows.even_lower_layers,
        bias_keys={"qkv_bias": QKV},
        bias_default=True,
        experts=Experts(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        windows=windows.everywhere_if_used, bias_keys=ATTENTION_BIAS, head_norms=True, experts=Experts()
    ),
}

MODEL_TYPES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def find(config: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """The family of a config.json, by `architectures`, or by `model_type` where that is absent.

    Raises UnsupportedModel for a family without an entry, and where the two keys disagree.
    """
    model_type: Any = config.get("model_type")
    names = config.get("architectures")
    if not names:
        if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
            raise _unknown(f"model type `{model_type}`", where)
        return FAMILIES[MODEL_TYPES[model_type]]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModel(
            f"`architectures` in `{where}` is no list of names",
            hint='write it as a list of one name: `"architectures": ["LlamaForCausalLM"]`',
        )
    if len(names) != 1 or names[0] not in FAMILIES:
        raise _unknown(", ".join(f"`{name}`" for name in names), where)
    if model_type is not None and MODEL_TYPES.get(str(model_type)) != names[0]:
        raise UnsupportedModel(
            f"`architectures` is `{names[0]}` but `model_type` is `{model_type}` in `{where}`: they name two families",
            hint="correct the wrong one of the two",
        )
    return FAMILIES[names[0]]


def _unknown(what: str, where: str) -> UnsupportedModel:
    if "Gemma3ForConditionalGeneration" in what:
        hint = "only the text model is supported: save it on its own as `Gemma3ForCausalLM`"
    else:
        hint = f"supported are {', '.join(FAMILIES)}"
    return UnsupportedModel(f"unknown architecture {what} in `{where}`", hint=hint)
