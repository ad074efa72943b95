"""`--max-memory`: the budget that keeps a process below a limit, from the shapes of the model, known before any work.

Smaller batches, one Hessian at a time and states in files take more time; the bytes of the result stay the same, but
for what `FEW_TOKENS` says of mixtures and `FEW_PREDICTIONS` of gradients. What is said here of memory was held to what
was seen: docs/results/memory-limit.md. On a GPU the limit is what is free there, and what does not fit is done on the
CPU.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from quantkit import heap
from quantkit.calibration.gradients import BATCH_TOKENS, LOGITS_AT_ONCE
from quantkit.commands.quantization.effort import EFFORTS, UNTUNED, Effort
from quantkit.commands.quantization.fallback import levels
from quantkit.commands.quantization.job import Subject, on_gpu
from quantkit.commands.quantization.memory_budget import (
    DEFAULT,
    FEW_PREDICTIONS,
    FEW_TOKENS,
    SPILL_BYTES,
    WALK_TOKENS,
    Budget,
)
from quantkit.commands.quantization.memory_estimate import SINGLE, device_peak, peak
from quantkit.errors import CalibrationError, UsageError
from quantkit.heap import resident
from quantkit.progress import NOBODY, Progress
from quantkit.settings import QuantizeSettings

MIB = 1 << 20


def within_memory(
    subject: Subject, settings: QuantizeSettings, effort: Effort, hessian_dtype: torch.dtype, progress: Progress
) -> Subject:
    """The subject of a quantization, with a budget that keeps to `settings.max_memory`, told to people where it is less
    than usual. Raises UsageError for what the limit is not held over, CalibrationError as `limited` does."""
    if settings.max_memory is None and not on_gpu(subject.placement):
        return subject
    if settings.max_memory is not None and settings.evaluate:
        raise UsageError("`--max-memory` does not hold for the comparison at the end", hint="add `--no-eval`")
    planned = settings.plan is not None or settings.measurement is not None or settings.redo is not None
    measures = bool(settings.free_widths) or (settings.format == "exl2" and not planned)
    subject = limited(
        subject,
        settings.max_memory,
        weighs=effort.weighs or measures,
        measures=measures,
        hessian_bytes=hessian_dtype.itemsize,
        alone=settings.format == "gptq",
        progress=progress,
    )
    if subject.budget != DEFAULT and not on_gpu(subject.placement):
        apart = ", linears and their Hessians one by one" if subject.budget.apart else ""
        progress.say(f"memory: batches of {subject.budget.walk_tokens} tokens{apart}")
    left_out = settings.max_memory is not None and settings.format == "gptq" and EFFORTS[effort.name].tunes
    return replace(subject, notes=(*subject.notes, UNTUNED)) if left_out else subject


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
    progress: Progress = NOBODY,
) -> Subject:
    """The subject with the roomiest budget that stays below `limit` bytes. Where that is not the default, the heap of
    this process gives back what is freed at once from now on.

    measures       layouts are judged, each stage by a second Hessian
    hessian_bytes  of a number of a Hessian
    alone          a linear can be solved some outputs at a time
    Raises CalibrationError, with the least change that helps, where none does; UsageError for a limit where the work is
    done on a GPU, whose libraries take main memory as they like.
    """
    if on_gpu(subject.placement):
        if limit is not None:
            raise UsageError(
                f"`--max-memory` does not hold with `--device {subject.placement.device}`", hint="use one of the two"
            )
        takes = partial(device_peak, weighs=weighs, measures=measures, hessian_bytes=hessian_bytes, alone=alone)
        return _told(_fitting(subject, takes, progress), weighs=weighs)
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
            return _told(replace(subject, budget=budget), weighs=weighs)
    shorter = subject.rows.shape[1] // 2 if subject.rows.numel() else 0
    other = f", or shorter rows with `--length {shorter}`" if shorter >= 64 else ""
    raise CalibrationError(
        f"`--max-memory {limit // MIB}MiB` is not enough: at least {math.ceil(needs / MIB)} MiB are needed, "
        f"{before // MIB} MiB of them before any work",
        hint=f"use `--max-memory {math.ceil(needs / MIB)}MiB`{other}",
    )


def _fitting(subject: Subject, needs: Callable[[Subject], int], progress: Progress) -> Subject:
    """The subject with the roomiest budget that fits into what is free of its GPU; the least where none does."""
    device = subject.placement.device
    free, _ = torch.cuda.mem_get_info(device)
    on_card = [level for level in levels(subject) if on_gpu(level.subject.placement)]
    chosen = next((level for level in on_card if needs(level.subject) <= free), on_card[-1])
    least = f": {chosen.words}" if chosen.words else ""
    needed = f"about {needs(chosen.subject) / MIB:,.0f} MiB are needed of `{device}`"
    progress.say(f"{needed}, {free / MIB:,.0f} MiB are free there{least}")
    return chosen.subject


def _told(subject: Subject, *, weighs: bool) -> Subject:
    """The subject with notes where its batches, smaller than usual, may show in the result."""
    budget, notes = subject.budget, subject.notes
    if subject.config.experts is not None and budget.walk_tokens < DEFAULT.walk_tokens:
        notes = (*notes, FEW_TOKENS)
    if weighs and budget.logits_at_once < DEFAULT.logits_at_once:
        notes = (*notes, FEW_PREDICTIONS)
    return replace(subject, notes=notes)


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
