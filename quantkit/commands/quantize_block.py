"""One block: run it over the calibration text, gather the Hessians of its inputs, solve its linears.

All Hessians of a block come from the block as it is before anything in it is rounded, so one pass is enough; where
they would not fit into `HESSIAN_BYTES` together, they are gathered in several passes with the same result. An expert
that saw too few tokens for a Hessian of its own is solved with that of all experts of the block.
"""

import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantkit.calibration.hessian import CHUNK_TOKENS, TOKEN_SHARE, Hessian
from quantkit.calibration.sensitivity import Sensitivity
from quantkit.calibration.stream import ActivationStream
from quantkit.commands.quantize_report import LinearResult
from quantkit.errors import FormatError, GateError
from quantkit.formats.codec import Codec, StoredTensor
from quantkit.models.architecture import Stage
from quantkit.models.fan import Activations
from quantkit.models.linear import Linear
from quantkit.models.transformer import Block, Head, Rotary
from quantkit.plan import kind_of
from quantkit.solver.gptq import solve_together
from quantkit.solver.inverse import DAMPING, Factor, factor, grouped

HESSIAN_BYTES = 2 << 30
FEWEST_TOKENS_PER_INPUT = 0.25
"""An expert with fewer tokens than a quarter of its input features gets the Hessian of all experts of its block."""

UNKNOWN = "no token of the backward pass reached this expert: its Hessian is token-normalised instead"


@dataclass(frozen=True, slots=True, eq=False)
class SolvedLinear:
    """What goes to the disk, the float32 weight `[in, out]` that it must decode to, and what the report says of it."""

    stored: StoredTensor
    weight: Tensor
    result: LinearResult


@dataclass(frozen=True, slots=True, eq=False)
class ReadyStage:
    """Linears that read one input, and what a solver needs to know of it.

    factor    of their Hessian; None where no token reached them
    tokens    calibration tokens that did
    fallback  what the Hessian is, if not their own, in words
    """

    names: tuple[str, ...]
    factor: Factor | None
    tokens: int
    fallback: str | None = None


def solve_block(
    block: Block,
    stream: ActivationStream,
    rotary: Rotary,
    codecs: Mapping[str, Codec],
    sensitivity: Sensitivity | None = None,
) -> Iterator[SolvedLinear]:
    """Solve the linears of `block` that have a codec, stage after stage. The block itself is not changed.

    sensitivity  of the first rows of the text in `stream`: what tokens matter. Without it, as well as for experts that
                 none of its tokens reached, Hessians are mixed with token-normalised ones.

    Raises CalibrationError for inputs that are not finite, FormatError for weights that the codec cannot hold.
    """
    for ready in ready_stages(block, stream, rotary, codecs, sensitivity):
        yield from solve_stage(block.linears, ready, codecs)


def round_block(block: Block, codecs: Mapping[str, Codec]) -> Iterator[SolvedLinear]:
    """Round the linears of `block` that have a codec to nearest. Raises FormatError as `solve_block` does."""
    for stage in _chosen_stages(block, codecs):
        yield from solve_stage(block.linears, ReadyStage(stage.linears, None, 0), codecs)


def solve_head(head: Head, stream: ActivationStream | None, codecs: Mapping[str, Codec]) -> SolvedLinear:
    """Solve the output linear for the states behind the last block; without them round it to nearest. Raises as
    `solve_block` does."""
    linear = head.linear
    ready = ReadyStage((linear.name,), None, 0) if stream is None else _ready_head(head, stream)
    (solved,) = solve_stage({linear.name: linear}, ready, codecs)
    return solved


def _ready_head(head: Head, stream: ActivationStream) -> ReadyStage:
    linear, tokens = head.linear, 0
    hessian = Hessian(linear.in_features, linear.name, token_share=TOKEN_SHARE, device=linear.device)
    for hidden in stream.batches():
        rows = head.norm(hidden.to(linear.device)).flatten(0, 1)
        hessian.add(rows)
        tokens += len(rows)
    return ReadyStage((linear.name,), factor(hessian.finish(), name=linear.name), tokens)


def ready_stages(
    block: Block,
    stream: ActivationStream,
    rotary: Rotary,
    names: Container[str],
    sensitivity: Sensitivity | None = None,
) -> Iterator[ReadyStage]:
    """The stages of `block`, only linears among `names` in them, each with the factor of its Hessian."""
    linears = block.linears
    stages = _chosen_stages(block, names)
    siblings = Counter(kind_of(stage.name) for stage in stages)
    pools: dict[str, _Pool] = {}
    starved: list[tuple[Stage, int]] = []
    for part in _passes(stages, linears):
        observed = _observe(block, part, stream, rotary, sensitivity)
        for stage in part:
            kind, (hessian, tokens) = kind_of(stage.name), observed.pop(stage.name)
            if siblings[kind] > 1:
                pools.setdefault(kind, _Pool()).add(hessian, tokens)
                if tokens < FEWEST_TOKENS_PER_INPUT * linears[stage.linears[0]].in_features:
                    starved.append((stage, tokens))
                    continue
            found = None if hessian is None else factor(hessian, _order(hessian, stage, linears), name=stage.linears[0])
            del hessian
            unknown = sensitivity is not None and stage.name not in sensitivity.stages
            yield ReadyStage(stage.linears, found, tokens, UNKNOWN if found and unknown else None)
    for stage, tokens in starved:
        shared = pools[kind_of(stage.name)].mean()
        found = None if shared is None else factor(shared, _order(shared, stage, linears), name=stage.linears[0])
        instead = "rounded to nearest" if found is None else "solved with the inputs of all experts of its block"
        reason = f"only {tokens} calibration tokens reached this expert: {instead}"
        yield ReadyStage(stage.linears, found, tokens, reason)


class _Pool:
    """The mean Hessian of sibling stages, each scaled to a unit mean diagonal and counted by its tokens."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._tokens = 0

    def add(self, hessian: Tensor | None, tokens: int) -> None:
        if hessian is not None:
            self._sum = torch.zeros_like(hessian) if self._sum is None else self._sum
            self._sum.add_(hessian, alpha=tokens / (float(hessian.diagonal().mean()) or 1.0))
            self._tokens += tokens

    def mean(self) -> Tensor | None:
        return None if self._sum is None else self._sum / self._tokens


def _order(hessian: Tensor, stage: Stage, linears: Mapping[str, Linear]) -> Tensor | None:
    """The processing order where all linears of a stage were quantized before, in the same groups; else None."""
    groups = [linears[name].stored.row_groups for name in stage.linears]
    first = groups[0]
    if first is None or not all(own is not None and torch.equal(own, first) for own in groups):
        return None
    return grouped(hessian, first)


def _chosen_stages(block: Block, names: Container[str]) -> list[Stage]:
    """The stages of a block without the linears that stay dense."""
    kept = (Stage(stage.name, tuple(name for name in stage.linears if name in names)) for stage in block.stages())
    return [stage for stage in kept if stage.linears]


def _passes(stages: Sequence[Stage], linears: Mapping[str, Linear]) -> Iterator[list[Stage]]:
    """Stages whose Hessians fit into memory together."""
    part: list[Stage] = []
    held = 0
    for stage in stages:
        features = linears[stage.linears[0]].in_features
        size = 4 * features * (features + CHUNK_TOKENS)
        if part and held + size > HESSIAN_BYTES:
            yield part
            part, held = [], 0
        part.append(stage)
        held += size
    if part:
        yield part


def _observe(
    block: Block,
    stages: Sequence[Stage],
    stream: ActivationStream,
    rotary: Rotary,
    sensitivity: Sensitivity | None,
) -> dict[str, tuple[Tensor | None, int]]:
    """One pass over the calibration text: the Hessian of each stage, None where no token reached it, and the tokens."""
    linears = block.linears
    hessians: dict[str, Hessian] = {}
    counts: dict[str, Tensor | None] = {}
    for stage in stages:
        first = linears[stage.linears[0]]
        counts[stage.name] = None if sensitivity is None else sensitivity.counts(stage.name, stream.tokens)
        share = TOKEN_SHARE if counts[stage.name] is None else 0.0
        hessians[stage.name] = Hessian(first.in_features, first.name, token_share=share, device=first.device)
    tokens: Counter[str] = Counter()

    def observe(start: int, seen: Activations) -> None:
        name = seen.stage.name
        if name in hessians:
            known = counts[name]
            if known is not None:
                known = known[start : start + len(seen.inputs)] if seen.tokens is None else known[start + seen.tokens]
            hessians[name].add(seen.inputs, known)
            tokens[name] += len(seen.inputs)

    start = 0
    for hidden in stream.batches():
        block.forward(hidden, rotary, observe=partial(observe, start))
        start += hidden.shape[0] * hidden.shape[1]
    return {name: (hessian.finish() if tokens[name] else None, tokens[name]) for name, hessian in hessians.items()}


def solve_stage(
    linears: Mapping[str, Linear], ready: ReadyStage, codecs: Mapping[str, Codec]
) -> Iterator[SolvedLinear]:
    """Solve linears that read one input, those of equal codecs side by side."""
    found = ready.factor
    fallback = (found and found.fallback) or ready.fallback
    alike: dict[Codec, list[str]] = {}
    for name in ready.names:
        alike.setdefault(codecs[name], []).append(name)
    for codec, names in alike.items():
        with naming("`, `".join(names)):
            solutions = solve_together([linears[name].weight() for name in names], found, codec)
        for name, solution in zip(names, solutions, strict=True):
            with naming(name):
                stored = codec.encode(solution.codes, linears[name].stored.bias)
            _require_finite(name, stored, solution.error)
            layout = solution.codes.layout
            result = LinearResult(
                name=name,
                bits=layout.code_bits(1) / layout.rows,
                bits_per_weight=stored.bits_per_weight,
                error=solution.error,
                tokens=ready.tokens,
                damping=None if found is None else found.damping,
                extra_damping=found is not None and found.damping > DAMPING,
                dead_inputs=0 if found is None else found.dead_inputs,
                fallback=fallback,
            )
            yield SolvedLinear(stored, solution.codes.dequantize(), result)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """A codec knows no names: what it refuses gets that of the linear."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"`{name}`: {error.message}", hint=error.hint) from error


def _require_finite(name: str, stored: StoredTensor, error: float) -> None:
    for suffix, tensor in stored.tensors().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise FormatError(
                f"`{name}.{suffix}` has values beyond ±65504, which float16 cannot hold",
                hint="leave this model unquantized, or look for a version with smaller weights",
            )
    if not math.isfinite(error):
        raise GateError(f"the error of `{name}` after quantizing is {error}", hint="use `--dtype fp32`")
