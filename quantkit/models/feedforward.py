"""Feed-forward parts of a block: one gated MLP, or a mixture of them of which a router chooses a few for each token."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.models.fan import Fan, Observe
from quantkit.models.linear import Linear

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(activation(gate(x)) · up(x))`. (Shazeer 2020, GLU variants)"""

    inputs: Fan
    output: Fan
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, observe: Observe | None) -> Tensor:
        """`[..., hidden]` → `[..., hidden]`."""
        (out,) = self.output(self.inner(x, observe), observe)
        return out

    def show(self, x: Tensor, observe: Observe) -> None:
        """Lets `observe` see what a call reads, without the last product."""
        self.output.show(self.inner(x, observe), observe)

    def show_inputs(self, x: Tensor, observe: Observe) -> None:
        """Lets `observe` see what the first linears read, without any product."""
        self.inputs.show(x, observe)

    def inner(self, x: Tensor, observe: Observe | None = None) -> Tensor:
        """`[..., hidden]` → what the last linear reads, `[..., intermediate]`."""
        gate, up = self.inputs(x, observe)
        return self.activation(gate) * up


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts chosen by a softmax over the router's logits, weighted by their probabilities. (Fedus et al. 2021)

    router       float32 whatever the model computes in, so that rounding does not change who is chosen
    chosen       experts for each token
    normalise    the weights of the chosen ones sum to one
    shared       an expert that sees every token, scaled by the sigmoid of `shared_gate`
    reached      experts that are observed with every token, as if all were routed to them; what comes out is the same
    """

    router: Linear
    experts: tuple[GatedMLP, ...]
    chosen: int
    normalise: bool
    shared: GatedMLP | None
    shared_gate: Linear | None
    reached: frozenset[int] = frozenset()

    def __call__(self, x: Tensor, observe: Observe | None) -> Tensor:
        """`[b, s, hidden]` → `[b, s, hidden]`, float32. An expert without tokens only runs if it is `reached`."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, choice = self._route(tokens)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(tokens, dtype=torch.float32)
        for expert in self._running(choice):
            rows, rank = torch.where(choice == expert)
            if expert in self.reached:
                routed = self.experts[expert](tokens, observe)[rows]
            else:
                routed = self.experts[expert](tokens[rows], observe and _naming_tokens(observe, rows))
            out.index_add_(0, rows, routed * weights[rows, rank, None])
        if self.shared is not None and self.shared_gate is not None:
            out += self.shared_gate(tokens).sigmoid() * self.shared(tokens, observe)
        return out.reshape(x.shape)

    def show(self, x: Tensor, observe: Observe) -> None:
        """Lets `observe` see what a call reads, without the last product of any expert."""
        self._show(GatedMLP.show, x, observe)

    def show_inputs(self, x: Tensor, observe: Observe) -> None:
        """Lets `observe` see what the first linears of each expert read."""
        self._show(GatedMLP.show_inputs, x, observe)

    def _show(self, show: Callable[[GatedMLP, Tensor, Observe], None], x: Tensor, observe: Observe) -> None:
        tokens = x.reshape(-1, x.shape[-1])
        _, choice = self._route(tokens)
        for expert in self._running(choice):
            if expert in self.reached:
                show(self.experts[expert], tokens, observe)
            else:
                rows, _ = torch.where(choice == expert)
                show(self.experts[expert], tokens[rows], _naming_tokens(observe, rows))
        if self.shared is not None and self.shared_gate is not None:
            show(self.shared, tokens, observe)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The probabilities of those that are chosen for each token, and who they are, `[m, chosen]` both."""
        weights, choice = self.router(tokens).softmax(dim=-1).topk(self.chosen, dim=-1)
        return weights, choice

    def _running(self, choice: Tensor) -> list[int]:
        return sorted({*choice.unique().tolist(), *self.reached})


def _naming_tokens(observe: Observe, tokens: Tensor) -> Observe:
    """An expert does not know which tokens it was given."""
    return lambda seen: observe(replace(seen, tokens=tokens))
