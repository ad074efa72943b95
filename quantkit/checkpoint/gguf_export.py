"""What a Hugging Face model is in a GGUF file: metadata from config.json, the place of each tensor.

The inverse of `gguf_model`, with the same table of families and the same limits: a config value that has no place in
the file, or that llama.cpp would not honour, is refused by name.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.gguf_model import FAMILIES, LLAMA3, Family, Placement, placements
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import UnsupportedModel
from quantkit.models.config import ModelConfig
from quantkit.models.rope import Llama3Rope, Rope

HINT = "use a model of another family, or llama.cpp's own converter"


def describe_model(checkpoint: Checkpoint) -> tuple[str, dict[str, Any], tuple[Placement, ...], Tensor | None]:
    """`general.architecture`, metadata, places in the order of the file, and the divisors of rotary frequencies where
    the model has such a table. Raises UnsupportedModel for what GGUF cannot say."""
    config, numbers = checkpoint.config, checkpoint.model_config
    name, family = _family(config)
    hidden, heads = numbers.hidden_size, numbers.num_heads
    said = {
        "hidden_size": hidden,
        "intermediate_size": numbers.intermediate_size,
        "vocab_size": numbers.vocab_size,
        "num_hidden_layers": numbers.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": numbers.num_kv_heads,
        "head_dim": numbers.head_dim,
        "tie_word_embeddings": numbers.tie_embeddings,
    }
    untied = numbers.tie_embeddings and any(tensor.startswith("lm_head.") for tensor in checkpoint.names())
    if untied:
        raise UnsupportedModel("a tied model with a head of its own cannot be stored", hint="`exl2-to-hf` unties it")
    placed = tuple(placements(family, said))
    known = set(checkpoint.architecture.tensors(numbers))
    for placement in placed:
        known.discard(placement.target)
    if known:
        raise UnsupportedModel(f"`{min(known)}` of `{checkpoint.path}` has no place in a GGUF file", hint=HINT)
    scaling, divisors = _rope(config, numbers)
    metadata = {
        "general.name": checkpoint.path.name,
        f"{name}.block_count": numbers.num_layers,
        f"{name}.context_length": numbers.max_positions,
        f"{name}.embedding_length": hidden,
        f"{name}.feed_forward_length": numbers.intermediate_size,
        f"{name}.attention.head_count": heads,
        f"{name}.attention.head_count_kv": numbers.num_kv_heads,
        f"{name}.attention.key_length": numbers.head_dim,
        f"{name}.attention.value_length": numbers.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{name}.rope.dimension_count": numbers.head_dim,
        f"{name}.rope.freq_base": _theta(config),
        f"{name}.vocab_size": numbers.vocab_size,
        **{f"{name}.rope.scaling.{key}": value for key, value in scaling.items()},
    }
    return name, metadata, placed, divisors


def _family(config: Mapping[str, Any]) -> tuple[str, Family]:
    architecture = (config.get("architectures") or ["?"])[0]
    families = {family.architecture: name for name, family in FAMILIES.items()}
    families["MistralForCausalLM"] = "llama"  # without a window it computes what Llama does
    if architecture not in families:
        raise UnsupportedModel(f"`{architecture}` cannot be written as GGUF, only {', '.join(families)}", hint=HINT)
    window = config.get("sliding_window")
    windowed = bool(window) and config.get("use_sliding_window", True) and window < config["max_position_embeddings"]
    if windowed:
        raise UnsupportedModel(f"a window of {window} tokens is not honoured by llama.cpp's `llama`", hint=HINT)
    return families[architecture], FAMILIES[families[architecture]]


def _theta(config: Mapping[str, Any]) -> float:
    return float(config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta") or 10000.0)


def _rope(config: Mapping[str, Any], numbers: ModelConfig) -> tuple[dict[str, Any], Tensor | None]:
    """Scaling as metadata, and the table that stands for that of Llama 3.1."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return {}, None
    if kind == "linear":
        return {"type": "linear", "factor": float(found["factor"])}, None
    own = {"type", "rope_type", "factor", "original_max_position_embeddings", "rope_theta"}
    if kind == "yarn" and found.keys() <= own and "original_max_position_embeddings" in found:
        original = int(found["original_max_position_embeddings"])
        return {"type": "yarn", "factor": float(found["factor"]), "original_context_length": original}, None
    if kind == "llama3" and all(found.get(key) == value for key, value in LLAMA3.items()):
        theta, width = _theta(config), numbers.head_dim
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        original = int(LLAMA3["original_max_position_embeddings"])
        scaled = Llama3Rope(theta, width, float(found["factor"]), low, high, original)
        return {}, (Rope(theta, width).frequencies(1) / scaled.frequencies(1)).to(torch.float32)
    raise UnsupportedModel(f"rotary scaling `{kind}` of this model has no place in a GGUF file", hint=HINT)
