"""`quantkit quantize`: a model folder → the same model in fewer bits, solved block by block against real activations.

Everything that can be refused is refused before work (`quantization.job`). Then one block at a time is read, solved
(`quantization.block`), written, and run again as quantized to make the inputs of the next. The result is read back and
compared with what was solved before it takes its place, and measured against the original after.
"""

import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.fingerprint import in_form
from quantkit.checkpoint.folder import RESULT_FILE
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.checkpoint.receipt import Receipt
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.commands.quantization import redo
from quantkit.commands.quantization.effort import Effort, choose_effort, choose_hessian_dtype
from quantkit.commands.quantization.end import (
    EVALUATION_LENGTH,
    EVALUATION_WINDOWS,
    backend_of,
    calibration_of,
    check_written,
    measure_damage,
    measured_now,
    report_of,
    spent_since,
)
from quantkit.commands.quantization.exl2 import GPTQ_OPTIONS, check_format, choose_recipe, known_recipe
from quantkit.commands.quantization.fallback import noted_by, planned
from quantkit.commands.quantization.job import (
    UNTRIED,
    QuantizeJob,
    Subject,
    choose_placement,
    held_back_rows,
    on_gpu,
    open_model,
    open_subject,
    prepare,
    require_finite,
)
from quantkit.commands.quantization.memory_limit import heap_settled_after, tell_excess, within_memory
from quantkit.commands.quantization.needs import disk_needs, require_space
from quantkit.commands.quantization.redo_report import RedoReport
from quantkit.commands.quantization.rehearsal import peak_memory
from quantkit.commands.quantization.report import Cost, QuantizeReport, known_afterwards
from quantkit.commands.quantization.resumption import (
    Finished,
    facts_of,
    finished_before,
    job_place,
    read_result,
    result_document,
)
from quantkit.commands.quantization.sensitivity import RunBackward, run_backward
from quantkit.commands.quantization.steps import UNCHANGED, put_together, solve_steps, solved_blocks
from quantkit.commands.quantization.target import fit_target
from quantkit.commands.quantization.tuning import is_tuned, tune_result, with_text_to_judge
from quantkit.job.identity import identify, remembered
from quantkit.job.job import Facts, Job
from quantkit.progress import Progress, Tqdm
from quantkit.settings import QuantizeSettings

MEASURED_OPTIONS = {"exl2": ("bpw", "head_bits", "include_head"), "gptq": GPTQ_OPTIONS}
"""What is known of a recipe whose measurement is gone."""


def quantize(
    model: str | Path, out: str | Path, *, progress: Progress | None = None, **options: Any
) -> QuantizeReport | RedoReport | Finished:
    r"""Quantize `model` into the folder `out`. Options are the fields of `quantkit.settings.QuantizeSettings`.

    report = quantkit.quantize("models/llama", "models/llama-gptq", bits=4, group_size=64)
    report = quantkit.quantize("models/llama", "models/llama-gptq", redo=r".*\.0\..*down_proj", effort="best")
    """
    settings = QuantizeSettings(str(model), Path(out), **{"asked": frozenset(options), **options})
    with heap_settled_after(settings.max_memory):
        return run(settings, progress or Tqdm())


def run(
    settings: QuantizeSettings,
    progress: Progress,
    source: Checkpoint | None = None,
    backward: RunBackward = run_backward,
    made_by: Facts | None = None,
) -> QuantizeReport | RedoReport | Finished:
    """Quantize; with `settings.redo` as `redo.run` does. Raises an error of the tree for anything that cannot be done;
    then no folder is left behind but that of the job, with what is finished.

    `source` is what is read in place of `settings.model`: a quantized model, decoded. `backward` finds the gradients.
    `made_by` is the conversion that this is part of. Only a GateError of the measurement at the end comes when the
    result is complete; it stays.
    """
    if settings.redo is not None:
        return redo.run(settings, progress, backward)
    start = time.monotonic(), time.process_time()
    check_format(settings)
    effort = choose_effort(settings)
    hessian_dtype = choose_hessian_dtype(settings.hessian_dtype)
    placement = choose_placement(settings.device, settings.dtype)
    checkpoint = source or open_model(settings.model, settings.seed, rotate=settings.rotate)
    made = read_result(settings.out)
    overwrite = settings.overwrite or made is not None
    with (
        CheckpointWriter(settings.out, source=checkpoint.path, overwrite=overwrite) as writer,
        Job(job_place(settings.job, writer.path, checkpoint.path)) as kept,
    ):
        subject = open_subject(checkpoint, settings if effort.calibrates else None, placement)
        settings = fit_target(settings, subject, progress)
        subject = within_memory(subject, settings, effort, hessian_dtype, progress)
        effort, subject = with_text_to_judge(effort, subject)
        unseen = held_back_rows(subject, EVALUATION_WINDOWS, EVALUATION_LENGTH) if settings.evaluate else None
        model = identify(checkpoint.original, kept.hints.get("model"), progress)
        facts = facts_of("quantize", settings, subject, model)
        weights = in_form(model.weights, checkpoint)
        if made is not None:
            found = finished_before(writer.path, made, facts, overwrite=settings.overwrite, progress=progress)
            if found is not None and not settings.restart:
                found = measured_now(found, kept, facts, settings, subject, unseen, progress)
                known = _known(settings, effort, subject, found.size_bytes, hessian_dtype, weights, progress)
                return replace(found, known=known)
        kept.begin(facts, hints={"model": remembered(model)}, restart=settings.restart)
        resumed = kept.finished > 0
        gradients = cache(partial(backward, subject, kept, settings.seed, progress))
        recipe = choose_recipe(settings, subject, kept, weights, gradients, progress)
        job = prepare(
            subject,
            recipe,
            settings.strict,
            hessian_dtype=hessian_dtype,
            route_all=settings.route_all,
        )
        require_space(disk_needs(job, weighs=effort.weighs), writer.path, kept.path)
        _announce(job, kept, resumed, progress)
        require_finite(checkpoint, progress)
        weighed = gradients() if effort.weighs else None
        solve_steps(job, kept, weighed.found if weighed else None, progress)
        tunes = is_tuned(job, effort)
        changes, tuning = tune_result(job, kept, effort, settings.seed, progress) if tunes else (UNCHANGED, None)
        results, receipt = put_together(job, kept, writer, changes)
        files = _finish(job, writer, receipt, facts, settings.calibration, made_by, progress)
        tell_excess(settings.max_memory, peak_memory(), progress)
        spent = spent_since(start)
        damage = None if unseen is None else measure_damage(subject, settings.out, unseen, progress)
        fallbacks = (*planned(subject), *noted_by(kept))
        kept.complete()  # no sooner: whoever finds the result and this job knows that it was not measured
    size = sum(file.stat().st_size for file in files if file.suffix == ".safetensors")
    cost = Cost(*spent, *(spent_since(start) if settings.evaluate else spent))
    return report_of(job, settings, effort, results, size, weighed, cost, damage, tuning, fallbacks)


def _known(
    settings: QuantizeSettings,
    effort: Effort,
    subject: Subject,
    size_bytes: int,
    hessian_dtype: torch.dtype,
    weights: str,
    progress: Progress,
) -> dict[str, Any]:
    """What the report of a result that was made before would say, as far as that is known."""
    recipe = known_recipe(settings, subject, progress, weights)
    asked = {name: getattr(settings, name) for name in MEASURED_OPTIONS[settings.format]}
    own = asked if recipe is None else recipe.settings()
    plan = None if recipe is None else prepare(subject, recipe, strict=False, hessian_dtype=hessian_dtype).plan
    return known_afterwards(
        settings.format if recipe is None else recipe.name,
        effort.name,
        {**own, "rotate": settings.rotate},
        backend_of(subject),
        plan,
        subject.parameters,
        size_bytes,
        calibration_of(settings, effort, subject),
    )


def _announce(job: QuantizeJob, kept: Job, resumed: bool, progress: Progress) -> None:
    plan, subject = job.plan, job.subject
    if resumed:
        done = f"{solved_blocks(kept)} of {subject.config.num_layers} blocks are quantized"
        progress.say(f"going on with `{kept.path}`: {done}")
    progress.say(
        f"{len(plan.quantized)} linears to {plan.bits_per_weight:.3f} bits per weight, {len(plan.dense)} stay dense"
    )
    for remark in (*subject.notes, *plan.remarks()):
        progress.say(f"note: {remark}")
    rows, length = subject.rows.shape
    placement = subject.placement
    read = f"{rows} × {length} tokens, {placement.dtype_name} on {placement.device}" if rows else "none"
    progress.say(f"calibration: {read}")
    if on_gpu(placement):
        progress.say(f"note: {UNTRIED}")


def _finish(
    job: QuantizeJob,
    writer: CheckpointWriter,
    receipt: Receipt,
    facts: Facts,
    dataset: str,
    made_by: Facts | None,
    progress: Progress,
) -> list[Path]:
    checkpoint, (rows, length) = job.subject.checkpoint, job.subject.rows.shape
    quantization = job.recipe.config(job.plan, rows, length, dataset)
    untied = {"tie_word_embeddings": False} if job.plan.added_bits else {}
    return writer.finish(
        {**checkpoint.config, **untied, "quantization_config": quantization},
        checkpoint.side_files(),
        {
            **job.recipe.side_json(quantization),
            RESULT_FILE: result_document(facts, receipt, job.plan.bits_per_weight, made_by),
        },
        check=lambda folder: check_written(open_checkpoint(folder), job, receipt, progress),
    )
