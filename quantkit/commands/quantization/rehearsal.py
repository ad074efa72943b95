"""A rehearsal of a quantization: its largest block with a few rows of the text, timed, and the memory that this took.

Memory does not depend on the number of blocks or rows, so that the peak of a rehearsal is the peak of the work. Time is
counted up from its parts: each block is read, the text goes through it, Hessians are gathered, factored and solved for.
What is done at a first call only is not counted: short parts are done twice.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration import sensitivity
from quantkit.calibration.hessian import Hessian
from quantkit.calibration.sensitivity import Sensitivity, chunk_sizes
from quantkit.calibration.stream import ActivationStream
from quantkit.checkpoint.receipt import digest_of, digest_of_values
from quantkit.commands.quantization.block import SolvedLinear, round_block, solve_block, solve_head
from quantkit.commands.quantization.effort import Effort
from quantkit.commands.quantization.fallback import Descent, Fallback
from quantkit.commands.quantization.hessians import count_passes
from quantkit.commands.quantization.job import QuantizeJob, Subject, on_gpu
from quantkit.commands.quantization.passage import HeldPassage, Passage
from quantkit.commands.quantization.tuning_cost import rehearse_tuning, tuning_bytes
from quantkit.models.architecture import HEAD, block_of
from quantkit.models.fan import Activations
from quantkit.models.transformer import Block, Rotary, load_block, load_embedding, load_head
from quantkit.progress import Progress, Silent, Task
from quantkit.runtime.placement import Placement

SHORT_SECONDS = 5.0
RUNS_ON_GPU = 3
"""About how often a leg of a block runs there, where nothing that was reached is held."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the whole will take, without the comparison with the original at its end.

    seconds            of gradients, measuring, quantizing, writing and checking together
    cpu_seconds        the same of the processor
    block_seconds      of one block, counted as if all were as large as the largest
    backward_seconds   of the gradients
    peak_memory_bytes  of the process
    tokens             with which this was found
    device_peak_memory_bytes  of the GPU, as far as torch has asked for it; None on a CPU
    fallbacks          what the memory of the GPU was not enough for
    """

    seconds: float
    cpu_seconds: float
    block_seconds: float
    backward_seconds: float
    peak_memory_bytes: int
    tokens: int
    device_peak_memory_bytes: int | None = None
    fallbacks: tuple[Fallback, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "backward_seconds": self.backward_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "device_peak_memory_bytes": self.device_peak_memory_bytes,
            "fallbacks": [asdict(fallback) for fallback in self.fallbacks],
        }


@torch.inference_mode()
def rehearse(
    job: QuantizeJob,
    progress: Progress,
    *,
    weighs: bool,
    solves: int = 1,
    quantizes: bool = True,
    tunes: Effort | None = None,
) -> Rehearsal:
    """Rehearse a job.

    weighs  gradients are needed
    tunes   the effort, where its tuning follows
    solves  how often each linear is solved: once, or for each candidate of a measurement and once more
    quantizes  not only a measurement is rehearsed
    """
    descent = Descent(job.subject, progress)
    descent.begin("rehearsal")
    found = descent.run(lambda own: _rehearsed(replace(job, subject=own), progress, weighs, solves, quantizes, tunes))
    return replace(found, fallbacks=tuple(descent.found()))


def _rehearsed(
    job: QuantizeJob, progress: Progress, weighs: bool, solves: int, quantizes: bool, tunes: Effort | None
) -> Rehearsal:
    placement = job.subject.placement
    if on_gpu(placement):
        torch.cuda.reset_peak_memory_stats(placement.device)
    calibrated = len(job.subject.rows) > 0
    parts = 4 + job.has_head + weighs + (tunes is not None) if calibrated else 2
    with progress.task("rehearse a block", total=parts) as task:
        spent, each, tokens = _walk(job, task, weighs, solves, quantizes)
        backward = torch.zeros(2)
        if weighs and calibrated:
            backward = _backward(job.subject, each[1])
            task.advance(note="gradients")
        peak = peak_memory() + _states_in_memory(job.subject, weighs)
        if tunes is not None and calibrated:
            spent = spent + rehearse_tuning(job, tunes, _timed)
            peak = max(peak, peak_memory() + tuning_bytes(job, tunes))
            task.advance(note="tuning")
        seconds, cpu_seconds = (spent + backward).tolist()
    ends = float(each[0, 0]), float(backward[0])
    return Rehearsal(seconds, cpu_seconds, *ends, peak, tokens, device_peak_memory(placement))


def _walk(
    job: QuantizeJob, task: Task, weighs: bool, solves: int, quantizes: bool
) -> tuple[Tensor, Tensor, int]:
    """Spent by all but the gradients; by one block and by reading it, `[2, 2]`; with how many tokens this was found."""
    subject = job.subject
    config, device, dtype = subject.config, subject.placement.device, subject.placement.dtype
    place = job.source, config, subject.architecture
    before = None if job.redo is None else job.redo.weight
    with _Watch() as loading:
        block = load_block(*place, _largest_block(job), dtype, device)
    task.advance(note="runs")
    ends = _ends(job, block)
    solved = len({block_of(linear.name) for linear in job.work if linear.name != HEAD})
    if not len(subject.rows):
        solving = _timed(lambda: _keep(round_block(block, job.codecs, before)))
        task.advance(note="is rounded")
        each = loading.spent + solving
        return job.blocks * loading.spent + solved * solving + ends, torch.stack([each, loading.spent]), 0
    per_batch = max(1, subject.budget.walk_tokens // subject.rows.shape[1])
    rows = subject.rows[:per_batch]
    batches = len(subject.rows) / len(rows)
    stream = ActivationStream.start(load_embedding(*place, dtype), rows, batch_rows=per_batch)
    rotary = Rotary.at(config.ropes, torch.arange(rows.shape[1], device=device)[None])
    (hidden,) = stream.batches()
    block.forward(hidden, rotary)  # what is made at a first call only
    running = _timed(lambda: block.forward(hidden, rotary))
    task.advance(note="is observed")
    showing = _timed(lambda: block.show(hidden, rotary, _ignore))
    gathering = _timed(lambda: _gather(block, hidden, rotary, job)) - showing
    task.advance(note="is solved")

    def solve() -> None:
        passage = (Passage if on_gpu(subject.placement) else HeldPassage)(stream, rotary)
        own = block.with_linears(copy)  # whose linears are rounded
        known = _nothing_known(block) if weighs else None
        _keep(
            solve_block(
                own,
                passage,
                job.codecs,
                known,
                hessian_dtype=job.hessian_dtype,
                route_all=job.route_all,
                hessian_bytes=subject.budget.hessian_bytes,
                apart=subject.budget.apart,
                before=before,
            )
        )

    solving = _timed(solve)
    task.advance()
    repeats = RUNS_ON_GPU if on_gpu(subject.placement) else 1
    once = (solving - repeats * showing - gathering).clamp(min=0)
    looks = count_passes(block, job.codecs, job.hessian_dtype, subject.budget.hessian_bytes)
    measures = solves > 1 or not quantizes
    passing = (measures + quantizes) * (loading.spent + batches * running)
    own = batches * (quantizes * (gathering + (repeats - 1) * showing) + measures * (gathering + looks * showing))
    own = own + solves * once
    each = passing + own
    spent = job.blocks * passing + solved * own + ends
    if job.has_head:
        with _Watch() as watch:
            solve_head(load_head(*place, dtype, device), stream, job.codecs, hessian_dtype=job.hessian_dtype)
        spent += watch.spent
        task.advance(note="head")
    return spent, torch.stack([each, loading.spent]), rows.numel()


def peak_memory() -> int:
    """Of the process so far, in bytes. `VmHWM` and not `ru_maxrss`, which a child inherits from its parent."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def device_peak_memory(placement: Placement) -> int | None:
    """What torch has held of a GPU at most, in bytes; None on a CPU."""
    return int(torch.cuda.max_memory_allocated(placement.device)) if on_gpu(placement) else None


def _ignore(seen: Activations) -> None:
    """Nothing is to be known of it."""


def _gather(block: Block, hidden: Tensor, rotary: Rotary, job: QuantizeJob) -> None:
    """Look at a batch once, with a Hessian for each stage."""
    hessians: dict[str, Hessian] = {}

    def observe(seen: Activations) -> None:
        features, name, device = seen.inputs.shape[1], seen.stage.name, seen.inputs.device
        hessians.setdefault(name, Hessian(features, name, device=device, dtype=job.hessian_dtype)).add(seen.inputs)

    block.show(hidden, rotary, observe)


def _largest_block(job: QuantizeJob) -> int:
    """Of those in which something is solved; the first one where it is the head alone."""
    solved = {block_of(linear.name) for linear in job.work if linear.name != HEAD}
    sizes: Counter[int] = Counter()
    for linear in job.plan.linears:
        sizes[block_of(linear.name)] += linear.weights * (block_of(linear.name) in solved)
    return sizes.most_common(1)[0][0]


def _backward(subject: Subject, loading: Tensor) -> Tensor:
    """Spent by the pass over all blocks, from passes over one and two of them and a batch of the text."""
    rows = subject.backward_rows
    few = rows[: max(1, subject.budget.backward_tokens // rows.shape[1])]
    one = _timed(lambda: _run_backward(subject, few, 1))
    two = _timed(lambda: _run_backward(subject, few, 2))
    computing = (two - one - 2 * loading).clamp(min=0)
    ends = (one - computing - 2 * loading).clamp(min=0)
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


def _keep(solutions: Iterable[SolvedLinear]) -> None:
    """As they are compared before they are written."""
    for solved in solutions:
        digest_of_values(solved.weight())
        digest_of_values(solved.stored.dequantize())
        for tensor in solved.stored.tensors().values():
            digest_of(tensor)


def _nothing_known(block: Block) -> Sensitivity:
    """What a backward pass finds, with every output as important as all others: it takes as long to heed."""
    covariances = {
        name: tuple(torch.eye(size, dtype=torch.bfloat16) for size in chunk_sizes(linear.out_features))
        for name, linear in block.linears.items()
    }
    return Sensitivity(1, {}, {}, covariances)


def _ends(job: QuantizeJob, block: Block) -> Tensor:
    """Spent before and after all blocks, by what digests take: of the model, of what is put together, of what was read
    back, and of the weights that this decodes to."""
    linears = block.linears.values()
    watch = _timed(lambda: [digest_of_values(linear.stored.dequantize()) for linear in linears])
    seen = sum(linear.in_features * linear.out_features for linear in linears)
    weights = sum(linear.weights for linear in job.work)
    plain = sum(linear.weights for linear in job.plan.linears) or 1
    others = job.subject.checkpoint.stored_bytes / 2 - plain
    return watch * (2 * plain + weights + 2 * max(0.0, others)) / seen


def _timed(call: Callable[[], object]) -> Tensor:
    """Spent by a call, `[wall, processor]` in seconds; by the second one, where the first was short."""
    with _Watch() as watch:
        call()
    if watch.spent[0] < SHORT_SECONDS:
        with _Watch() as watch:
            call()
    return watch.spent


class _Watch:
    """Seconds of a `with` block, float64 `[wall, processor]`."""

    def __enter__(self) -> "_Watch":
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.spent = self._now() - self._start

    def _now(self) -> Tensor:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return torch.tensor([time.monotonic(), time.process_time()], dtype=torch.float64)
