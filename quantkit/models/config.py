"""ModelConfig: the numbers of a model, normalised from config.json in any of its spellings.

Missing keys are named, and a value that this code cannot honour is an `UnsupportedModel` error: a config that is read
without one describes exactly what the model code computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import UnsupportedModel
from quantkit.models import catalog
from quantkit.models.architecture import Architecture
from quantkit.models.keys import Keys
from quantkit.models.rope import Rope
from quantkit.models.rope_config import read_ropes
from quantkit.models.windows import Windows, layer_types

ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}

# Many times what any model has. Layers and experts are named one by one: a wrong number would take all memory.
MOST_LAYERS = 10_000
MOST_EXPERTS = 1_000_000

# Keys that change what a model computes, with the values under which they change nothing. A key that a family reads
# is exempt; under any other value the config describes a model that this code would get wrong.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "use_bias": (False,),
    "sliding_window": (0,),
    "use_sliding_window": (False,),
    "attention_chunk_size": (),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "interpolate_factor": (1,),
    "full_attn_mod": (1,),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (),
    "position_embedding_type": ("rope", "rotary"),
    "alibi": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "routed_scaling_factor": (1,),
    "scoring_func": ("softmax",),
}


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """A mixture of experts: how many, how many of them serve a token, and which layers have one.

    `shared_width` is 0 where there is no shared expert; `normalise` makes the chosen weights sum to one.
    """

    count: int
    chosen: int
    width: int
    shared_width: int
    normalise: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a model is, in numbers.

    biased           roles whose linears have a bias
    activation       `silu`, `gelu` (exact), `gelu_tanh` or `relu`
    attention_scale  factor of the attention scores
    attention_cap    soft cap of the attention scores, None for none; `logit_cap` likewise
    embedding_scale  factor of the embeddings
    max_positions    as stated; `context` is what the model is good for
    windows, ropes   one for each layer
    dtype            name of the dtype the config states, None where it does not
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    activation: str
    tie_embeddings: bool
    biased: frozenset[str]
    attention_scale: float
    attention_cap: float | None
    logit_cap: float | None
    embedding_scale: float
    windows: Windows
    ropes: tuple[Rope, ...]
    experts: ExpertSizes | None
    dtype: str | None

    @property
    def context(self) -> int:
        """The longest text in positions: `max_positions`, or more where every layer's rope reaches further."""
        return min(rope.reach(self.max_positions) for rope in self.ropes)

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str = "config.json") -> "ModelConfig":
        """The numbers of a config.json that was read from `where`.

        Raises CheckpointError for a missing key and UnsupportedModel for a value that cannot be honoured.
        """
        family = catalog.find(config, where)
        keys = Keys(config, where)
        layers, hidden = _read_layers(keys), keys.whole("hidden_size")
        heads, kv_heads, head_dim = _read_heads(keys, hidden)
        windows = family.windows(keys, layers) if family.windows else (None,) * layers
        positions = keys.whole("max_position_embeddings")
        experts = _read_experts(keys, family, layers)
        dense = experts is None or not all(experts.layers)
        result = cls(
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=keys.whole("intermediate_size") if dense else 0,
            vocab_size=keys.whole("vocab_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_positions=positions,
            norm_eps=keys.number("rms_norm_eps"),
            activation=_read_activation(keys, family.activation_key),
            tie_embeddings=keys.flag("tie_word_embeddings", family.tied),
            biased=_read_biased(keys, family),
            attention_scale=(keys.number("query_pre_attn_scalar") if family.query_scalar else head_dim) ** -0.5,
            attention_cap=_read_cap(keys, family.attention_cap),
            logit_cap=_read_cap(keys, family.logit_cap),
            embedding_scale=hidden**0.5 if family.scale_embedding else 1.0,
            windows=windows,
            ropes=read_ropes(keys, family, head_dim, positions, windows),
            experts=experts,
            dtype=keys.text("dtype", None) or keys.text("torch_dtype", None),
        )
        _refuse_the_rest(keys, windows)
        return result


def _read_layers(keys: Keys) -> int:
    layers: int = keys.whole("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise keys.refuse("num_hidden_layers", f"at most {MOST_LAYERS} are taken seriously")
    return layers


def _read_heads(keys: Keys, hidden: int) -> tuple[int, int, int]:
    """Query heads, key-value heads, width of a head. Wrong guesses for absent keys are caught by the tensor shapes."""
    heads = keys.whole("num_attention_heads")
    kv_heads = keys.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise keys.refuse("num_key_value_heads", f"{heads} query heads cannot be shared out over it")
    head_dim = keys.whole("head_dim", None)
    if head_dim is None and hidden % heads:
        raise keys.refuse("hidden_size", f"{heads} heads do not divide it, and `head_dim` is not given")
    return heads, kv_heads, head_dim or hidden // heads


def _read_activation(keys: Keys, key: str) -> str:
    name = keys.text(key)
    if name not in ACTIVATIONS:
        raise keys.refuse(key, f"supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _read_biased(keys: Keys, family: Architecture) -> frozenset[str]:
    biased = set(family.bias)
    for key, roles in family.bias_keys.items():
        if keys.flag(key, family.bias_default):
            biased.update(roles)
    return frozenset(biased)


def _read_cap(keys: Keys, key: str | None) -> float | None:
    if key is None:
        return None
    keys.nullable(key)
    return keys.number(key, None)


def _read_experts(keys: Keys, family: Architecture, layers: int) -> ExpertSizes | None:
    names = family.experts
    if names is None:
        return None
    count = keys.whole("num_local_experts", None) or keys.whole("num_experts")
    if keys.whole("num_experts", count) != count:
        raise keys.refuse("num_experts", f"`num_local_experts` is {count}: keep one of them")
    if count * layers > MOST_EXPERTS:
        raise keys.refuse("num_experts", f"at most {MOST_EXPERTS} in all layers together are taken seriously")
    chosen = keys.whole("num_experts_per_tok")
    if chosen > count:
        raise keys.refuse("num_experts_per_tok", f"there are only {count} experts")
    if names.always:
        sparse, normalise = (True,) * layers, True
    else:
        step, dense = keys.whole("decoder_sparse_step", 1), keys.take("mlp_only_layers", [])
        if not isinstance(dense, list):
            raise keys.refuse("mlp_only_layers", "expected a list of layer numbers")
        sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
        normalise = keys.flag("norm_topk_prob")
    shared = keys.whole("shared_expert_intermediate_size") if names.shared else 0
    return ExpertSizes(count, chosen, keys.whole(names.width_key), shared, normalise, sparse)


def _refuse_the_rest(keys: Keys, windows: Windows) -> None:
    """Errors for keys that ask for something the family, or this code, does not compute."""
    stated = layer_types(keys, len(windows))
    if stated is not None and stated != [window is not None for window in windows]:
        raise keys.refuse("layer_types", "it contradicts the attention windows that the other keys ask for")
    for key, harmless in NEUTRAL.items():
        value = keys.values.get(key)
        if key not in keys.used and value is not None and value not in harmless:
            raise keys.refuse(key, "this model family is not computed with it")
    if keys.values.get("text_config") is not None:
        raise UnsupportedModel(
            f"`text_config` in `{keys.where}`: the config describes more than a language model",
            hint="save the text model on its own",
        )
