"""A rehearsal of a quantization: its largest block with a few rows of the text, timed, and the memory that this took.

Memory does not depend on the number of blocks or rows, so that the peak of a rehearsal is the peak of the work. Time is
counted up from its parts: each block is read, seen by the text twice, factored and solved.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration import sensitivity
from quantkit.calibration.hessian import Hessian
from quantkit.calibration.stream import ActivationStream
from quantkit.commands.quantize_block import round_block, solve_block, solve_head
from quantkit.commands.quantize_job import QuantizeJob, Subject
from quantkit.models.architecture import block_of
from quantkit.models.fan import Activations
from quantkit.models.transformer import Rotary, load_block, load_embedding, load_head
from quantkit.progress import Silent


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the whole will take, without the comparison with the original at its end.

    seconds            of gradients, measuring and quantizing together
    block_seconds      of one block, counted as if all were as large as the largest
    backward_seconds   of the gradients
    peak_memory_bytes  of the process
    tokens             with which this was found
    """

    seconds: float
    block_seconds: float
    backward_seconds: float
    peak_memory_bytes: int
    tokens: int


@torch.inference_mode()
def rehearse(job: QuantizeJob, *, weighs: bool, solves: int = 1, walks: int | None = None) -> Rehearsal:
    """Rehearse a job.

    weighs  gradients are needed
    solves  how often each linear is solved: once, or for each candidate of a measurement and once more
    walks   how often the text goes through the blocks, by default once, and once more where there is a measurement
    """
    subject = job.subject
    config, device, dtype = subject.config, subject.placement.device, subject.placement.dtype
    place = subject.checkpoint, config, subject.architecture
    with _Watch() as loading:
        block = load_block(*place, _largest_block(job), dtype, device)
    if not len(subject.rows):
        with _Watch() as solving:
            _exhaust(round_block(block, job.codecs))
        each = loading.seconds + solving.seconds
        return Rehearsal(config.num_layers * each, each, 0.0, peak_memory(), 0)
    per_batch = max(1, subject.budget.walk_tokens // subject.rows.shape[1])
    rows = subject.rows[:per_batch]
    batches = len(subject.rows) / len(rows)
    embedding = load_embedding(*place, dtype, device)
    stream = ActivationStream.start(lambda ids: embedding(ids.to(device)), rows, batch_rows=per_batch)
    rotary = Rotary.at(config.ropes, torch.arange(rows.shape[1], device=device)[None])
    (hidden,) = stream.batches()
    block.forward(hidden, rotary)  # what is made at a first call only
    with _Watch() as running:
        block.forward(hidden, rotary)
    hessians: dict[str, Hessian] = {}

    def observe(seen: Activations) -> None:
        features, name = seen.inputs.shape[1], seen.stage.name
        hessians.setdefault(name, Hessian(features, name, dtype=job.hessian_dtype)).add(seen.inputs)

    with _Watch() as observing:
        block.forward(hidden, rotary, observe=observe)
    hessians.clear()
    with _Watch() as solving:
        _exhaust(
            solve_block(
                block,
                stream,
                rotary,
                job.codecs,
                hessian_dtype=job.hessian_dtype,
                route_all=job.route_all,
                hessian_bytes=subject.budget.hessian_bytes,
                apart=subject.budget.apart,
            )
        )
    once = max(0.0, solving.seconds - observing.seconds)
    walks = walks or (1 if solves == 1 else 2)
    each = walks * (loading.seconds + batches * (observing.seconds + running.seconds)) + solves * once
    seconds = config.num_layers * each
    if job.plan.head is not None:
        with _Watch() as solving:
            solve_head(load_head(*place, dtype, device), stream, job.codecs, hessian_dtype=job.hessian_dtype)
        seconds += solving.seconds
    backward = _backward(subject, loading.seconds) if weighs else 0.0
    peak = peak_memory() + _states_in_memory(subject, weighs)
    return Rehearsal(seconds + backward, each, backward, peak, rows.numel())


def peak_memory() -> int:
    """Of the process so far, in bytes. `VmHWM` and not `ru_maxrss`, which a child inherits from its parent."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _largest_block(job: QuantizeJob) -> int:
    sizes: Counter[int] = Counter()
    for linear in job.plan.linears:
        sizes[block_of(linear.name)] += linear.weights
    return sizes.most_common(1)[0][0]


def _backward(subject: Subject, loading: float) -> float:
    """Seconds of the pass over all blocks, from passes over one and two of them and a batch of the text."""
    rows = subject.backward_rows
    few = rows[: max(1, subject.budget.backward_tokens // rows.shape[1])]
    with _Watch() as first:
        _run_backward(subject, few, 1)
    with _Watch() as second:
        _run_backward(subject, few, 2)
    one, two = first.seconds, second.seconds
    computing = max(0.0, two - one - 2 * loading)
    ends = max(0.0, one - computing - 2 * loading)
    batches = ceil(len(rows) / len(few))
    return subject.config.num_layers * (2 * loading + batches * computing) + batches * ends


def _run_backward(subject: Subject, rows: Tensor, layers: int) -> None:
    sensitivity.measure(
        subject.checkpoint,
        replace(subject.config, num_layers=min(layers, subject.config.num_layers)),
        subject.architecture,
        rows,
        seed=0,
        dtype=subject.placement.dtype,
        device=subject.placement.device,
        folder=None,
        progress=Silent(),
        batch_tokens=subject.budget.backward_tokens,
        logits_at_once=subject.budget.logits_at_once,
    )


def _states_in_memory(subject: Subject, weighs: bool) -> int:
    """What a backward pass holds of all blocks, and the rehearsal did not."""
    return subject.backward_bytes if weighs and not subject.backward_spilled_bytes else 0


def _exhaust(items: Iterable[object]) -> None:
    for _ in items:
        pass


class _Watch:
    """Seconds of a `with` block."""

    seconds = 0.0

    def __enter__(self) -> "_Watch":
        self._start = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._start
