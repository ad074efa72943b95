"""Architecture: what differs between model families, as frozen data, and what follows from it.

A family states only its differences from Llama. Roles (q, k, v, o, gate, up, down) give the names, shapes, biases and
stages of its linears, so that entries never repeat them. `linears` and `tensors` are the whole contents of a
checkpoint of that family: what may be quantized, what has to be there, and of which shape.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.models.config import ModelConfig
    from quantkit.models.keys import Keys

EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm"
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear of a checkpoint: Hugging Face module name, shape, and what it is for.

    roles        what its columns are, in order: one role, or several where linears are fused on disk
    widths       columns of each role; their sum is `out_features`
    stage        the name shared by the linears that read the same input
    quantizable  false for routers and gates, which stay as they are
    """

    name: str
    in_features: int
    widths: tuple[int, ...]
    roles: tuple[str, ...]
    stage: str
    bias: bool = False
    quantizable: bool = True

    @property
    def out_features(self) -> int:
        return sum(self.widths)

    @property
    def role(self) -> str:
        """`q`, `o`, `down`, … and `q+k+v` where fused."""
        return "+".join(self.roles)


@dataclass(frozen=True, slots=True)
class Stage:
    """Linears of a block that read the same input, by Hugging Face module name."""

    name: str
    linears: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """Names of a mixture of experts inside a block, and the config key of an expert's width.

    `names` are the gate, up and down linears of one expert. With `always` every block is a mixture; else the config
    says which ones (`decoder_sparse_step`, `mlp_only_layers`) and whether the chosen weights are made to sum to one
    (`norm_topk_prob`), which `always` implies.
    """

    router: str = "mlp.gate"
    prefix: str = "mlp.experts"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str | None = None
    shared_gate: str | None = None
    width_key: str = "moe_intermediate_size"
    always: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family, as its differences from Llama.

    windows          config and number of layers → attention window of each layer, None for the whole past;
                     without it the family has no windows
    bias             the roles that always have a bias
    bias_keys        config key → the roles that have a bias where it is true
    bias_default     what an absent bias key means
    head_norms       an RMS norm over each head of q and k, before the rotation
    fused            linears that are one on disk, name → roles, split by columns in forward
    norm_offset      added to every norm weight
    activation_key   config key of the activation between gate and up
    scale_embedding  embeddings times the root of the width
    post_norms       norms after attention and MLP too, before they join the residual stream
    attention_cap    config key of the cap on attention scores, `cap · tanh(x / cap)`
    logit_cap        config key of the cap on logits
    query_scalar     attention scale from `query_pre_attn_scalar`, not from the head width
    partial_rotary   `partial_rotary_factor`: only the first part of each head rotates
    long_restart     LongRoPE: the cache is rebuilt when the text outgrows the short factors
    local_rope       layers with a window rotate with a base of their own
    tied             what an absent `tie_word_embeddings` means
    rope_theta       what an absent rotary base means
    experts          the mixture of experts, where there is one
    """

    windows: "Callable[[Keys, int], tuple[int | None, ...]] | None" = None
    bias: tuple[str, ...] = ()
    bias_keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bias_default: bool = False
    head_norms: bool = False
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norm_offset: float = 0.0
    activation_key: str = "hidden_act"
    scale_embedding: bool = False
    post_norms: bool = False
    attention_cap: str | None = None
    logit_cap: str | None = None
    query_scalar: bool = False
    partial_rotary: bool = False
    long_restart: bool = False
    local_rope: bool = False
    tied: bool = False
    rope_theta: float = 10_000.0
    experts: Experts | None = None

    def linears(self, config: "ModelConfig") -> list[LinearSpec]:
        """Every linear of the blocks, block after block, in the order they run."""
        return [spec for layer in range(config.num_layers) for spec in self.block_linears(config, layer)]

    def block_linears(self, config: "ModelConfig", layer: int) -> list[LinearSpec]:
        """The linears of one block, in the order they run; those of one stage are neighbours."""
        block = f"model.layers.{layer}"
        heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        specs = [
            *self._fan(config, f"{block}.self_attn", config.hidden_size, {"q": heads, "k": kv, "v": kv}),
            *self._fan(config, f"{block}.self_attn", heads, {"o": config.hidden_size}),
        ]
        if config.experts is None or not config.experts.layers[layer]:
            return specs + self._mlp(config, f"{block}.mlp", config.intermediate_size)
        return specs + self._mixture(config, block)

    def _mixture(self, config: "ModelConfig", block: str) -> list[LinearSpec]:
        names, sizes = self.experts, config.experts
        assert names is not None and sizes is not None
        specs = [_gate(f"{block}.{names.router}", config.hidden_size, sizes.count)]
        for expert in range(sizes.count):
            specs += self._mlp(config, f"{block}.{names.prefix}.{expert}", sizes.width, names.names)
        if names.shared and names.shared_gate:
            specs += self._mlp(config, f"{block}.{names.shared}", sizes.shared_width)
            specs.append(_gate(f"{block}.{names.shared_gate}", config.hidden_size, 1))
        return specs

    def _mlp(
        self,
        config: "ModelConfig",
        prefix: str,
        width: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> list[LinearSpec]:
        gate, up, down = names
        spelled = {"gate": gate, "up": up, "down": down}
        return [
            *self._fan(config, prefix, config.hidden_size, {"gate": width, "up": width}, spelled),
            *self._fan(config, prefix, width, {"down": config.hidden_size}, spelled),
        ]

    def _fan(
        self,
        config: "ModelConfig",
        prefix: str,
        in_features: int,
        widths: Mapping[str, int],
        spelled: Mapping[str, str] | None = None,
    ) -> Iterator[LinearSpec]:
        """The linears that turn one input into these roles: one for each, or one for all where they are fused."""
        roles = tuple(widths)
        stage = f"{prefix}.{'_'.join(roles)}"
        whole = next((name for name, fused in self.fused.items() if fused == roles), None)
        if whole is not None:
            yield LinearSpec(f"{prefix}.{whole}", in_features, tuple(widths.values()), roles, stage)
            return
        for role, width in widths.items():
            name = spelled[role] if spelled else f"{role}_proj"
            yield LinearSpec(f"{prefix}.{name}", in_features, (width,), (role,), stage, bias=role in config.biased)

    def norms(self, config: "ModelConfig", layer: int) -> dict[str, int]:
        """The norms of one block, name → width."""
        block = f"model.layers.{layer}"
        names = ["input_layernorm", "post_attention_layernorm"]
        if self.post_norms:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        widths = {f"{block}.{name}": config.hidden_size for name in names}
        if self.head_norms:
            widths |= {f"{block}.self_attn.{name}": config.head_dim for name in ("q_norm", "k_norm")}
        return widths

    def tensors(self, config: "ModelConfig") -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of an unquantized checkpoint, in the order the model runs."""
        shapes: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": (config.vocab_size, config.hidden_size)}
        for layer in range(config.num_layers):
            for spec in self.block_linears(config, layer):
                shapes[f"{spec.name}.weight"] = (spec.out_features, spec.in_features)
                if spec.bias:
                    shapes[f"{spec.name}.bias"] = (spec.out_features,)
            shapes |= {f"{name}.weight": (width,) for name, width in self.norms(config, layer).items()}
        shapes[f"{FINAL_NORM}.weight"] = (config.hidden_size,)
        if not config.tie_embeddings:
            shapes[f"{HEAD}.weight"] = (config.vocab_size, config.hidden_size)
        return shapes


def block_of(name: str) -> int:
    """`model.layers.3.mlp.experts.1.up_proj` → 3: the block that a linear of one belongs to."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def by_stage(specs: Iterable[LinearSpec]) -> list[list[LinearSpec]]:
    """The linears of a block in groups that read one input, in the order they run; routers and gates are in none."""
    kept = (spec for spec in specs if spec.quantizable)
    return [list(group) for _, group in groupby(kept, key=lambda spec: spec.stage)]


def _gate(name: str, in_features: int, out_features: int) -> LinearSpec:
    return LinearSpec(name, in_features, (out_features,), ("router",), name, quantizable=False)
