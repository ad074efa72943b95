"""What a quantization takes of the disk: for the result, and for the job until the result is complete."""

import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.calibration.sensitivity import chunk_sizes
from quantkit.checkpoint.shard import COMPACT_BYTES, HEADER_ROOM
from quantkit.checkpoint.writer import SHARD_BYTES
from quantkit.commands.quantization.job import QuantizeJob, Subject, on_gpu, stored_bits
from quantkit.errors import CheckpointError
from quantkit.models.architecture import HEAD, block_of

HEADER_ENTRY_BYTES, TENSORS_OF_LINEAR = 120, 3
"""About what a header says of one tensor, and by how many tensors a linear grows."""
NOTE_BYTES, MEASURED_BYTES = 1200, 4000
"""About what headers and journal of a job say of one linear; and where it was measured."""


@dataclass(frozen=True, slots=True)
class DiskNeeds:
    """Bytes; those of the job at its largest."""

    result: int
    job: int


def disk_needs(job: QuantizeJob, *, weighs: bool) -> DiskNeeds:
    """`weighs` where gradients are to be found, whose pass keeps states of its own."""
    plan, subject = job.plan, job.subject
    if job.redo is None:
        before = sum(stored_bits(subject.checkpoint, linear.name) for linear in plan.quantized) // 8
        work = sum(linear.stored_bits for linear in plan.work) // 8
        added = plan.added_bits // 8 if plan.head is None and subject.config.tie_embeddings else 0
        data = subject.checkpoint.stored_bytes - before + work + added
    else:
        data = job.redo.previous.stored_bytes
    side = sum(file.stat().st_size for file in subject.checkpoint.side_files() if file.is_file())
    found = gradient_bytes(subject) if weighs else 0
    backward = subject.backward_spilled_bytes if weighs else 0
    return DiskNeeds(data + _headers(job, data) + side, found + max(_steps(job), backward))


def _steps(job: QuantizeJob) -> int:
    """Of the steps, with the states before, inside and behind the block in hand. Nobody reads those behind the last
    one, if the head is not quantized."""
    states, last = states_bytes(job.subject), job.blocks - 1
    inside = _held_bytes(job.subject)
    made: Counter[int] = Counter()
    for linear in job.work:
        made[last + 1 if linear.name == HEAD else block_of(linear.name)] += linear.stored_bits // 8 + NOTE_BYTES
    everything = made.total()
    before = everything - made[last + 1] if job.has_head else everything - made[last]
    pairs = 2 * states + inside + before if last or job.has_head else 0
    return max(pairs, states + inside + everything)


def measurement_needs(subject: Subject, checked: int) -> DiskNeeds:
    """The file itself is counted as what the journal says of each linear. `checked`: bytes of the blocks that are kept
    for a check of the prediction."""
    notes = MEASURED_BYTES * len(subject.linears) + checked
    job = gradient_bytes(subject) + max(notes + 2 * states_bytes(subject), subject.backward_spilled_bytes)
    return DiskNeeds(notes, job)


def gradient_bytes(subject: Subject) -> int:
    """What a job keeps of a backward pass: covariances and squares of all outputs, weights of the tokens."""
    total, stages = 0, set()
    for spec in subject.linears:
        sizes = chunk_sizes(spec.out_features)
        total += sum(size * size for size in sizes) * torch.bfloat16.itemsize
        total += spec.out_features * torch.float64.itemsize
        stages.add(spec.stage)
    routed = 1.0 if subject.config.experts is None else subject.config.experts.chosen / subject.config.experts.count
    each = torch.float32.itemsize + torch.int64.itemsize
    return total + int(len(stages) * subject.backward_rows.numel() * each * routed)


def require_space(needs: DiskNeeds, out: Path, job: Path) -> None:
    """Raises CheckpointError where result and job do not fit; what the job has written already is not needed again."""
    written = sum(path.stat().st_size for path in job.rglob("*") if path.is_file()) if job.exists() else 0
    left = max(0, needs.job - written)
    if _existing(out).stat().st_dev == _existing(job).stat().st_dev:
        _require(needs.result + left, out, f"`{out}` and its job need", "`-o` or `--job`")
    else:
        _require(needs.result, out, f"`{out}` needs", "`-o`")
        _require(left, job, f"the job `{job}` needs", "`--job`")


def _require(size: int, place: Path, what: str, option: str) -> None:
    free = shutil.disk_usage(_existing(place)).free
    if size > free:
        raise CheckpointError(
            f"{what} {_counted(size, math.ceil)}, and {_counted(free, math.floor)} are free there",
            hint=f"free some space there, or choose another disk with {option}",
        )


def _counted(size: int, rounded: Callable[[float], int]) -> str:
    """Bytes in the unit that shows the difference between nearly none and none."""
    return f"{rounded(size / 2**20):,} MiB" if size >= 10 * 2**20 else f"{rounded(size / 2**10):,} KiB"


def states_bytes(subject: Subject) -> int:
    """The hidden states of all calibration tokens."""
    return subject.rows.numel() * subject.config.hidden_size * torch.float32.itemsize


def _held_bytes(subject: Subject) -> int:
    """What a CPU holds inside a block: the states between attention and MLP, and what their output linears read."""
    config, dtype = subject.config, subject.placement.dtype
    if on_gpu(subject.placement):
        return 0
    read = config.num_heads * config.head_dim + config.intermediate_size
    return states_bytes(subject) + subject.rows.numel() * read * dtype.itemsize


def _headers(job: QuantizeJob, data: int) -> int:
    if data >= COMPACT_BYTES:
        return HEADER_ROOM * -(-data // SHARD_BYTES)
    return HEADER_ENTRY_BYTES * (len(job.subject.checkpoint.names()) + TENSORS_OF_LINEAR * len(job.plan.work))


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())
