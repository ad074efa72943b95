"""`--max-memory`: the budget that keeps a process below a limit, from the shapes of the model, known before any work.

Smaller batches, one Hessian at a time and states in files take more time; the bytes of the result stay the same. What
is said here of memory was held to what was seen: docs/results/memory-limit.md.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from quantkit import heap
from quantkit.calibration.gradients import BATCH_TOKENS, LOGITS_AT_ONCE
from quantkit.calibration.hessian import gathering_bytes
from quantkit.calibration.sensitivity import CHUNK_OUTPUTS
from quantkit.commands.block_hessians import in_passes
from quantkit.commands.effort import Effort
from quantkit.commands.memory_budget import DEFAULT, SPILL_BYTES, WALK_TOKENS, Budget
from quantkit.commands.quantize_job import Subject
from quantkit.errors import CalibrationError, UsageError
from quantkit.heap import resident
from quantkit.models.architecture import LinearSpec, by_stage
from quantkit.progress import Progress
from quantkit.settings import QuantizeSettings
from quantkit.solver.gptq import SUMMED_COLUMNS
from quantkit.solver.parts import PART_OUTPUTS

SINGLE = 4
"""Bytes of a float32."""
MIB = 1 << 20
WORKING_BYTES = 224 * MIB
"""Compiled kernels, buffers of libraries, and what is freed but not given back: what was seen above the rest."""
SPARING_WORKING_BYTES = 128 * MIB
"""The same where what is freed is given back at once."""
SOLVED_BYTES = 14
"""Of a weight that is solved alone: as read, in order, its error, each float32; its code, and the file's bits."""
MADE_BYTES = 6
"""Of one that has been solved: its code, the value, and the file's bits."""


def within_memory(
    subject: Subject, settings: QuantizeSettings, effort: Effort, hessian_dtype: torch.dtype, progress: Progress
) -> Subject:
    """The subject of a quantization, with a budget that keeps to `settings.max_memory`, told to people where it is less
    than usual. Raises UsageError for what the limit is not held over, CalibrationError as `limited` does."""
    if settings.max_memory is None:
        return subject
    if effort.tunes:
        raise UsageError("`--max-memory` does not hold for tuning", hint="use `--effort default` with it")
    if settings.evaluate:
        raise UsageError("`--max-memory` does not hold for the comparison at the end", hint="add `--no-eval`")
    planned = settings.plan is not None or settings.measurement is not None or settings.redo is not None
    measures = settings.format == "exl2" and not planned
    subject = limited(
        subject,
        settings.max_memory,
        weighs=effort.weighs or measures,
        measures=measures,
        hessian_bytes=hessian_dtype.itemsize,
        alone=settings.format == "gptq",
    )
    if subject.budget != DEFAULT:
        apart = ", linears and their Hessians one by one" if subject.budget.apart else ""
        progress.say(f"memory: batches of {subject.budget.walk_tokens} tokens{apart}")
    return subject


def tell_excess(limit: int | None, taken: int, progress: Progress) -> None:
    """Says so where the process took more than it was allowed after all."""
    if limit is not None and taken > limit:
        progress.say(f"note: `--max-memory` was exceeded: {taken // MIB} MiB were taken, {limit // MIB} MiB allowed")


@contextmanager
def heap_settled_after(limit: int | None) -> Iterator[None]:
    """What else the caller's process does is under no limit: its heap is sparing no longer than the work inside."""
    try:
        yield
    finally:
        if limit is not None:
            heap.settle()


def limited(
    subject: Subject,
    limit: int | None,
    *,
    weighs: bool,
    measures: bool = False,
    hessian_bytes: int = SINGLE,
    alone: bool = False,
) -> Subject:
    """The subject with the roomiest budget that stays below `limit` bytes. Where that is not the default, the heap of
    this process gives back what is freed at once from now on.

    measures       layouts are judged, each stage by a second Hessian
    hessian_bytes  of a number of a Hessian
    alone          a linear can be solved some outputs at a time
    Raises CalibrationError, with the least change that helps, where none does.
    """
    if limit is None:
        return subject
    heap.give_back()
    before = resident()
    needs = 0
    for budget in budgets(subject):
        needs = before + peak(
            replace(subject, budget=budget),
            weighs=weighs,
            measures=measures,
            hessian_bytes=hessian_bytes,
            alone=alone,
        )
        if needs <= limit:
            if budget != DEFAULT:
                heap.spare()
            return replace(subject, budget=budget)
    shorter = subject.rows.shape[1] // 2 if subject.rows.numel() else 0
    other = f", or shorter rows with `--length {shorter}`" if shorter >= 64 else ""
    raise CalibrationError(
        f"`--max-memory {limit // MIB}MiB` is not enough: at least {math.ceil(needs / MIB)} MiB are needed, "
        f"{before // MIB} MiB of them before any work",
        hint=f"use `--max-memory {math.ceil(needs / MIB)}MiB`{other}",
    )


def budgets(subject: Subject) -> Iterator[Budget]:
    """From the one that is taken without a limit to the least."""
    yield DEFAULT
    row = max(1, subject.rows.shape[1])
    for step in range(1, 12):
        share = 1 << step
        yield Budget(
            walk_tokens=max(row, WALK_TOKENS // share),
            backward_tokens=max(row, BATCH_TOKENS // share),
            logits_at_once=max(1 << 20, LOGITS_AT_ONCE // share),
            hessian_bytes=0 if step > 1 else DEFAULT.hessian_bytes,
            spill_bytes=0 if step > 1 else SPILL_BYTES,
            apart=step > 1,
        )


def peak(
    subject: Subject, *, weighs: bool, measures: bool = False, hessian_bytes: int = SINGLE, alone: bool = False
) -> int:
    """What the work takes above what the process has, at its worst moment."""
    blocks = {tuple(_shapes(stages)): stages for stages in _blocks(subject)}
    moments = [_ends(subject, weighs=weighs)]
    for stages in blocks.values():
        kept = _kept(stages, weighs=weighs)
        moments += [kept + each for each in _solving(subject, stages, hessian_bytes, 1 + measures, alone=alone)]
        if weighs:
            moments.append(_backward(subject, stages))
    return max(moments) + (SPARING_WORKING_BYTES if subject.budget.apart else WORKING_BYTES)


def _blocks(subject: Subject) -> Iterator[list[list[LinearSpec]]]:
    config, architecture = subject.config, subject.architecture
    for layer in range(config.num_layers):
        yield by_stage(architecture.block_linears(config, layer))


def _shapes(stages: Sequence[Sequence[LinearSpec]]) -> Iterator[tuple[int, int]]:
    return ((spec.in_features, spec.out_features) for stage in stages for spec in stage)


def _weights(stages: Sequence[Sequence[LinearSpec]], subject: Subject) -> int:
    """Of a block, as it is stored and as it runs."""
    stored = max(1, subject.stored_bits[stages[0][0].name] // 8 // max(1, _size(stages[0][0])))
    runs = subject.placement.dtype.itemsize
    return sum(map(_size, (spec for stage in stages for spec in stage))) * (stored + (runs if runs != stored else 0))


def _size(spec: LinearSpec) -> int:
    return spec.in_features * spec.out_features


def _kept(stages: Sequence[Sequence[LinearSpec]], *, weighs: bool) -> int:
    """While a block is solved: what has been made of it so far, and covariances of its outputs."""
    specs = [spec for stage in stages for spec in stage]
    covariances = torch.bfloat16.itemsize * CHUNK_OUTPUTS * sum(spec.out_features for spec in specs)
    return sum(map(_size, specs)) // 2 + (covariances if weighs else 0)


def _solving(
    subject: Subject, stages: Sequence[Sequence[LinearSpec]], hessian_bytes: int, copies: int, *, alone: bool
) -> Iterator[int]:
    """Gathering the Hessians of a pass, `copies` for each stage, then factoring and solving each of its stages."""
    budget, block = subject.budget, _weights(stages, subject)
    width = subject.config.hidden_size
    widest = max(spec.out_features for stage in stages for spec in stage)
    tokens = min(max(budget.walk_tokens, subject.rows.shape[1]), max(1, subject.rows.numel()))
    activations = tokens * (6 * SINGLE * width + 4 * subject.placement.dtype.itemsize * widest)
    if not subject.rows.numel():
        yield block + 5 * SINGLE * max(_size(spec) for stage in stages for spec in stage)
        return
    for part in in_passes(stages, lambda stage: _hessian(stage, copies * hessian_bytes), budget.hessian_bytes):
        held = sum(_hessian(stage, copies * hessian_bytes) for stage in part)
        yield block + activations + held
        for stage in part:
            rest, features = held - _hessian(stage, copies * hessian_bytes), stage[0].in_features
            square = features * features
            judge = square * hessian_bytes * (copies - 1)
            yield block + rest + judge + square * (hessian_bytes + (SINGLE if hessian_bytes > SINGLE else 0))
            yield block + rest + judge + square * SINGLE + _solved(stage, budget.apart, alone)
            held = rest


def _solved(stage: Sequence[LinearSpec], apart: bool, alone: bool) -> int:
    """Beside the factor: the weights, what is known of their outputs, and of some columns squares and errors."""
    together = (max if apart else sum)(map(_size, stage))
    outputs = (max if apart else sum)(spec.out_features for spec in stage)
    each, inputs = SOLVED_BYTES if apart else 5 * SINGLE, stage[0].in_features
    weights = each * together
    if apart and alone:
        weights = max(MADE_BYTES * together, each * inputs * min(PART_OUTPUTS, outputs) + together)
    return weights + 3 * SINGLE * CHUNK_OUTPUTS * outputs + 3 * SINGLE * SUMMED_COLUMNS * inputs


def _hessian(stage: Sequence[LinearSpec], hessian_bytes: int) -> int:
    return gathering_bytes(stage[0].in_features, hessian_bytes)


def _backward(subject: Subject, stages: Sequence[Sequence[LinearSpec]]) -> int:
    """A block with all that autograd keeps of a batch, its gradients, and the covariances of its outputs."""
    budget = subject.budget
    tokens = min(max(budget.backward_tokens, subject.rows.shape[1]), max(1, subject.rows.numel()))
    each = 20 * SINGLE * subject.config.hidden_size
    for stage in stages[:16]:  # of a mixture, a token runs through a few experts
        each += 2 * SINGLE * stage[0].in_features + (SINGLE + 2 * 2) * sum(spec.out_features for spec in stage)
    covariances = SINGLE * CHUNK_OUTPUTS * sum(spec.out_features for stage in stages for spec in stage)
    return _weights(stages, subject) + tokens * each + covariances * 3 // 2 + _states(subject)


def _ends(subject: Subject, *, weighs: bool) -> int:
    """Embedding and head, and the logits that gradients begin with."""
    table = subject.config.vocab_size * subject.config.hidden_size
    itemsize = max(subject.placement.dtype.itemsize, torch.bfloat16.itemsize)
    logits = 16 * min(subject.budget.logits_at_once, subject.backward_rows.numel() * subject.config.vocab_size)
    return 2 * table * itemsize + (logits + _states(subject) if weighs else 0)


def _states(subject: Subject) -> int:
    return 0 if subject.backward_spilled_bytes else subject.backward_bytes
