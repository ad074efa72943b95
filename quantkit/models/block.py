"""Block: one decoder layer, and reading it from a checkpoint."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit import heap
from quantkit.models.architecture import Architecture, Stage, by_stage
from quantkit.models.attention import Attention, Cache
from quantkit.models.config import ModelConfig
from quantkit.models.fan import Fan, Observe
from quantkit.models.feedforward import ACTIVATIONS, GatedMLP, Mixture
from quantkit.models.linear import Linear
from quantkit.models.norm import Norm
from quantkit.models.rope import Rotary
from quantkit.models.source import Device, Source, read_linear


@dataclass(frozen=True, slots=True)
class Block:
    """One decoder layer. The two `after` norms exist in families that normalise what joins the residual stream."""

    before_attention: Norm
    attention: Attention
    after_attention: Norm | None
    before_mlp: Norm
    mlp: GatedMLP | Mixture
    after_mlp: Norm | None
    fans: tuple[Fan, ...]

    def forward(
        self, hidden: Tensor, rotary: Rotary, cache: Cache | None = None, observe: Observe | None = None
    ) -> Tensor:
        """`[b, s, hidden]` float32 → the same.

        `observe` gets what went through each stage just after its linears ran: all tokens, or those that were routed
        to an expert. It is not called for an expert that no token reached. States that come from another device move
        to that of the block.
        """
        hidden = self._attend(hidden, rotary, cache, observe)
        return self.fed(hidden, self.mlp(self.before_mlp(hidden), observe))

    def fed(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The states behind the block: `hidden` between attention and MLP, `out` what the MLP gives."""
        return hidden + (self.after_mlp(out) if self.after_mlp else out)

    def show(self, hidden: Tensor, rotary: Rotary, observe: Observe) -> None:
        """Only what `observe` is to see of `forward`, but the outputs of the last linears, which are left out."""
        self.mlp.show(self.before_mlp(self._attend(hidden, rotary, None, observe)), observe)

    def _attend(self, hidden: Tensor, rotary: Rotary, cache: Cache | None, observe: Observe | None) -> Tensor:
        """The states between attention and MLP, on the device of the block."""
        hidden, rotary = hidden.to(self.device), rotary.to(self.device)
        mixed = self.attention.mix(self.before_attention(hidden), rotary, cache, observe)
        return self.attended(hidden, mixed, observe)

    def attended(self, hidden: Tensor, mixed: Tensor, observe: Observe | None = None) -> Tensor:
        """The states between attention and MLP: `hidden` before the block, `mixed` what the attention's output linear
        reads."""
        (out,) = self.attention.output(mixed, observe)
        return hidden + (self.after_attention(out) if self.after_attention else out)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.before_attention.weight.device

    @property
    def linears(self) -> dict[str, Linear]:
        """The quantizable linears by Hugging Face module name, in the order they run."""
        return {linear.name: linear for fan in self.fans for linear in fan.linears}

    @property
    def experts(self) -> tuple[tuple[str, str], ...]:
        """The two stages of each expert that a router chooses from, by name: what reads the states of the block, and
        what reads the expert's own."""
        chosen = self.mlp.experts if isinstance(self.mlp, Mixture) else ()
        return tuple((expert.inputs.stage.name, expert.output.stage.name) for expert in chosen)

    def reaching(self, experts: Iterable[int]) -> "Block":
        """The same block, these experts observed with every token, whatever the router says. What comes out is the
        same."""
        assert isinstance(self.mlp, Mixture)
        return replace(self, mlp=replace(self.mlp, reached=frozenset(experts)))

    def with_linears(self, change: Callable[[Linear], Linear]) -> "Block":
        """The same block with each of its linears as `change` returns it."""
        made = {id(fan): replace(fan, linears=tuple(change(linear) for linear in fan.linears)) for fan in self.fans}

        def remade(mlp: GatedMLP) -> GatedMLP:
            return replace(mlp, inputs=made[id(mlp.inputs)], output=made[id(mlp.output)])

        mlp = self.mlp
        if isinstance(mlp, Mixture):
            shared = None if mlp.shared is None else remade(mlp.shared)
            mlp = replace(mlp, experts=tuple(map(remade, mlp.experts)), shared=shared)
        else:
            mlp = remade(mlp)
        attention = self.attention
        attention = replace(attention, inputs=made[id(attention.inputs)], output=made[id(attention.output)])
        return replace(self, attention=attention, mlp=mlp, fans=tuple(made[id(fan)] for fan in self.fans))

    def stages(self) -> tuple[Stage, ...]:
        """Linears that share an input, in the order they run."""
        return tuple(fan.stage for fan in self.fans)


def load_block(
    source: Source,
    config: ModelConfig,
    architecture: Architecture,
    index: int,
    dtype: torch.dtype,
    device: Device = "cpu",
) -> Block:
    """One decoder layer, read from `source` alone. Raises CheckpointError for absent or misshapen tensors.

    Those who stream read a block when they have left another: what that one has freed is given back first.
    """
    heap.give_back()
    return read_block(source, config, architecture, index, dtype, device)


def read_block(
    source: Source,
    config: ModelConfig,
    architecture: Architecture,
    index: int,
    dtype: torch.dtype,
    device: Device = "cpu",
) -> Block:
    """The same for those who go through few tokens again and again, whom giving memory back would cost more."""
    specs = architecture.block_linears(config, index)
    norms = {
        name.removeprefix(f"model.layers.{index}."): Norm.read(
            source, name, width, architecture.norm_offset, config.norm_eps, device
        )
        for name, width in architecture.norms(config, index).items()
    }
    fans = tuple(Fan.read(source, group, dtype, device) for group in by_stage(specs))
    gates = [read_linear(source, spec, torch.float32, device) for spec in specs if not spec.quantizable]
    attention = Attention(
        layer=index,
        inputs=fans[0],
        output=fans[1],
        norms={role: norms[f"self_attn.{role}_norm"] for role in "qk"} if architecture.head_norms else {},
        rope=config.ropes[index],
        head_dim=config.head_dim,
        scale=config.attention_scale,
        window=config.windows[index],
        cap=config.attention_cap,
    )
    before_mlp = "pre_feedforward_layernorm" if architecture.post_norms else "post_attention_layernorm"
    return Block(
        before_attention=norms["input_layernorm"],
        attention=attention,
        after_attention=norms["post_attention_layernorm"] if architecture.post_norms else None,
        before_mlp=norms[before_mlp],
        mlp=_make_mlp(config, fans[2:], gates),
        after_mlp=norms["post_feedforward_layernorm"] if architecture.post_norms else None,
        fans=fans,
    )


def _make_mlp(config: ModelConfig, fans: Sequence[Fan], gates: Sequence[Linear]) -> GatedMLP | Mixture:
    """`fans` are pairs (gate and up, down): one MLP, or every expert and then the shared one."""
    activation = ACTIVATIONS[config.activation]
    mlps = [GatedMLP(inputs, output, activation) for inputs, output in zip(fans[::2], fans[1::2], strict=True)]
    if not gates:
        return mlps[0]
    sizes = config.experts
    assert sizes is not None
    shared = mlps[sizes.count] if len(gates) == 2 else None
    return Mixture(
        router=gates[0],
        experts=tuple(mlps[: sizes.count]),
        chosen=sizes.chosen,
        normalise=sizes.normalise,
        shared=shared,
        shared_gate=gates[1] if shared else None,
    )
