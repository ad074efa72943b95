"""Tiny GGUF files, written with the `gguf` library: the models of tests/tiny.py under the names that library gives.

    model = tiny_gguf.write_model(tmp_path / "tiny.gguf", "LlamaForCausalLM", weights="Q4_1")
    model.tensors["model.layers.0.mlp.up_proj.weight"]        # float32, as stored in the file and dequantized again

`values` of None take metadata away. What is written here is written as llama.cpp stores it, by rules stated on their
own: q and k of `llama` models in rotary pairs, norms in F32.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
import torch
from gguf import GGMLQuantizationType, GGUFWriter

PREFIX = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
ARCH = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}

Tensors = dict[str, tuple[np.ndarray, str]]


@dataclass(frozen=True)
class TinyModel:
    """A file, and what it holds in Hugging Face terms."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def write_file(path: Path, values: dict[str, Any], tensors: Tensors, prefix: str = "llama") -> Path:
    """A GGUF file of these metadata and tensors: name → (float32 array or raw bytes, type name)."""
    writer = GGUFWriter(path, prefix)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in values.items():
        if value is not None:
            adders[type(value)](key, value)
    for name, (array, type_name) in tensors.items():
        kind = GGMLQuantizationType[type_name]
        raw = array if array.dtype == np.uint8 else gguf.quantize(array, kind)
        writer.add_tensor(name, np.ascontiguousarray(raw), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(
    path: Path,
    family: str = "LlamaForCausalLM",
    *,
    weights: str = "F16",
    values: dict[str, Any] | None = None,
    extra: Tensors | None = None,
    drop: str | None = None,
    **overrides: Any,
) -> TinyModel:
    """A whole model with a byte-level tokenizer. `extra` tensors are added, the one named `drop` is left out."""
    config = tiny.make_config(family, "float32", **{"vocab_size": 276, **overrides})
    prefix = PREFIX[family]
    names = gguf.get_tensor_name_map(ARCH[prefix], config["num_hidden_layers"])
    stored: Tensors = {}
    known: dict[str, torch.Tensor] = {}
    for name, tensor in tiny.make_tensors(config, 0, torch.float32).items():
        heads = rotary_heads(name, config) if prefix == "llama" else 0
        array = to_pairs(tensor.numpy(), heads) if heads else tensor.numpy()
        kind = weights if tensor.ndim == 2 else "F32"
        stored[names.get_name(name, (".weight", ".bias"))] = (array, kind)
        back = gguf.dequantize(gguf.quantize(array, GGMLQuantizationType[kind]), GGMLQuantizationType[kind])
        known[name] = torch.from_numpy(np.array(from_pairs(back, heads) if heads else back))
    if (config["rope_scaling"] or {}).get("rope_type") == "llama3":
        stored["rope_freqs.weight"] = (llama3_divisors(config), "F32")
    stored.pop(drop or "", None)
    everything = {**metadata(config, prefix), **tokenizer_values(), **(values or {})}
    return TinyModel(write_file(path, everything, {**stored, **(extra or {})}, prefix), config, known)


def metadata(config: dict[str, Any], prefix: str) -> dict[str, Any]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "attention.key_length": head_dim if head_dim != hidden // heads else None,
        "attention.value_length": head_dim if head_dim != hidden // heads else None,
        "attention.sliding_window": config.get("sliding_window"),
    }
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        values["rope.scaling.type"] = scaling["rope_type"]
        values["rope.scaling.factor"] = scaling["factor"]
        values["rope.scaling.original_context_length"] = scaling.get("original_max_position_embeddings")
    return {f"{prefix}.{name}": value for name, value in values.items()}


def tokenizer_values() -> dict[str, Any]:
    """The tokenizer of tests/tiny.py as metadata: 5 control tokens, 256 bytes, 15 merges."""
    from tokenizers import pre_tokenizers

    tokens = [*tiny.SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [merge.replace(" ", "") for merge in tiny.MERGES]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(tiny.SPECIAL_TOKENS) + [1] * (len(tokens) - len(tiny.SPECIAL_TOKENS)),
        "tokenizer.ggml.merges": list(tiny.MERGES),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 4,
        "tokenizer.chat_template": tiny.CHAT_TEMPLATE,
    }


def llama3_divisors(config: dict[str, Any]) -> np.ndarray:
    """What each rotary frequency is divided by, as a converter writes it: one frequency at a time."""
    scaling, head_dim = config["rope_scaling"], config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    divisors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * index / head_dim)
        waves = scaling["original_max_position_embeddings"] / wavelength
        if waves > high:
            divisors.append(1.0)
        elif waves < low:
            divisors.append(factor)
        else:
            kept = (waves - low) / (high - low)
            divisors.append(1 / ((1 - kept) / factor + kept))
    return np.array(divisors, np.float32)


def rotary_heads(name: str, config: dict[str, Any]) -> int:
    """The heads of a linear whose rows llama.cpp stores in pairs, 0 for all others."""
    counts = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return counts.get(name.split(".")[-2], 0)


def to_pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """Row i + j * head_dim/2 of each head to row 2i + j: one row at a time, to be read rather than to be fast."""
    head_dim = array.shape[0] // heads
    rows = [
        array[head * head_dim + i + j * head_dim // 2] for head in range(heads) for i in range(head_dim // 2) for j in (0, 1)
    ]
    return np.stack(rows)


def from_pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """What undoes `to_pairs`."""
    head_dim = array.shape[0] // heads
    rows = [array[head * head_dim + 2 * i + j] for head in range(heads) for j in (0, 1) for i in range(head_dim // 2)]
    return np.stack(rows)
