"""`quantkit quantize --dry-run`: the plan, and what it would take of time, memory and disk. Nothing is left behind."""

import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.checkpoint.reader import open_checkpoint
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.commands.measuring.outline import outline
from quantkit.commands.quantization.effort import Effort, choose_effort, choose_hessian_dtype
from quantkit.commands.quantization.exl2 import check_format, choose_gptq, known_recipe
from quantkit.commands.quantization.job import (
    QuantizeJob,
    Subject,
    choose_placement,
    open_model,
    open_subject,
    prepare,
    require_finite,
)
from quantkit.commands.quantization.memory_limit import within_memory
from quantkit.commands.quantization.needs import DiskNeeds, disk_needs, require_space
from quantkit.commands.quantization.recipe import Exl2Recipe, Recipe
from quantkit.commands.quantization.redo import get_ready
from quantkit.commands.quantization.redo_result import require_alone
from quantkit.commands.quantization.rehearsal import Rehearsal, rehearse
from quantkit.commands.quantization.resumption import job_place, read_result
from quantkit.commands.quantization.target import fit_target
from quantkit.commands.quantization.tuning import is_tuned, with_text_to_judge
from quantkit.errors import CalibrationError
from quantkit.measurement import MeasuredLinear, Measurement
from quantkit.mix_plan import plan_mixes, require_no_dense
from quantkit.plan import Plan
from quantkit.progress import Progress
from quantkit.settings import QuantizeSettings


@dataclass(frozen=True, slots=True)
class Redone:
    """What `--redo` matches: linears, and the blocks that they are in or behind."""

    pattern: str
    linears: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a quantization, or a redo of a part of one, would be and take. `foretold` where a plan waits for a
    measurement: then the widths are those of a guess, their bits those of the budget."""

    out: Path
    format: str
    effort: str
    settings: dict[str, Any]
    plan: Plan
    foretold: bool
    disk: DiskNeeds
    rehearsal: Rehearsal
    memory_bytes: int
    notes: tuple[str, ...] = ()
    redone: Redone | None = None

    def remarks(self) -> list[str]:
        """Whatever will not be ideal: the model, dense linears, short groups."""
        return [*self.notes, *self.plan.remarks()]

    def rows(self) -> list[list[str]]:
        """Name and figure, for people."""
        rehearsal = self.rehearsal
        return [
            ["bits per weight, linears", f"{self.plan.bits_per_weight:.3f}"],
            ["linears", f"{len(self.plan.work)} to quantize, {len(self.plan.dense)} stay dense"]
            if self.redone is None
            else ["linears", f"{self.redone.linears} of {len(self.plan.work)} to redo, in {self.redone.blocks} blocks"],
            ["time, about", f"{rehearsal.seconds:.0f} s, {rehearsal.backward_seconds:.0f} s of it for gradients"],
            ["peak memory, about", f"{rehearsal.peak_memory_bytes / 2**20:.0f} MiB"],
            ["memory of this machine", f"{self.memory_bytes / 2**20:.0f} MiB"],
            *device_rows(rehearsal),
            ["disk for the result", f"{self.disk.result / 2**20:.1f} MiB"],
            ["disk for the job meanwhile", f"{self.disk.job / 2**20:.1f} MiB"],
            ["rehearsed", f"the largest block, with {rehearsal.tokens} tokens; the comparison at the end was not"],
        ]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of each table for people."""
        remarks = [[remark] for remark in self.remarks()]
        table = (f"{self.out}, not written", ["", ""], self.rows())
        return [("not ideal", ["remark"], remarks), table] if remarks else [table]

    def as_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "dry_run": True,
            "format": self.format,
            **self.settings,
            "effort": self.effort,
            "bits_per_weight": self.plan.bits_per_weight,
            "plan": self.plan.as_json(),
            "plan_is_guess": self.foretold,
            "remarks": self.remarks(),
            **self.rehearsal.as_json(),
            "memory_bytes": self.memory_bytes,
            "result_bytes": self.disk.result,
            "job_bytes": self.disk.job,
            "redo": None if self.redone is None else asdict(self.redone),
        }


def foresee(settings: QuantizeSettings, progress: Progress) -> Outlook:
    """Raises what `quantize.run` raises before work, CheckpointError where the disk would not do, and CalibrationError
    where the memory would not."""
    start = time.monotonic(), time.process_time()
    if settings.redo is not None:
        return _foresee_redo(settings, start, progress)
    check_format(settings)
    effort = choose_effort(settings)
    hessian_dtype = choose_hessian_dtype(settings.hessian_dtype)
    checkpoint = open_model(settings.model, settings.seed, rotate=settings.rotate)
    overwrite = settings.overwrite or read_result(settings.out) is not None
    with CheckpointWriter(settings.out, source=checkpoint.path, overwrite=overwrite) as writer:
        out = writer.path
    subject = open_subject(
        checkpoint, settings if effort.calibrates else None, choose_placement(settings.device, settings.dtype)
    )
    settings = fit_target(settings, subject, progress)
    subject = within_memory(subject, settings, effort, hessian_dtype, progress)
    effort, subject = with_text_to_judge(effort, subject)
    recipe = known_recipe(settings, subject, progress)
    expected = None if recipe or settings.free_widths else outline(subject)
    job = prepare(
        subject,
        recipe or guess(settings, subject, expected),
        settings.strict,
        hessian_dtype=hessian_dtype,
        route_all=settings.route_all,
    )
    return _rehearsed(settings, job, effort, out, expected, start, progress)


def _foresee_redo(settings: QuantizeSettings, start: tuple[float, float], progress: Progress) -> Outlook:
    require_alone(settings)
    with CheckpointWriter(settings.out, source=open_checkpoint(settings.model).path, overwrite=True) as writer:
        out = writer.path
        ready = get_ready(settings, out, None, progress)
    outlook = _rehearsed(ready.settings, ready.job, ready.effort, out, None, start, progress)
    return replace(outlook, redone=Redone(ready.pattern, len(ready.redo.names), ready.job.blocks))


def _rehearsed(
    settings: QuantizeSettings,
    job: QuantizeJob,
    effort: Effort,
    out: Path,
    expected: Measurement | None,
    start: tuple[float, float],
    progress: Progress,
) -> Outlook:
    """`expected`: a measurement that has yet to be made; `start`: wall and processor seconds when it all began."""
    checkpoint = job.subject.checkpoint
    weighs = effort.weighs or expected is not None
    guessed = expected is not None or bool(settings.free_widths)
    needs = disk_needs(job, weighs=weighs)
    require_space(needs, out, job_place(settings.job, out, checkpoint.path))
    require_finite(checkpoint, progress)
    measured = max((len(linear.candidates) for linear in expected.linears), default=0) if expected else 0
    candidates = measured or len(settings.free_widths)
    before = time.monotonic() - start[0], time.process_time() - start[1]  # the real run does all of it, too
    tunes = effort if is_tuned(job, effort) else None
    rehearsal = rehearse(job, progress, weighs=weighs, solves=1 + candidates, tunes=tunes)
    seconds, cpu_seconds = rehearsal.seconds + before[0], rehearsal.cpu_seconds + before[1]
    rehearsal = replace(rehearsal, seconds=seconds, cpu_seconds=cpu_seconds)
    memory = machine_memory()
    require_memory(rehearsal, memory)
    return Outlook(
        settings.out,
        job.recipe.name,
        effort.name,
        {**job.recipe.settings(), "rotate": settings.rotate},
        job.plan,
        guessed,
        needs,
        rehearsal,
        memory,
        job.subject.notes,
    )


def device_rows(rehearsal: Rehearsal) -> list[list[str]]:
    """Name and figure of what was seen of the GPU; nothing on a CPU."""
    peak = rehearsal.device_peak_memory_bytes
    rows = [] if peak is None else [["peak memory of the GPU, about", f"{peak / 2**20:.0f} MiB"]]
    return rows + [["too much for the GPU", f"goes on with {fallback.did}"] for fallback in rehearsal.fallbacks]


def require_memory(rehearsal: Rehearsal, memory: int) -> None:
    """Raises CalibrationError where so much is needed that this machine does not have it."""
    if memory and rehearsal.peak_memory_bytes > memory:
        raise CalibrationError(
            f"about {rehearsal.peak_memory_bytes / 2**20:,.0f} MiB of memory are needed, this machine has "
            f"{memory / 2**20:,.0f} MiB",
            hint=f"use `--max-memory {int(0.9 * memory) >> 20}MiB`, which takes longer, or a machine with more memory",
        )


def machine_memory() -> int:
    """Bytes; 0 where they are not known."""
    found = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else 0


def guess(settings: QuantizeSettings, subject: Subject, expected: Measurement | None) -> Recipe:
    """Mixes for a budget as if each bit halved the error of every weight alike; for GPTQ one width for all linears,
    whose bits are those of the budget."""
    if expected is None:
        return choose_gptq(settings, subject)
    assert settings.bpw is not None
    if settings.strict:
        require_no_dense(expected)
    guessed = replace(expected, linears=tuple(_guessed(linear) for linear in expected.linears))
    mixes, _ = plan_mixes(guessed, settings.bpw, head_bits=settings.head_bits, include_head=settings.include_head)
    return Exl2Recipe(mixes)


def _guessed(linear: MeasuredLinear) -> MeasuredLinear:
    damages = (linear.weights * 4.0 ** (-found.bits / linear.weights) for found in linear.candidates)
    candidates = (
        replace(found, damage=damage) for found, damage in zip(linear.candidates, damages, strict=True)
    )
    return replace(linear, candidates=tuple(candidates))
