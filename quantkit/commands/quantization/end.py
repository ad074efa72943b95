"""The end of a quantization: the files are what was solved, the damage against the original, and what it all took."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.receipt import Receipt
from quantkit.commands.quantization.effort import Effort
from quantkit.commands.quantization.fallback import Descent, Fallback
from quantkit.commands.quantization.job import QuantizeJob, Subject, stored_bits
from quantkit.commands.quantization.rehearsal import device_peak_memory, peak_memory
from quantkit.commands.quantization.report import (
    Calibration,
    Cost,
    Damage,
    Gradients,
    LinearResult,
    QuantizeReport,
    Tuning,
)
from quantkit.commands.quantization.resumption import Finished
from quantkit.commands.quantization.sensitivity import BackwardPass
from quantkit.errors import OWN_FAULT, CheckpointError, GateError, RequestError
from quantkit.evaluators import divergence
from quantkit.job.job import Facts, Job
from quantkit.models.transformer import Model
from quantkit.progress import Progress
from quantkit.runtime.generator import Generator
from quantkit.runtime.load import load
from quantkit.runtime.request import Request
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import QuantizeSettings

EVALUATION_WINDOWS, EVALUATION_LENGTH = 8, 512
SAMPLE_PROMPT, SAMPLE_TOKENS = "What is gravity? Answer in two sentences.", 64


def calibration_of(settings: QuantizeSettings, effort: Effort, subject: Subject) -> Calibration:
    return Calibration(
        source=settings.calibration if effort.calibrates else "none",
        rows=subject.rows.shape[0],
        length=subject.rows.shape[1],
        seed=settings.seed,
        device=subject.placement.device,
        dtype=subject.placement.dtype_name,
    )


def backend_of(subject: Subject) -> str:
    return f"{subject.placement.backend}: {subject.placement.reason}"


def report_of(
    job: QuantizeJob,
    settings: QuantizeSettings,
    effort: Effort,
    linears: Sequence[LinearResult],
    size_bytes: int,
    weighed: BackwardPass | None,
    cost: Cost,
    damage: Damage | None,
    tuning: Tuning | None,
    fallbacks: tuple[Fallback, ...],
) -> QuantizeReport:
    """Of a quantization, or of a redo of a part of it."""
    subject = job.subject
    return QuantizeReport(
        out=settings.out,
        format=job.recipe.name,
        effort=effort.name,
        settings={**job.recipe.settings(), "rotate": settings.rotate},
        backend=backend_of(subject),
        plan=job.plan,
        linears=tuple(linears),
        parameters=subject.parameters,
        size_bytes=size_bytes,
        calibration=calibration_of(settings, effort, subject),
        gradients=Gradients(weighed.found.tokens, weighed.seconds, weighed.cpu_seconds) if weighed else None,
        cost=cost,
        damage=damage,
        tuning=tuning,
        fallbacks=fallbacks,
        notes=subject.notes,
        device_peak_memory_bytes=device_peak_memory(subject.placement),
    )


def check_written(written: Checkpoint, job: QuantizeJob, receipt: Receipt, progress: Progress) -> None:
    """What is on the disk is what was solved, and takes the bits that were planned. GateError for anything else."""
    receipt.check(written, progress)
    for linear in job.plan.linears:
        if (bits := stored_bits(written, linear.name)) != linear.stored_bits:
            raise GateError(
                f"`{linear.name}` takes {bits} bits in `{written.path}`, planned were {linear.stored_bits}",
                hint=OWN_FAULT,
            )


def measure_damage(subject: Subject, out: Path, windows: Tensor, progress: Progress) -> Damage:
    """The result against the original on bundled text that calibration never sees, and one greedy answer."""
    descent = Descent(subject, progress)
    descent.begin("comparison")
    try:
        return descent.run(partial(_damage_there, out, windows, progress), whole=True)
    except CheckpointError as error:
        if out.exists():
            raise
        raise CheckpointError(
            f"`{out}` was complete, and is gone: somebody has removed or moved it before it was measured",
            hint="the same command puts it together again from what its job has",
        ) from error


def measured_now(
    found: Finished,
    kept: Job,
    facts: Facts,
    settings: QuantizeSettings,
    subject: Subject,
    unseen: Tensor | None,
    progress: Progress,
) -> Finished:
    """A result that was made before, of these `facts`: its damage where that is still to be measured or asked for
    again, and the end of its job where one was left."""
    left = kept.facts == facts
    damage = None
    if unseen is not None and (left or settings.judged):
        damage = measure_damage(subject, settings.out, unseen, progress)
    if left:
        kept.complete()
    return replace(found, out=settings.out, damage=damage)


def _damage_there(out: Path, windows: Tensor, progress: Progress, subject: Subject) -> Damage:
    candidate = load(out, subject.placement.device, torch.float32)
    found = compare_with_original(subject, candidate, windows, progress)
    return replace(found, answer=sample_answer(subject, candidate))


def compare_with_original(subject: Subject, candidate: Model, windows: Tensor, progress: Progress) -> Damage:
    """The damage without an answer."""
    original = subject.checkpoint.original
    place = subject.architecture, torch.float32, subject.placement.device
    reference = Model.stream(original, original.model_config, *place)
    found = divergence.compare(reference, candidate, windows, progress)
    return Damage(
        windows=len(windows),
        tokens=found.reference.tokens,
        perplexity_reference=found.reference.perplexity,
        perplexity_candidate=found.candidate.perplexity,
        kl_mean=found.kl_mean,
        kl_ci95=found.kl_ci95,
        top1_agreement=found.top1_agreement,
        prompt=SAMPLE_PROMPT,
        answer="",
        device=subject.placement.device,
    )


def sample_answer(subject: Subject, candidate: Model) -> str:
    """What it says to the sample prompt; nothing where it has no room for it."""
    prompt = _sample_prompt(subject.tokenizer)
    room = min(SAMPLE_TOKENS, subject.config.max_positions - len(prompt))
    request = Request(prompt, room, stop_ids=subject.tokenizer.eos_ids)
    return Generator(candidate, subject.tokenizer).run(request).text if room > 0 else ""


def _sample_prompt(tokenizer: Tokenizer) -> list[int]:
    """A chat where the model has a template, else plain text."""
    try:
        return tokenizer.chat([{"role": "user", "content": SAMPLE_PROMPT}]) or tokenizer.encode(SAMPLE_PROMPT)
    except (RequestError, CheckpointError):  # of a template that fails: the result is none the worse for it
        return tokenizer.encode(SAMPLE_PROMPT, special=True)


def spent_since(start: tuple[float, float]) -> tuple[float, float, int]:
    """Wall seconds, processor seconds, and the peak memory of the process so far in bytes."""
    return time.monotonic() - start[0], time.process_time() - start[1], peak_memory()
