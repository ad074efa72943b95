"""Tiny models on disk: any family of the catalog, two layers, written in milliseconds.

The tensor names and shapes below are stated on their own, not taken from the catalog, so that a test which loads such
a folder checks the catalog against a second witness. Nothing here needs transformers.

    path = tiny.write_model(tmp_path / "model", "Qwen2ForCausalLM", dtype="bfloat16", num_hidden_layers=3)

Any further keyword is a key of config.json; `tiny.ABSENT` leaves a key out.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ABSENT = object()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "i n", "e r", "a n", "o n", "r e", "Ġ a", "Ġ o", "Ġo f", "an d", "Ġ s", "in g", "e s")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}
SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GEMMA = {
    "hidden_act": ABSENT,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
    "attention_bias": False,
    "tie_word_embeddings": True,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", "attention_bias": False, "mlp_bias": False},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": None},
    "Qwen2ForCausalLM": {"model_type": "qwen2", **QWEN_WINDOW},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 32, "attention_bias": False, **QWEN_WINDOW},
    "Gemma2ForCausalLM": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
        **GEMMA,
    },
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text",
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        **GEMMA,
    },
    "Phi3ForCausalLM": {"model_type": "phi3", "original_max_position_embeddings": 2048, "sliding_window": None},
    "MixtralForCausalLM": {
        "model_type": "mixtral",
        "sliding_window": None,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "Qwen2MoeForCausalLM": {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 96,
        "norm_topk_prob": False,
        **SPARSE,
        **QWEN_WINDOW,
    },
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "attention_bias": False,
        "norm_topk_prob": True,
        **SPARSE,
        **QWEN_WINDOW,
    },
}


def write_model(
    path: Path,
    family: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    tokenizer: bool = True,
    **config_overrides: Any,
) -> Path:
    """A complete model folder with random weights; returns `path`."""
    config = make_config(family, dtype, **config_overrides)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    write_tensors(path, make_tensors(config, seed, DTYPES[dtype]), shards)
    if tokenizer:
        write_tokenizer(path)
    return path


def write_lonely_mixture(path: Path, family: str, **config_overrides: Any) -> Path:
    """A mixture of five experts whose router never chooses the last one in any block; returns `path`."""
    count = "num_local_experts" if family.startswith("Mixtral") else "num_experts"
    write_model(path, family, **{count: 5}, **config_overrides)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight"))]:
        # Of these logits the last is never among the two highest, whatever the token.
        tensors[name] = torch.stack([tensors[name][0] * factor for factor in (1, 0.5, -1, -0.5, 0)])
    write_tensors(path, tensors)
    return path


def make_config(family: str, dtype: str = "float32", **overrides: Any) -> dict[str, Any]:
    """config.json in the spelling most published checkpoints have; `rope_parameters` switches to the newer one."""
    config = {"architectures": [family], **COMMON, **FAMILIES[family], "torch_dtype": dtype}
    if "rope_parameters" in overrides:
        for key in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
            config.pop(key, None)
    return {key: value for key, value in {**config, **overrides}.items() if value is not ABSENT}


def make_tensors(config: dict[str, Any], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights by their names on disk: output rows of unequal scale, norms near one, logits of order one."""
    generator = torch.Generator().manual_seed(seed)
    gemma = config["architectures"][0].startswith("Gemma")

    def make(shape: tuple[int, ...], kind: str) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        if kind == "norm":
            return (0.0 if gemma else 1.0) + 0.1 * noise
        if kind == "bias":
            return 0.5 * noise
        if kind == "embedding":
            return (0.06 if gemma else 0.3) * noise  # Gemma multiplies by the root of the width, 8 here
        rows = torch.exp(0.3 * torch.randn((shape[0], 1), generator=generator))
        return noise * rows / math.sqrt(shape[1])

    return {name: make(shape, kind).to(dtype) for name, shape, kind in tensor_list(config)}


def tensor_list(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and kind (`weight`, `bias`, `norm`, `embedding`) of every tensor of the model."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = [("model.embed_tokens.weight", (vocab, hidden), "embedding")]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape, kind in attention_list(config) + mlp_list(config, layer) + norm_list(config):
            tensors.append((prefix + name, shape, kind))
    tensors.append(("model.norm.weight", (hidden,), "norm"))
    if not config.get("tie_word_embeddings"):
        tensors.append(("lm_head.weight", (vocab, hidden), "weight"))
    return tensors


def attention_list(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...], str]]:
    family, hidden = config["architectures"][0], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    if family == "Phi3ForCausalLM":
        linears = {"qkv_proj": (q + 2 * kv, hidden), "o_proj": (hidden, q)}
    else:
        linears = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    biased = set(linears) if config.get("attention_bias") else set()
    if family in ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM") and config.get("qkv_bias", True):
        biased = {"q_proj", "k_proj", "v_proj"}
    tensors = []
    for name, shape in linears.items():
        tensors.append((f"self_attn.{name}.weight", shape, "weight"))
        if name in biased:
            tensors.append((f"self_attn.{name}.bias", shape[:1], "bias"))
    if family.startswith(("Qwen3", "Gemma3")):
        tensors += [(f"self_attn.{name}.weight", (head_dim,), "norm") for name in ("q_norm", "k_norm")]
    return tensors


def mlp_list(config: dict[str, Any], layer: int) -> list[tuple[str, tuple[int, ...], str]]:
    family, hidden, wide = config["architectures"][0], config["hidden_size"], config["intermediate_size"]
    if family == "MixtralForCausalLM":
        tensors = [("block_sparse_moe.gate.weight", (config["num_local_experts"], hidden), "weight")]
        for expert in range(config["num_local_experts"]):
            prefix = f"block_sparse_moe.experts.{expert}."
            tensors += gated_list(prefix, hidden, wide, ("w1", "w3", "w2"))
        return tensors
    if "Moe" in family and layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0:
        tensors = [("mlp.gate.weight", (config["num_experts"], hidden), "weight")]
        for expert in range(config["num_experts"]):
            tensors += gated_list(f"mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
        if family == "Qwen2MoeForCausalLM":
            tensors += gated_list("mlp.shared_expert.", hidden, config["shared_expert_intermediate_size"])
            tensors.append(("mlp.shared_expert_gate.weight", (1, hidden), "weight"))
        return tensors
    if family == "Phi3ForCausalLM":
        shapes = {"mlp.gate_up_proj": (2 * wide, hidden), "mlp.down_proj": (hidden, wide)}
        return [(f"{name}.weight", shape, "weight") for name, shape in shapes.items()]
    tensors = gated_list("mlp.", hidden, wide)
    if config.get("mlp_bias"):
        tensors += [(name.replace("weight", "bias"), shape[:1], "bias") for name, shape, _ in tensors]
    return tensors


def gated_list(
    prefix: str, hidden: int, wide: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> list[tuple[str, tuple[int, ...], str]]:
    shapes = ((wide, hidden), (wide, hidden), (hidden, wide))
    return [(f"{prefix}{name}.weight", shape, "weight") for name, shape in zip(names, shapes, strict=True)]


def norm_list(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...], str]]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if config["architectures"][0].startswith("Gemma"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return [(f"{name}.weight", (config["hidden_size"],), "norm") for name in names]


def write_tensors(path: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """`model.safetensors`, or that many shards with their index."""
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(path: Path) -> None:
    """A byte-level BPE tokenizer of 276 entries with a chat template: every text has ids, every id a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    symbols += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(symbols)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(described, indent=2))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 4]}))
