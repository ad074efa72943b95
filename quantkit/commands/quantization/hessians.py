"""What a solver knows of the inputs of a block: a look at the calibration text, a Hessian for each stage, factored.

One look is enough for all stages whose inputs it shows; where their Hessians would not fit into `HESSIAN_BYTES`
together, they are gathered in several looks with the same result.

The Hessian of an expert comes from the tokens that the router sends to it. Where these are too few, it comes from all
tokens of the block instead, as if they had been sent there, and an expert that hardly any token reaches has none.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from quantkit import heap
from quantkit.calibration.hessian import TOKEN_SHARE, Hessian, gathering_bytes
from quantkit.calibration.sensitivity import Sensitivity
from quantkit.calibration.stream import ActivationStream
from quantkit.commands.quantization.passage import See
from quantkit.models.architecture import Stage
from quantkit.models.fan import Activations
from quantkit.models.linear import Linear
from quantkit.models.transformer import Block, Head
from quantkit.solver.inverse import Factor, factor, grouped

Gathered = TypeVar("Gathered")
HESSIAN_BYTES = 2 << 30
SHARED_BELOW = 1 / 4
"""An expert with fewer tokens than so many for each of its input features is solved with all tokens of its block."""
NEAREST_BELOW = 1 / 64
"""With fewer than so many it is rounded to nearest: the text says nothing about what it does."""

UNKNOWN = "no token of the backward pass reached this expert: its Hessian is token-normalised instead"


@dataclass(frozen=True, slots=True, eq=False)
class ReadyStage:
    """Linears that read one input, and what a solver needs to know of it.

    factor    of their Hessian; None where they are to be rounded to nearest
    tokens    calibration tokens that it is made of
    fallback  what the Hessian is, if not their own, in words
    routed    calibration tokens that the router sent to this expert; None where there is no router
    judge     [in, in]: the Hessian weighted by gradients alone, where it was asked for and there are any
    """

    names: tuple[str, ...]
    factor: Factor | None
    tokens: int
    fallback: str | None = None
    routed: int | None = None
    judge: Tensor | None = None


def ready_head(
    head: Head, stream: ActivationStream, groups: Tensor | None, dtype: torch.dtype = torch.float32
) -> ReadyStage:
    """The output linear, with the states behind the last block as its input; `groups` as for `ready_stages`."""
    linear, tokens = head.linear, 0
    hessian = Hessian(linear.in_features, linear.name, token_share=TOKEN_SHARE, device=linear.device, dtype=dtype)
    for hidden in stream.batches():
        rows = head.norm(hidden.to(linear.device)).flatten(0, 1)
        hessian.add(rows)
        tokens += len(rows)
    total = hessian.finish()
    order = None if groups is None else grouped(total, groups)
    return ReadyStage((linear.name,), factor(total, order, name=linear.name), tokens)


def ready_stages(
    block: Block,
    stages: Sequence[Stage],
    see: See,
    tokens: int,
    sensitivity: Sensitivity | None = None,
    groups: Mapping[str, Tensor] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    route_all: bool = False,
    judged: bool = False,
    hessian_bytes: int = HESSIAN_BYTES,
) -> Iterator[ReadyStage]:
    """These stages of `block`, each with the factor of its Hessian. Linears that need another order than others of
    their stage come by themselves.

    see        a look at the text, of `tokens` tokens, that shows what the stages read
    groups     the rows of a linear that are to be solved together, int64 [in]: the group of each
    dtype      of the Hessians
    route_all  every expert's Hessian is made of all tokens of the block, however many the router sends to it
    judged     each stage comes with the Hessian to judge it by, too
    hessian_bytes  of Hessians gathered in one look; at least one is
    """
    linears = block.linears
    experts = {name: number for number, pair in enumerate(block.experts) for name in pair}
    all_tokens: dict[Stage, int] = {}
    gathered = {stage.name for stage in stages if not (route_all and stage.name in experts)}
    for part in _passes(stages, gathered, linears, dtype, hessian_bytes, copies=1 + judged):
        observed = _observe(block, part, gathered, see, tokens, sensitivity, dtype, judged)
        heap.give_back()  # activations are gone, and solving has use for large blocks only
        for stage in part:
            seen, features = observed.pop(stage.name), linears[stage.linears[0]].in_features
            routed = seen.tokens if stage.name in experts else None
            if routed is not None and (route_all or routed < SHARED_BELOW * features):
                if route_all or routed >= NEAREST_BELOW * features:
                    all_tokens[stage] = routed
                else:
                    yield ReadyStage(stage.linears, None, 0, _few(routed, "rounded to nearest"), routed)
                continue
            unknown = sensitivity is not None and stage.name not in sensitivity.stages and seen.hessian is not None
            reason = UNKNOWN if unknown else None
            yield from (
                ReadyStage(own, found, seen.tokens, reason, routed, seen.judge)
                for own, found in _factored(seen.hessian, stage, linears, groups or {})
            )
    for stage, seen in _reached(block, list(all_tokens), see, tokens, dtype, hessian_bytes):
        routed = all_tokens[stage]
        reason = None if route_all else _few(routed, "solved with all tokens of its block")
        for own, found in _factored(seen.hessian, stage, linears, groups or {}, last=False):
            yield ReadyStage(own, found, seen.tokens, reason, routed)


def count_passes(
    block: Block, names: Container[str], dtype: torch.dtype, hessian_bytes: int, *, judged: bool = False
) -> int:
    """How often `ready_stages` looks at the text for all stages of a block, experts with few tokens aside."""
    stages = chosen_stages(block.stages(), names)
    gathered = {stage.name for stage in stages}
    return len(list(_passes(stages, gathered, block.linears, dtype, hessian_bytes, copies=1 + judged)))


def chosen_stages(stages: Iterable[Stage], names: Container[str]) -> list[Stage]:
    """Stages without the linears that stay dense."""
    kept = (Stage(stage.name, tuple(name for name in stage.linears if name in names)) for stage in stages)
    return [stage for stage in kept if stage.linears]


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """What one stage was given: the tokens, and their Hessians where they were gathered and there was any token."""

    tokens: int
    hessian: Tensor | None = None
    judge: Tensor | None = None


def _few(routed: int, instead: str) -> str:
    return f"only {routed} calibration tokens reached this expert: {instead}"


def _factored(
    hessian: Tensor | None,
    stage: Stage,
    linears: Mapping[str, Linear],
    groups: Mapping[str, Tensor],
    *,
    last: bool = True,
) -> Iterator[tuple[tuple[str, ...], Factor | None]]:
    """The linears of a stage that are rounded in one order, with the factor for it. With `last` the Hessian is given up
    for that of the last ones."""
    if hessian is None:
        yield stage.linears, None
        return
    rest = [name for name in stage.linears if name not in groups]
    left = [name for name in stage.linears if name in groups]
    if rest:
        order = _order(hessian, [linears[name] for name in rest])
        yield tuple(rest), factor(hessian, order, name=rest[0], last=last and not left)
    while left:
        own = [name for name in left if torch.equal(groups[name], groups[left[0]])]
        left = [name for name in left if name not in own]
        yield tuple(own), factor(hessian, grouped(hessian, groups[own[0]]), name=own[0], last=last and not left)


def _reached(
    block: Block,
    stages: Sequence[Stage],
    see: See,
    tokens: int,
    dtype: torch.dtype,
    hessian_bytes: int,
) -> Iterator[tuple[Stage, _Seen]]:
    """Stages of experts, observed with every token of the block. Those that read the block's states read the same ones,
    so one of them is observed for all."""
    experts = {name: number for number, pair in enumerate(block.experts) for name in pair}
    own_states = {output for _, output in block.experts}
    alike = [stage for stage in stages if stage.name not in own_states]
    first = alike[:1]
    observed_stages = [*first, *(stage for stage in stages if stage.name in own_states)]
    gathered = {stage.name for stage in observed_stages}
    for part in _passes(observed_stages, gathered, block.linears, dtype, hessian_bytes):
        reaching = block.reaching(experts[stage.name] for stage in part)
        observed = _observe(reaching, part, gathered, see, tokens, None, dtype)
        for stage in part:
            seen = observed.pop(stage.name)
            for one in alike if stage in first else [stage]:
                yield one, seen


def _order(hessian: Tensor, linears: Sequence[Linear]) -> Tensor | None:
    """The processing order where all these linears were quantized before, in the same groups; else None."""
    groups = [linear.stored.row_groups for linear in linears]
    first = groups[0]
    if first is None or not all(own is not None and torch.equal(own, first) for own in groups):
        return None
    return grouped(hessian, first)


def _passes(
    stages: Sequence[Stage],
    gathered: Container[str],
    linears: Mapping[str, Linear],
    dtype: torch.dtype,
    hessian_bytes: int,
    copies: int = 1,
) -> Iterator[list[Stage]]:
    """Stages whose Hessians, where they are to be gathered, fit into memory together."""

    def size(stage: Stage) -> int:
        features = linears[stage.linears[0]].in_features
        return copies * gathering_bytes(features, dtype.itemsize) if stage.name in gathered else 0

    return in_passes(stages, size, hessian_bytes)


def in_passes(stages: Iterable[Gathered], size: Callable[[Gathered], int], limit: int) -> Iterator[list[Gathered]]:
    """As many stages at a time, in their order, as `limit` bytes hold together; at least one."""
    part: list[Gathered] = []
    held = 0
    for stage in stages:
        own = size(stage)
        if part and held + own > limit:
            yield part
            part, held = [], 0
        part.append(stage)
        held += own
    if part:
        yield part


def _observe(
    block: Block,
    stages: Sequence[Stage],
    gathered: Container[str],
    see: See,
    tokens: int,
    sensitivity: Sensitivity | None,
    dtype: torch.dtype,
    judged: bool = False,
) -> dict[str, _Seen]:
    """One look at the calibration text: what each of the stages was given, with Hessians of those in `gathered`."""
    gathering: dict[str, list[_Gathering]] = {}
    for stage in stages:
        if stage.name not in gathered:
            continue
        first = block.linears[stage.linears[0]]
        weights = [None if sensitivity is None else sensitivity.counts(stage.name, tokens)]
        if judged and sensitivity is not None and weights[0] is not None:
            weights.append(sensitivity.counts(stage.name, tokens, share=1.0))
        gathering[stage.name] = [_Gathering.of(first, counts, dtype) for counts in weights]
    shown: Counter[str] = Counter()

    def observe(start: int, seen: Activations) -> None:
        name = seen.stage.name
        shown[name] += len(seen.inputs)
        for one in gathering.get(name, ()):
            one.add(seen, start)

    see(block, observe)
    return {
        stage.name: _Seen(shown[stage.name], *(one.finish() for one in gathering.pop(stage.name, ())))
        for stage in stages
    }


@dataclass(slots=True, eq=False)
class _Gathering:
    """One Hessian on its way. `counts`: how often each token of the text is in it, or None where its norm says that."""

    hessian: Hessian
    counts: Tensor | None
    any: bool = False

    @classmethod
    def of(cls, linear: Linear, counts: Tensor | None, dtype: torch.dtype) -> "_Gathering":
        share = TOKEN_SHARE if counts is None else 0.0
        counts = None if counts is None else counts.to(linear.device)
        hessian = Hessian(linear.in_features, linear.name, token_share=share, device=linear.device, dtype=dtype)
        return cls(hessian, counts)

    def add(self, seen: Activations, start: int) -> None:
        """`start`: where the first token of this batch is in the text. Tokens that do not count are left out."""
        inputs, counts = seen.inputs, None
        if self.counts is not None:
            end = start + len(inputs)
            counts = self.counts[start:end] if seen.tokens is None else self.counts[start + seen.tokens]
            if not bool(counts.all()):
                inputs, counts = inputs[counts > 0], counts[counts > 0]
        if len(inputs):
            self.any = True
            self.hessian.add(inputs, counts)

    def finish(self) -> Tensor | None:
        """None where there was no token."""
        return self.hessian.finish() if self.any else None
