"""`quantkit measure`: what each EXL2 layout of each linear would cost in bits and do in damage.

Blocks are walked through as in quantizing, but unquantized outputs flow on. Each linear is solved in each candidate
layout; what its outputs lose is weighed by what they matter. With L = (W - Q)ᵀ H (W - Q), G the mean square of the
gradients at the outputs, and errors of different outputs and tokens taken as independent, the damage is ½ Σ_n G_n L_n
nats of KL, the Fisher form ½ tr(G ΔWᵀ H ΔW); H is that of tokens weighted by their gradients.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.sensitivity import Sensitivity
from quantkit.checkpoint.fingerprint import in_form
from quantkit.checkpoint.reader import Checkpoint
from quantkit.commands.measuring.check import (
    check_prediction,
    checked_blocks,
    checked_candidate,
    worst_block,
)
from quantkit.commands.measuring.outline import exl2_trials, outline
from quantkit.commands.measuring.report import MeasureReport
from quantkit.commands.measuring.walk import NOTHING, Checked, measure_blocks
from quantkit.commands.quantization.fallback import Descent, noted_by, planned
from quantkit.commands.quantization.job import (
    UNTRIED,
    Subject,
    choose_placement,
    on_gpu,
    open_model,
    open_subject,
    require_finite,
)
from quantkit.commands.quantization.memory_limit import heap_settled_after, limited, tell_excess
from quantkit.commands.quantization.rehearsal import peak_memory
from quantkit.commands.quantization.resumption import facts_of, job_place
from quantkit.commands.quantization.sensitivity import RunBackward, run_backward
from quantkit.commands.quantization.walk import step_of
from quantkit.errors import PlanError
from quantkit.formats import exl2
from quantkit.formats.codec import StoredTensor
from quantkit.job.identity import identify, remembered
from quantkit.job.job import Facts, Job, differing
from quantkit.measurement import (
    KIND,
    VERSION,
    Check,
    Measurement,
    load_json,
    require_place,
    save_json,
)
from quantkit.models.architecture import LinearSpec
from quantkit.progress import Progress, Tqdm
from quantkit.settings import MeasureSettings

STEPS, CHECK = "measure", "measure check"


def measure(model: str | Path, out: str | Path, *, progress: Progress | None = None, **options: Any) -> MeasureReport:
    """Measure `model` into the file `out`. Options are the fields of `quantkit.settings.MeasureSettings`.

    report = quantkit.measure("models/llama", "llama.measurement.json", samples=64)
    """
    settings = MeasureSettings(str(model), Path(out), **options)
    with heap_settled_after(settings.max_memory):
        return run(settings, progress or Tqdm())


def run(
    settings: MeasureSettings,
    progress: Progress,
    source: Checkpoint | None = None,
    backward: RunBackward = run_backward,
) -> MeasureReport:
    """Measure. Raises an error of the tree for anything that cannot be done; then no file is left behind, but the
    folder of the job with what is finished.

    `source` is what is read in place of `settings.model`: a quantized model, decoded. `backward` finds the gradients.
    """
    placement = choose_placement(settings.device, settings.dtype)
    checkpoint = source or open_model(settings.model, settings.seed, rotate=settings.rotate)
    require_place(settings.out)
    place = Path(os.path.realpath(settings.out))
    with Job(job_place(settings.job, place, checkpoint.path)) as kept:
        subject = open_subject(checkpoint, settings, placement)
        subject = limited(subject, settings.max_memory, weighs=True, measures=True, progress=progress)
        model = identify(checkpoint.original, kept.hints.get("model"), progress)
        facts = facts_of("measure", settings, subject, model)
        if place.exists():
            found = _finished_before(place, facts, overwrite=settings.overwrite or settings.restart)
            if found is not None and not settings.restart:
                if kept.facts == facts:
                    kept.complete()
                return MeasureReport(settings.out, found, finished_before=True)
        kept.begin(facts, hints={"model": remembered(model)}, restart=settings.restart)
        require_finite(checkpoint, progress)
        for note in (*subject.notes, *([UNTRIED] if on_gpu(placement) else [])):
            progress.say(f"note: {note}")
        sensitivity = backward(subject, kept, settings.seed, progress).found
        weights = in_form(model.weights, checkpoint)
        measurement = measure_model(
            subject, kept, weights, sensitivity, settings.calibration, settings.seed, progress, check=True
        )
        save_json(place, {**measurement.as_json(), "made_with": dict(facts)})
        fallbacks = (*planned(subject), *noted_by(kept))
        kept.complete()
    tell_excess(settings.max_memory, peak_memory(), progress)
    return MeasureReport(settings.out, measurement, fallbacks=fallbacks)


def _finished_before(file: Path, facts: Facts, *, overwrite: bool) -> Measurement | None:
    """The measurement in a file if it is that of these facts; None if it may be replaced. Raises PlanError for another
    file, or one that is no measurement, that must not be."""
    try:
        measurement = Measurement.load(file)
        differences = differing(load_json(file, KIND, VERSION, "quantkit measure").get("made_with", {}), facts)
    except PlanError as error:
        differences = [error.message]
    if not differences:
        return measurement
    if overwrite:
        return None
    raise PlanError(
        f"`{file}` is another file: {'; '.join(differences)}",
        hint="use `--overwrite` to replace it, or choose another name with `-o`",
    )


@torch.inference_mode()
def measure_model(
    subject: Subject,
    job: Job,
    model: str,
    sensitivity: Sensitivity,
    source: str,
    seed: int,
    progress: Progress,
    *,
    check: bool = False,
) -> Measurement:
    """Every linear of the blocks in every candidate layout.

    job      keeps what is measured, one step for each block; those that it has are not measured again
    model    its fingerprint
    sensitivity  what a backward pass over the first rows has found
    source, seed  where the rows of text come from, to be noted
    check    compare the predicted damage of a few blocks with what they do to the model

    Raises CalibrationError for activations or gradients that are not finite.
    """
    specs = {spec.name: spec for spec in subject.linears}
    planned = outline(subject)
    coarse = {linear.name: checked_candidate(linear).mix for linear in planned.linears if linear.candidates}
    checked = checked_blocks(subject.config.num_layers)
    kept = Checked(checked, coarse) if check else NOTHING
    found = measure_blocks(subject, job, STEPS, exl2_trials(subject), sensitivity, progress, kept)
    found |= {linear.name: linear for linear in planned.dense}
    rows, length = subject.rows.shape
    digest = sha256(subject.rows.contiguous().numpy().tobytes()).hexdigest()
    calibration = {"source": source, "rows": rows, "length": length, "seed": seed, "tokens": digest}
    linears = tuple(found[name] for name in specs)
    blocks = sorted({*checked, worst_block(linears)}) if check else []
    perturbed = {index: _stored(job.tensors(step_of(STEPS, index)), specs) for index in blocks}
    checks: tuple[Check, ...] = ()
    if check:
        descent = Descent(subject, progress)
        descent.begin("check")
        checks = descent.run(lambda own: check_prediction(own, linears, perturbed, progress), whole=True)
        if descent.found():
            with job.step(CHECK) as step:
                step.finish({"fallbacks": descent.noted()})
    return replace(
        planned,
        model=model,
        calibration=calibration,
        linears=linears,
        checks=checks,
    )


def _stored(tensors: Iterable[tuple[str, Tensor]], specs: Mapping[str, LinearSpec]) -> dict[str, StoredTensor]:
    """The linears of a block that `measuring.block.Kept` kept."""
    linears: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors:
        name, _, suffix = key.rpartition(".")
        linears.setdefault(name, {})[suffix] = tensor
    return {name: exl2.decode(name, own, specs[name].out_features) for name, own in linears.items()}

