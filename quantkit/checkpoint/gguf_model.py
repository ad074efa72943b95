"""What the model in a GGUF file is in Hugging Face terms: its config.json, and the place of each tensor.

A family is one entry of FAMILIES. Metadata and tensors without a place are refused by name: a model that computes
something else than its file says is worse than none.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.checkpoint.gguf import GgufFile
from quantkit.checkpoint.gguf_header import ORIGINAL, Metadata
from quantkit.checkpoint.header import shown
from quantkit.errors import CheckpointError, UnsupportedModel
from quantkit.models.rope import Llama3Rope, Rope


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one `general.architecture` apart, and what Hugging Face calls it.

    permuted    rows of q and k are stored as rotary pairs (2i, 2i+1), see `unpermute`
    biased      which of q, k, v have a bias
    head_norms  q and k are normalized head by head
    """

    architecture: str
    model_type: str
    permuted: bool = False
    biased: tuple[str, ...] = ()
    head_norms: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", biased=("q", "k", "v")),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", head_norms=True),
}
# GGUF calls Mistral `llama` too. Without a window the two compute the same; with one it is this:
WINDOWED = {"llama": Family("MistralForCausalLM", "mistral", permuted=True)}

# Metadata below `<architecture>.` that is read, or that says nothing about what the model computes.
READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}  # fmt: skip
# Metadata that changes nothing at this value and is refused at any other.
NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0}

# Llama 3.1 scaling is stored as one divisor for each frequency; all published models of this kind have these constants.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor: GGUF name, Hugging Face name, shape, and the heads within which its rows are permuted (0: none)."""

    source: str
    target: str
    shape: tuple[int, ...]
    permuted_heads: int = 0

    @property
    def count(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """`config` for config.json (token ids are the tokenizer's to say), and every tensor in the order of the model."""

    architecture: str
    config: dict[str, Any]
    placements: tuple[Placement, ...]


def describe(file: GgufFile) -> ImportedModel:
    """Match a file with its family.

    Raises UnsupportedModel for an architecture, metadata or tensor without a place here, and CheckpointError for what
    is missing or has another shape than the metadata say.
    """
    prefix = file.metadata.text("general.architecture")
    if prefix not in FAMILIES:
        raise UnsupportedModel(
            f"`{file.path}` has architecture {shown(prefix)}, expected one of {', '.join(FAMILIES)}", hint=ORIGINAL
        )
    _refuse_unread(file.metadata, prefix)
    windowed = f"{prefix}.attention.sliding_window" in file.metadata
    if windowed and prefix not in WINDOWED:
        raise _not_honoured(f"{prefix}.attention.sliding_window", file.metadata)
    family = WINDOWED[prefix] if windowed else FAMILIES[prefix]
    config = _config(file, prefix, family)
    if windowed:
        config["sliding_window"] = _count(file.metadata, f"{prefix}.attention.sliding_window")
    placed = tuple(placements(family, config))
    _match(file, placed, family.architecture)
    return ImportedModel(family.architecture, config, placed)


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows `[heads * head_dim, …]` from rotary pairs to halves: row 2i + j of a head becomes row i + j * head_dim/2.

    llama.cpp turns neighbours (2i, 2i+1) together, Hugging Face turns i and i + head_dim/2 (`rotate_half`).
    """
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What `unpermute` undoes: rows from halves to rotary pairs."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _refuse_unread(metadata: Metadata, prefix: str) -> None:
    for key, value in metadata.items():
        name = key.removeprefix(prefix + ".")
        if name != key and name not in READ and (name not in NEUTRAL or NEUTRAL[name] != value):
            raise _not_honoured(key, metadata)


def _not_honoured(key: str, metadata: Metadata) -> UnsupportedModel:
    return UnsupportedModel(f"metadata {shown(key)} = {shown(str(metadata[key]))} cannot be honoured", hint=ORIGINAL)


def _config(file: GgufFile, prefix: str, family: Family) -> dict[str, Any]:
    """config.json with the rotary settings in both spellings, that of transformers 5 and the older one."""
    metadata = file.metadata

    def count(name: str, default: int | None = None) -> int:
        return _count(metadata, f"{prefix}.{name}", default)

    hidden, heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"`{file.path}` has heads of size {head_dim}, expected an even size", hint=ORIGINAL)
    for name in ("attention.value_length", "rope.dimension_count"):
        if count(name, head_dim) != head_dim:
            raise _not_honoured(f"{prefix}.{name}", metadata)
    blocks = count("block_count")
    if blocks > len(file.tensors):
        raise CheckpointError(
            f"`{file.path}` announces {blocks} blocks, but has {len(file.tensors)} tensors", hint=ORIGINAL
        )
    embedding = _required(file, "token_embd.weight", family.architecture)

    theta = _positive(metadata, f"{prefix}.rope.freq_base", 10000.0)
    scaling = _rope_scaling(file, prefix, theta, head_dim)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _positive(metadata, f"{prefix}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": count("context_length"),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": theta},
        "attention_dropout": 0.0,
        "dtype": "float16",
        "torch_dtype": "float16",
        "use_cache": True,
    }


def _count(metadata: Metadata, key: str, default: int | None = None) -> int:
    """A count, which GGUF may also give for each block: then one number for all of them, or refused."""
    value = metadata.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModel(f"{metadata.at(key)} differs between blocks, expected one for all", hint=ORIGINAL)
        found = metadata.integers(key)[0]
    else:
        found = metadata.integer(key, default)
    if found < 1:
        raise CheckpointError(f"{metadata.at(key)} is {found}, expected at least 1", hint=ORIGINAL)
    return found


def _positive(metadata: Metadata, key: str, default: float | None = None) -> float:
    found = metadata.number(key, default)
    if not 0.0 < found < math.inf:
        raise CheckpointError(f"{metadata.at(key)} is {found}, expected a positive number", hint=ORIGINAL)
    return found


def _rope_scaling(file: GgufFile, prefix: str, theta: float, head_dim: int) -> dict[str, Any]:
    """The `rope_scaling` of config.json, empty when positions are not scaled."""
    metadata, key = file.metadata, f"{prefix}.rope.scaling.type"
    older = f"{prefix}.rope.scale_linear"
    kind = metadata.text(key, "linear" if older in metadata else "none")
    if ROPE_DIVISORS in file.tensors:
        if kind != "none":
            raise UnsupportedModel(f"`{file.path}` has `{key}` {shown(kind)} and `{ROPE_DIVISORS}`", hint=ORIGINAL)
        return _llama3_scaling(file, theta, head_dim)
    if kind == "none":
        return {}
    factor = _positive(metadata, f"{prefix}.rope.scaling.factor", _positive(metadata, older, 1.0))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    if kind == "yarn":
        original = _count(metadata, f"{prefix}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise _not_honoured(key, metadata)


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The factor of Llama 3.1 scaling from its table of divisors; a table with other constants is refused."""
    divisors = file.single(ROPE_DIVISORS)
    if divisors.shape != (head_dim // 2,):
        raise CheckpointError(
            f"tensor `{ROPE_DIVISORS}` of `{file.path}` has shape {list(divisors.shape)}, expected {[head_dim // 2]}",
            hint=ORIGINAL,
        )
    factor = divisors.max().item()
    if factor == divisors.min().item() == 1.0:
        return {}
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    scaled = Llama3Rope(theta, head_dim, factor, low, high, int(LLAMA3["original_max_position_embeddings"]))
    expected = Rope(theta, head_dim).frequencies(1) / scaled.frequencies(1)
    if not torch.allclose(divisors, expected, rtol=1e-4, atol=0.0):
        raise UnsupportedModel(f"`{ROPE_DIVISORS}` of `{file.path}` is not the scaling of Llama 3.1", hint=ORIGINAL)
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def placements(family: Family, config: Mapping[str, Any]) -> Iterator[Placement]:
    """Every tensor of a model of that family with this config.json, in order."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    yield Placement("token_embd.weight", "model.embed_tokens.weight", (vocab, hidden))
    for index in range(config["num_hidden_layers"]):
        source, target = f"blk.{index}", f"model.layers.{index}"
        yield Placement(f"{source}.attn_norm.weight", f"{target}.input_layernorm.weight", (hidden,))
        yield from _attention(family, config, source, f"{target}.self_attn")
        yield Placement(f"{source}.ffn_norm.weight", f"{target}.post_attention_layernorm.weight", (hidden,))
        yield Placement(f"{source}.ffn_gate.weight", f"{target}.mlp.gate_proj.weight", (inner, hidden))
        yield Placement(f"{source}.ffn_up.weight", f"{target}.mlp.up_proj.weight", (inner, hidden))
        yield Placement(f"{source}.ffn_down.weight", f"{target}.mlp.down_proj.weight", (hidden, inner))
    yield Placement("output_norm.weight", "model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield Placement("output.weight", "lm_head.weight", (vocab, hidden))


def _attention(family: Family, config: Mapping[str, Any], source: str, target: str) -> Iterator[Placement]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    for role, count in heads.items():
        permuted = count if family.permuted and role != "v" else 0
        linear, rows = f"{target}.{role}_proj", count * head_dim
        yield Placement(f"{source}.attn_{role}.weight", f"{linear}.weight", (rows, hidden), permuted)
        if role in family.biased:
            yield Placement(f"{source}.attn_{role}.bias", f"{linear}.bias", (rows,), permuted)
        if family.head_norms and role != "v":
            yield Placement(f"{source}.attn_{role}_norm.weight", f"{target}.{role}_norm.weight", (head_dim,))
    yield Placement(f"{source}.attn_output.weight", f"{target}.o_proj.weight", (hidden, heads["q"] * head_dim))


def _match(file: GgufFile, placements: tuple[Placement, ...], architecture: str) -> None:
    """Every placement has its tensor in its shape, every tensor its placement."""
    for placement in placements:
        shape = _required(file, placement.source, architecture)
        if shape != placement.shape:
            where, expected = f"tensor `{placement.source}` of `{file.path}`", list(placement.shape)
            raise CheckpointError(f"{where} has shape {list(shape)}, expected {expected}", hint=ORIGINAL)
    unplaced = set(file.tensors) - {placement.source for placement in placements} - {ROPE_DIVISORS}
    if unplaced:
        name = shown(min(unplaced))
        raise UnsupportedModel(f"tensor {name} of `{file.path}` has no place in {architecture}", hint=ORIGINAL)


def _required(file: GgufFile, name: str, architecture: str) -> tuple[int, ...]:
    """The shape of a tensor that must be there."""
    if name not in file.tensors:
        raise CheckpointError(f"`{file.path}` has no tensor `{name}`, which {architecture} needs", hint=ORIGINAL)
    return file.tensors[name].shape
