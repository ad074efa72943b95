"""The end of `--effort default` and `best`: scales and norms of the rounded model are tuned, if unseen text agrees.

What is tuned is rounded as the files hold it, and both models are held against the original over text that calibration
never sees, in the arithmetic of calibration. Where the tuned one is no nearer there, the model stays as it was, and the
report says so.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor

from quantkit.calibration.tuning import RoundedLinear, Tuned, divergences, tune
from quantkit.checkpoint.receipt import digest_of_values
from quantkit.commands.quantization.effort import Effort
from quantkit.commands.quantization.fallback import Descent
from quantkit.commands.quantization.job import QuantizeJob, Subject, held_back_rows
from quantkit.commands.quantization.report import Tuning
from quantkit.commands.quantization.steps import Changes, solved_homes, solved_steps
from quantkit.errors import CalibrationError
from quantkit.formats import gptq
from quantkit.formats.codec import StoredTensor
from quantkit.formats.dense import DenseTensor
from quantkit.formats.gptq import GptqCodec, GptqTensor
from quantkit.job.job import Job
from quantkit.models.architecture import HEAD
from quantkit.models.source import Source
from quantkit.progress import Progress

STEP = "tune"
JUDGED_WINDOWS, JUDGED_LENGTH = 4, 512


def is_tuned(job: QuantizeJob, effort: Effort) -> bool:
    """Whether tuning follows: something else than the head is solved."""
    return effort.tunes > 0 and any(linear.name != HEAD for linear in job.work)


def with_text_to_judge(effort: Effort, subject: Subject) -> tuple[Effort, Subject]:
    """Both as they are; or an effort without tuning and a note of it, where no text tells whether tuning has helped.

    Raises CalibrationError where the effort is not of use without.
    """
    try:
        if effort.tunes:
            held_back_rows(subject, JUDGED_WINDOWS, JUDGED_LENGTH)
    except CalibrationError as error:
        if not effort.optional:
            raise
        note = f"scales and norms are not tuned, as nothing can judge it: {error.message}"
        return replace(effort, tunes=0), replace(subject, notes=(*subject.notes, note))
    return effort, subject


def tune_result(
    job: QuantizeJob, kept: Job, effort: Effort, seed: int, progress: Progress
) -> tuple[Changes, Tuning]:
    """Tune the linears that the steps of `kept` hold as an effort says, unless it has been done; in a redo their scales
    alone. The head is left as it is.

    Raises CalibrationError where states or gradients are not finite.
    """
    descent = Descent(job.subject, progress)
    descent.begin("tuning")
    return descent.run(
        lambda subject: _tuned(replace(job, subject=subject), kept, effort, seed, progress, descent), whole=True
    )


def _tuned(
    job: QuantizeJob, kept: Job, effort: Effort, seed: int, progress: Progress, descent: Descent
) -> tuple[Changes, Tuning]:
    if not kept.has(STEP):
        start = time.monotonic(), time.process_time()
        subject, rows = job.subject, effort.tuned(job.subject.rows)
        rounded = _KeptLinears(job, kept)
        around = subject.checkpoint if job.redo is None else job.redo.outcome(solved_homes(kept))
        tuned = tune(
            subject.checkpoint,
            rounded,
            subject.config,
            subject.architecture,
            rows,
            effort.tunes,
            seed=seed,
            dtype=subject.placement.dtype,
            device=subject.placement.device,
            progress=progress,
            around=None if job.redo is None else around,
        )
        windows = held_back_rows(subject, JUDGED_WINDOWS, JUDGED_LENGTH)
        result = _Result(around, rounded, tuned)
        before, after = divergences(
            subject.checkpoint,
            (_Result(around, rounded, None), result),
            subject.config,
            subject.architecture,
            windows,
            dtype=subject.placement.dtype,
            device=subject.placement.device,
        )
        with kept.step(STEP) as step:
            weights = {}
            if after < before:
                for name, tensor in result.changes():
                    step.add(name, tensor)
                weights = result.digests()
            spent = time.monotonic() - start[0], time.process_time() - start[1]
            report = Tuning(effort.tunes, rows.numel(), tuned.course, before, after, *spent)
            step.finish({"report": asdict(report), "weights": weights, "fallbacks": descent.noted()})
    value = kept.value(STEP)
    report = Tuning(**{**value["report"], "course": tuple(value["report"]["course"])})
    return Changes(dict(kept.tensors(STEP)), value["weights"]), report


class _KeptLinears:
    """The linears that are kept in the steps of a job, read when they are asked for; those of one step together."""

    def __init__(self, job: QuantizeJob, kept: Job) -> None:
        self._subject, self._kept = job.subject, kept
        self._settings = {
            name: codec.settings for name, codec in job.codecs.items() if isinstance(codec, GptqCodec) and name != HEAD
        }
        self._steps = {
            found["name"]: step for step in solved_steps(kept) for found in kept.value(step)["linears"]
        }
        self._read: tuple[str, dict[str, Tensor]] = ("", {})
        self.bits = {name: settings.bits for name, settings in self._settings.items()}
        self.scales = {name: self.stored(name).tensors()["scales"].to(torch.float32) for name in self._settings}

    def module(self, name: str) -> str:
        return self._subject.module_on_disk(name)

    def stored(self, name: str) -> GptqTensor:
        step = self._steps[name]
        if self._read[0] != step:
            self._read = step, dict(self._kept.tensors(step))
        prefix = self.module(name) + "."
        own = {full.removeprefix(prefix): tensor for full, tensor in self._read[1].items() if full.startswith(prefix)}
        return gptq.decode(name, own, self._settings[name])

    def linear(self, name: str) -> RoundedLinear:
        stored = self.stored(name)
        assert stored.row_groups is not None
        return RoundedLinear(stored.steps(), stored.row_groups, self.scales[name], stored.bias)


class _Result:
    """The quantized model as a source, with what tuning has changed, rounded as the files hold it."""

    def __init__(self, original: Source, rounded: _KeptLinears, tuned: Tuned | None) -> None:
        self._original, self._rounded, self._tuned = original, rounded, tuned
        self._norms = {} if tuned is None else {f"{name}.weight": norm for name, norm in tuned.norms.items()}

    def has(self, name: str) -> bool:
        return self._original.has(name)

    def tensor(self, name: str) -> Tensor:
        own = self._original.tensor(name)
        return self._norms[name].to(own.dtype) if name in self._norms else own

    def linear(self, name: str) -> StoredTensor:
        if name not in self._rounded.scales:
            return self._original.linear(name)
        stored = self._stored(name)
        return DenseTensor(stored.dequantize().T, stored.bias)

    def changes(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that differs, by its name on the disk."""
        for name in self._rounded.scales:
            yield f"{self._rounded.module(name)}.scales", self._stored(name).tensors()["scales"]
        for name in self._norms:
            yield name, self.tensor(name)

    def digests(self) -> dict[str, str]:
        return {name: digest_of_values(self._stored(name).dequantize()) for name in self._rounded.scales}

    def _stored(self, name: str) -> GptqTensor:
        stored = self._rounded.stored(name)
        return stored if self._tuned is None else stored.with_scales(self._tuned.scales[name])
