"""One block: solve its linears with the Hessians of their inputs, stage after stage."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from quantkit import heap
from quantkit.calibration.sensitivity import Sensitivity
from quantkit.calibration.stream import ActivationStream
from quantkit.commands.quantization.hessians import HESSIAN_BYTES, ReadyStage, chosen_stages, ready_head, ready_stages
from quantkit.commands.quantization.passage import Passage
from quantkit.commands.quantization.report import LinearResult
from quantkit.errors import FormatError, GateError
from quantkit.formats.codec import Codec, Codes, StoredTensor
from quantkit.formats.dense import DenseTensor
from quantkit.models.legs import legs_of
from quantkit.models.linear import Linear
from quantkit.models.transformer import Block, Head
from quantkit.solver.gptq import solve_together
from quantkit.solver.inverse import DAMPING
from quantkit.solver.outputs import Chunk, factor_outputs
from quantkit.solver.parts import solve_in_parts
from quantkit.solver.replaced import relative_error

Before = Callable[[str], Tensor]
"""The weight that a linear has so far, by its name: floats `[in, out]`."""


@dataclass(frozen=True, slots=True, eq=False)
class SolvedLinear:
    """What goes to the disk, the codes that it was made of, and what the report says of it."""

    stored: StoredTensor
    codes: Codes
    result: LinearResult

    def weight(self) -> Tensor:
        """What it must decode to, float32 `[in, out]`: made anew at each call, as it takes several times the codes."""
        return self.codes.dequantize()


def solve_block(
    block: Block,
    passage: Passage,
    codecs: Mapping[str, Codec],
    sensitivity: Sensitivity | None = None,
    *,
    hessian_dtype: torch.dtype = torch.float32,
    route_all: bool = False,
    hessian_bytes: int = HESSIAN_BYTES,
    apart: bool = False,
    before: Before | None = None,
) -> Iterator[SolvedLinear]:
    """Solve the linears of `block` that have a codec, stage after stage, each for what the stages before it give once
    they are rounded. `block` has each of them as readers of the file will, as soon as the next is asked for.

    passage      the text before the block, which goes through it
    sensitivity  of the first rows of this text: what tokens matter. Without it, as well as for experts that none of its
                 tokens reached, Hessians are mixed with token-normalised ones.
    route_all    see `ready_stages`; so are the dtype of the Hessians and their bytes
    apart        linears that read one input are solved one by one, where the codec allows it some outputs at a time:
                 the same, in less memory and more time
    before       where linears are solved again: what its error is by the same Hessian is found too

    Raises CalibrationError for inputs that are not finite, FormatError for weights that the codec cannot hold.
    """
    groups = {
        name: whole
        for name, linear in block.linears.items()
        if name in codecs and (whole := codecs[name].whole_groups(linear.in_features)) is not None
    }
    known = {} if sensitivity is None else sensitivity.covariances
    chosen = [(leg, chosen_stages(leg.stages, codecs)) for leg in legs_of(block)]
    while chosen and not chosen[-1][1]:
        chosen.pop()
    for leg, stages in chosen:
        passage.go(block, leg)
        ready_ones = ready_stages(
            block,
            stages,
            passage.see,
            passage.tokens,
            sensitivity,
            groups,
            dtype=hessian_dtype,
            route_all=route_all,
            hessian_bytes=hessian_bytes,
        )
        for ready in ready_ones:
            for names in [(name,) for name in ready.names] if apart else [ready.names]:
                own = replace(ready, names=names)
                for solved in solve_stage(block.linears, own, codecs, known, apart=apart, before=before):
                    yield solved
                    round_linear(block.linears[solved.result.name], solved.stored)
                    del solved  # as the factor below, while others are made
                if apart:
                    heap.give_back()
            del ready, own


def round_linear(linear: Linear, stored: StoredTensor) -> None:
    """Let a linear of a block be as the readers of the file will have it, and forget what it was."""
    linear.replace(DenseTensor(stored.dequantize().T, stored.bias))
    linear.settle()


def round_block(
    block: Block, codecs: Mapping[str, Codec], before: Before | None = None
) -> Iterator[SolvedLinear]:
    """Round the linears of `block` that have a codec to nearest. Raises FormatError as `solve_block` does."""
    for stage in chosen_stages(block.stages(), codecs):
        yield from solve_stage(block.linears, ReadyStage(stage.linears, None, 0), codecs, before=before)


def solve_head(
    head: Head,
    stream: ActivationStream | None,
    codecs: Mapping[str, Codec],
    *,
    hessian_dtype: torch.dtype = torch.float32,
    before: Before | None = None,
    apart: bool = False,
) -> SolvedLinear:
    """Solve the output linear for the states behind the last block; without them round it to nearest. `apart` and what
    is raised as for `solve_block`."""
    linear = head.linear
    if stream is None:
        ready = ReadyStage((linear.name,), None, 0)
    else:
        ready = ready_head(head, stream, codecs[linear.name].whole_groups(linear.in_features), hessian_dtype)
    (solved,) = solve_stage({linear.name: linear}, ready, codecs, apart=apart, before=before)
    return solved


def solve_stage(
    linears: Mapping[str, Linear],
    ready: ReadyStage,
    codecs: Mapping[str, Codec],
    covariances: Mapping[str, Sequence[Tensor]] = MappingProxyType({}),
    *,
    apart: bool = False,
    before: Before | None = None,
) -> Iterator[SolvedLinear]:
    """Solve linears that read one input, those of equal codecs side by side.

    covariances  of the gradients at their outputs, where they are known; see `Sensitivity`
    apart        a linear that is alone here is solved some outputs at a time, where its codec allows that
    before       see `solve_block`
    """
    found = ready.factor
    fallback = (found and found.fallback) or ready.fallback
    alike: dict[Codec, list[str]] = {}
    for name in ready.names:
        alike.setdefault(codecs[name], []).append(name)
    for codec, names in alike.items():
        with naming("`, `".join(names)):
            outputs = _outputs(names, covariances, linears[names[0]].device)
            if apart and len(names) == 1 and found is not None and codec.columns_alone:
                linear = linears[names[0]]
                chunks = outputs[0] if outputs else None
                solutions = [solve_in_parts(linear.columns, linear.out_features, found, codec, chunks)]
            else:  # weights without a name here: they are in memory no longer than they are solved
                solutions = solve_together([linears[name].weight() for name in names], found, codec, outputs)
        for name, solution in zip(names, solutions, strict=True):
            with naming(name):
                codes = solution.codes.to("cpu")  # whatever has solved them: files are written from main memory
                stored = codec.encode(codes, linears[name].stored.bias)
            _require_finite(name, stored, solution.error)
            layout = codes.layout
            result = LinearResult(
                name=name,
                bits=layout.code_bits(1) / layout.rows,
                bits_per_weight=stored.bits_per_weight,
                error=solution.error,
                tokens=ready.tokens,
                routed=ready.routed,
                error_before=None if before is None else relative_error(linears[name].columns, before(name), found),
                damping=None if found is None else found.damping,
                extra_damping=found is not None and found.damping > DAMPING,
                dead_inputs=0 if found is None else found.dead_inputs,
                fallback=fallback,
            )
            yield SolvedLinear(stored, codes, result)


def _outputs(
    names: Sequence[str], covariances: Mapping[str, Sequence[Tensor]], device: torch.device
) -> list[tuple[Chunk, ...]] | None:
    """None where the gradients say nothing of one of the linears."""
    chunks = [
        factor_outputs([chunk.to(device) for chunk in covariances[name]]) for name in names if name in covariances
    ]
    known = [found for found in chunks if found is not None]
    return known if len(known) == len(names) else None


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
