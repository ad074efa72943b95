"""One block measured: each of its linears solved as each candidate, and what its outputs lose weighed."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration.sensitivity import Sensitivity
from quantkit.calibration.stream import ActivationStream
from quantkit.commands.quantization.block import naming
from quantkit.commands.quantization.fallback import Descent, rows_at_once, run_in_parts
from quantkit.commands.quantization.hessians import ReadyStage, chosen_stages, ready_stages
from quantkit.commands.quantization.job import Subject, rotary_of
from quantkit.commands.quantization.passage import whole_block
from quantkit.formats.codec import Codec, Codes
from quantkit.measurement import Candidate, MeasuredLinear
from quantkit.models.architecture import LinearSpec
from quantkit.models.linear import Linear
from quantkit.models.transformer import Block, Rotary, load_block
from quantkit.plan import kind_of
from quantkit.progress import Task
from quantkit.solver.gptq import find_energies, solve_together


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to store one linear: `bits` on disk, side data and bias included."""

    codec: Codec
    bits: int


Trials = Mapping[str, Mapping[str, Trial]]
"""Linear → what a candidate is called → how it is solved. Linears that read one input have the same codecs."""


class BlockMeasured:
    """One block, on whatever device there is room: `found` grows linear by linear, `kept` with it."""

    def __init__(
        self,
        subject: Subject,
        index: int,
        specs: Mapping[str, LinearSpec],
        trials: Trials,
        squares: Mapping[str, Tensor],
        kept: Mapping[str, str],
        task: Task,
    ) -> None:
        self.found: dict[str, MeasuredLinear] = {}
        self.kept = Kept(kept)
        self._index, self._specs, self._trials, self._squares, self._task = index, specs, trials, squares, task
        self._runs: tuple[str, Block, Rotary] | None = None

    def solve(
        self,
        stream: ActivationStream,
        wanted: Container[str],
        sensitivity: Sensitivity,
        subject: Subject,
    ) -> None:
        """Its linears among those that are wanted, but those that are measured already."""
        block, rotary = self._loaded(subject)
        left = {name for name in block.linears if name in wanted and name not in self.found}
        stages = ready_stages(
            block,
            chosen_stages(block.stages(), left),
            whole_block(rows_at_once(stream, subject), rotary),
            stream.tokens,
            sensitivity,
            judged=True,
            hessian_bytes=subject.budget.hessian_bytes,
        )
        for ready in stages:
            measured = measure_stage(block.linears, ready, self._trials, self._squares, self.kept)
            for name, candidates in measured.items():
                spec = self._specs[name]
                self.found[name] = MeasuredLinear(name, spec.in_features, spec.out_features, candidates)
                self._task.advance(note=f"block {self._index}, {kind_of(name)}")

    def leave(self, stream: ActivationStream, descent: Descent, folder: Path) -> ActivationStream:
        """The states behind the block, from those before it."""
        return stream.follow(
            lambda hidden: descent.run(partial(self._run, hidden)), f"block {self._index}", folder=folder
        )

    def _run(self, hidden: Tensor, subject: Subject) -> Tensor:
        """The block's answer to states `[b, s, hidden]`, in main memory."""
        block, rotary = self._loaded(subject)
        return run_in_parts(block, hidden, rotary, subject)

    def forget(self) -> None:
        """The block; nothing more is to come."""
        self._runs = None

    def _loaded(self, subject: Subject) -> tuple[Block, Rotary]:
        placement = subject.placement
        if self._runs is None or self._runs[0] != placement.device:
            self._runs = None
            place = subject.checkpoint, subject.config, subject.architecture
            block = load_block(*place, self._index, placement.dtype, placement.device)
            self._runs = placement.device, block, rotary_of(subject)
        return self._runs[1:]


class Kept:
    """Linears of a block, each as the candidate that is asked for: `tensors` by name on disk."""

    def __init__(self, wanted: Mapping[str, str]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._wanted = wanted

    def add(self, linear: Linear, candidate: str, codec: Codec, codes: Codes) -> None:
        if self._wanted.get(linear.name) == candidate:
            stored = codec.encode(codes.to("cpu"), linear.stored.bias)
            self.tensors |= {f"{linear.name}.{suffix}": tensor for suffix, tensor in stored.tensors().items()}


def measure_stage(
    linears: Mapping[str, Linear],
    ready: ReadyStage,
    trials: Trials,
    squares: Mapping[str, Tensor],
    kept: Kept,
) -> dict[str, tuple[Candidate, ...]]:
    """Linears that read one input, solved side by side as one candidate after another.

    Judged by the Hessian of the tokens whose gradients they are: in that of all tokens a few of huge norm, which hardly
    matter to the predictions, can outweigh the rest.
    """
    weights = [linears[name].weight() for name in ready.names]
    trace = float(len(weights[0])) if ready.factor is None else ready.factor.trace
    if ready.judge is not None:
        trace = float(ready.judge.trace())
    energies = None if ready.factor is None else find_energies(weights, ready.factor)
    found: dict[str, list[Candidate]] = {name: [] for name in ready.names}
    for candidate, trial in trials[ready.names[0]].items():
        with naming(ready.names[0]):
            solutions = solve_together(weights, ready.factor, trial.codec, energies=energies)
        for name, weight, solution in zip(ready.names, weights, solutions, strict=True):
            losses = solution.losses
            if ready.judge is not None:
                error = weight - solution.codes.dequantize()
                losses = (error * (ready.judge @ error)).sum(0, dtype=torch.float64)
            damage = 0.5 * float((losses.cpu() * squares[name]).sum()) / trace
            found[name].append(Candidate(candidate, trials[name][candidate].bits, solution.error, damage))
            kept.add(linears[name], candidate, trial.codec, solution.codes)
    return {name: tuple(candidates) for name, candidates in found.items()}
