"""`quantkit quantize --redo`: linears of a finished result, solved anew against what the rest of it makes of the text.

The text runs through the blocks as the result has them, and only as far as the last linear that is to be solved; its
inputs are those that it will see. What comes out takes the place of the result as a whole, all other tensors byte for
byte as they were; where unseen text says that the model is the worse for it, the result stays as it is.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.decoded import DecodedCheckpoint
from quantkit.checkpoint.folder import QUANTIZATION_FILES, RESULT_FILE, read_json
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.checkpoint.receipt import Receipt
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.commands.quantization.effort import Effort, choose_effort, choose_hessian_dtype
from quantkit.commands.quantization.end import (
    EVALUATION_LENGTH,
    EVALUATION_WINDOWS,
    backend_of,
    calibration_of,
    check_written,
    compare_with_original,
    measured_now,
    report_of,
    sample_answer,
    spent_since,
)
from quantkit.commands.quantization.fallback import noted_by, planned
from quantkit.commands.quantization.job import (
    UNTRIED,
    QuantizeJob,
    choose_placement,
    held_back_rows,
    on_gpu,
    open_model,
    open_subject,
    prepare,
    require_finite,
)
from quantkit.commands.quantization.memory_limit import tell_excess, within_memory
from quantkit.commands.quantization.needs import disk_needs, require_space
from quantkit.commands.quantization.redo_recipe import stored_recipe
from quantkit.commands.quantization.redo_report import Judgement, RedoReport, earlier_words, redo_as_json
from quantkit.commands.quantization.redo_result import FILES, PreviousResult, chosen_linears, require_alone
from quantkit.commands.quantization.redo_sources import Redo
from quantkit.commands.quantization.rehearsal import peak_memory
from quantkit.commands.quantization.report import Cost, Damage, known_afterwards
from quantkit.commands.quantization.resumption import (
    Finished,
    as_finished,
    facts_of,
    job_place,
    redone,
    result_document,
)
from quantkit.commands.quantization.rules import read_redo
from quantkit.commands.quantization.sensitivity import RunBackward, run_backward
from quantkit.commands.quantization.steps import (
    UNCHANGED,
    put_in_their_place,
    solve_steps,
    solved_blocks,
    solved_homes,
    solved_linears,
)
from quantkit.commands.quantization.tuning import STEP as TUNE_STEP
from quantkit.commands.quantization.tuning import is_tuned, tune_result, with_text_to_judge
from quantkit.errors import GateError
from quantkit.job.identity import ModelIdentity, identify, remembered
from quantkit.job.job import Facts, Job
from quantkit.models.source import Source
from quantkit.models.transformer import Model
from quantkit.progress import Progress
from quantkit.runtime.load import load
from quantkit.settings import QuantizeSettings

JUDGE = "judge"
FROM = "redone from"
"""The fact that says which result was redone: the digest of its record."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadyRedo:
    """A redo that nothing is to be said against. `settings` are complete, `receipt` is of the result so far."""

    settings: QuantizeSettings
    effort: Effort
    previous: PreviousResult
    model: ModelIdentity
    job: QuantizeJob
    receipt: Receipt

    @property
    def redo(self) -> Redo:
        assert self.job.redo is not None
        return self.job.redo

    @property
    def pattern(self) -> str:
        return self.settings.redo or ""

    @property
    def facts(self) -> Facts:
        """Those of this redo, of what is there now."""
        files = {name: self.previous.facts.get(name) for name in FILES}
        own = facts_of("quantize", self.settings, self.job.subject, self.model)
        return {**own, **files, FROM: self.previous.digest}


def get_ready(
    settings: QuantizeSettings, out: Path, known: Mapping[str, Any] | None, progress: Progress
) -> ReadyRedo:
    """Everything that can be refused without work: raises the error of whatever is not as it must be. `out` is where
    the result is, `known` what a job remembers of the model."""
    require_alone(settings)
    rule = read_redo(settings.redo or "")
    previous = PreviousResult.open(out)
    settings = previous.complete(settings)
    effort, hessian_dtype = choose_effort(settings), choose_hessian_dtype(settings.hessian_dtype)
    placement = choose_placement(settings.device, settings.dtype)
    checkpoint = open_model(settings.model, previous.rotation_seed, rotate=settings.rotate)
    subject = open_subject(checkpoint, settings if effort.calibrates else None, placement)
    model = identify(checkpoint.original, known, progress)
    previous.require_model(model.weights, subject)
    subject = within_memory(subject, settings, effort, hessian_dtype, progress)
    effort, subject = with_text_to_judge(effort, subject)
    recipe = stored_recipe(settings, subject, previous.checkpoint)
    job = prepare(subject, recipe, settings.strict, hessian_dtype=hessian_dtype, route_all=settings.route_all)
    previous.require_plan(job.plan)
    redo = Redo(previous.checkpoint, chosen_linears(rule, job.plan, subject))
    receipt = previous.require_unchanged(progress)
    return ReadyRedo(settings, effort, previous, model, replace(job, redo=redo), receipt)


def run(
    settings: QuantizeSettings, progress: Progress, backward: RunBackward = run_backward
) -> RedoReport | Finished:
    """Redo what `settings.redo` matches in `settings.out`. Raises an error of the tree for anything that cannot be
    done; then the result is as it was, with what is finished beside it in the folder of the job."""
    start = time.monotonic(), time.process_time()
    require_alone(settings)
    source = open_checkpoint(settings.model).path
    with (
        CheckpointWriter(settings.out, source=source, overwrite=True) as writer,
        Job(job_place(settings.job, writer.path, source)) as kept,
    ):
        ready = get_ready(settings, writer.path, kept.hints.get("model"), progress)
        settings, effort, job, facts = ready.settings, ready.effort, ready.job, ready.facts
        subject = job.subject
        unseen = held_back_rows(subject, EVALUATION_WINDOWS, EVALUATION_LENGTH) if settings.evaluate else None
        if (made := _made_by(ready)) is not None and not settings.restart:
            found = as_finished(ready.previous.checkpoint, ready.previous.made)
            found = measured_now(found, kept, made, settings, subject, unseen, progress)
            return replace(found, known=_known(ready, found.size_bytes))
        kept.begin(facts, hints={"model": remembered(ready.model)}, restart=settings.restart)
        gradients = cache(partial(backward, subject, kept, settings.seed, progress))
        require_space(disk_needs(job, weighs=effort.weighs), writer.path, kept.path)
        _announce(ready, kept, progress)
        require_finite(subject.checkpoint, progress)
        weighed = gradients() if effort.weighs else None
        solve_steps(job, kept, weighed.found if weighed else None, progress)
        tunes = is_tuned(job, effort)
        changes, tuning = (
            tune_result(job, kept, effort, settings.seed, progress) if tunes else (UNCHANGED, None)
        )
        judgement = None if unseen is None else _judge(ready, kept, unseen, progress)
        results, size = solved_linears(kept), as_finished(ready.previous.checkpoint, ready.previous.made).size_bytes
        if judgement is None or not judgement.worse:
            receipt = put_in_their_place(ready.redo, kept, writer, ready.receipt, changes)
            files = _finish(ready, writer, receipt, facts, progress)
            size = sum(file.stat().st_size for file in files if file.suffix == ".safetensors")
        tell_excess(settings.max_memory, peak_memory(), progress)
        spent = spent_since(start)
        damage = None
        if judgement is not None:  # what was judged is what was read back
            candidate = load(writer.path, subject.placement.device, torch.float32)
            damage = replace(judgement.kept, answer=sample_answer(subject, candidate))
        fallbacks = (*planned(subject), *noted_by(kept))
        kept.complete()
    cost = Cost(*spent, *(spent_since(start) if settings.evaluate else spent))
    return RedoReport(
        report_of(job, settings, effort, results, size, weighed, cost, damage, tuning, fallbacks),
        ready.pattern,
        judgement,
        earlier_words(redone(ready.previous.made)),
    )


def _made_by(ready: ReadyRedo) -> Facts | None:
    """The facts of the last redo of the result, where this one is the same; None where something is to be done."""
    last = redone(ready.previous.made)[-1:]
    before: Facts = last[0]["facts"] if last else {}
    return before if {**ready.facts, FROM: before.get(FROM)} == before else None


def _known(ready: ReadyRedo, size_bytes: int) -> dict[str, Any]:
    """What the report of a redo that was made before would say, as far as that is known."""
    settings, subject, job = ready.settings, ready.job.subject, ready.job
    known = known_afterwards(
        job.recipe.name,
        ready.effort.name,
        {**job.recipe.settings(), "rotate": settings.rotate},
        backend_of(subject),
        job.plan,
        subject.parameters,
        size_bytes,
        calibration_of(settings, ready.effort, subject),
    )
    earlier = earlier_words(redone(ready.previous.made)[:-1])
    return {**known, "redo": redo_as_json(ready.pattern, len(ready.redo.names), earlier, kept=True)}


def _announce(ready: ReadyRedo, kept: Job, progress: Progress) -> None:
    job, subject, count = ready.job, ready.job.subject, len(ready.redo.names)
    if kept.finished:
        progress.say(f"going on with `{kept.path}`: {solved_blocks(kept)} of {job.blocks} blocks are done")
    of = f"{count} of {len(job.plan.work)} quantized linears"
    progress.say(f"{of} are solved anew with effort {ready.effort.name}, all else stays as it is")
    if ready.effort.calibrates:
        rows, length = subject.rows.shape
        read = f"{rows} × {length} tokens, {subject.placement.dtype_name} on {subject.placement.device}"
        progress.say(f"calibration: {read}, through {job.blocks} of {subject.config.num_layers} blocks")
    if ready.effort.tunes and job.has_head:
        progress.say("note: the head is solved anew, and not tuned")
    if on_gpu(subject.placement):
        progress.say(f"note: {UNTRIED}")


def _judge(ready: ReadyRedo, kept: Job, windows: Tensor, progress: Progress) -> Judgement:
    """Unless it has been done. Raises GateError where the figures are no numbers."""
    if not kept.has(JUDGE):
        tuned = kept.homes(TUNE_STEP) if kept.has(TUNE_STEP) else {}
        progress.say("judged on unseen text: the result as it was, then with what was solved anew")
        before = _damage(ready, DecodedCheckpoint.of(ready.previous.checkpoint), windows, progress)
        after = _damage(ready, ready.redo.outcome(solved_homes(kept) | tuned), windows, progress)
        if not (math.isfinite(before.kl_mean) and math.isfinite(after.kl_mean)):
            raise GateError(
                f"the KL of the result was {before.kl_mean}, it would be {after.kl_mean}: that cannot be judged",
                hint="use `--dtype fp32`, or `--no-eval` to do without",
            )
        with kept.step(JUDGE) as step:
            step.finish({"before": before.as_json(), "after": after.as_json()})
    value = kept.value(JUDGE)
    return Judgement(Damage.read(value["before"]), Damage.read(value["after"]))


def _damage(ready: ReadyRedo, source: Source, windows: Tensor, progress: Progress) -> Damage:
    subject, own = ready.job.subject, ready.previous.checkpoint.model_config
    with torch.inference_mode():
        candidate = Model.stream(source, own, subject.architecture, torch.float32, subject.placement.device)
        return compare_with_original(subject, candidate, windows, progress)


def _finish(
    ready: ReadyRedo, writer: CheckpointWriter, receipt: Receipt, facts: Facts, progress: Progress
) -> list[Path]:
    """All that is no tensor is as it was, but for the record."""
    folder, made = ready.previous.checkpoint, ready.previous.made
    entries = [*redone(made), {"facts": dict(facts), "linears": len(ready.redo.names)}]
    places = (folder.path / name for name in QUANTIZATION_FILES)
    return writer.finish(
        folder.config,
        folder.side_files(),
        {
            **{path.name: read_json(path) for path in places if path.exists()},
            RESULT_FILE: result_document(
                ready.previous.facts, receipt, float(made["bits_per_weight"]), redone=entries
            ),
        },
        check=lambda new: check_written(open_checkpoint(new), ready.job, receipt, progress),
    )
