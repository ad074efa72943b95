"""Which recipe the options of `quantkit quantize` ask for. An EXL2 one comes from a plan, or from a measurement and a
budget, and where there is no measurement it is made first."""

from collections.abc import Callable, Iterable

from quantkit.checkpoint.fingerprint import fingerprint
from quantkit.commands.measure import measure_model
from quantkit.commands.measuring.outline import outline
from quantkit.commands.quantization.job import Subject
from quantkit.commands.quantization.recipe import Exl2Recipe, GptqRecipe, Recipe
from quantkit.commands.quantization.rules import Rule, read_rules
from quantkit.commands.quantization.sensitivity import BackwardPass
from quantkit.commands.quantization.widths import Freedom, choose_widths
from quantkit.consumers import TARGETS
from quantkit.errors import UsageError, in_shell
from quantkit.formats.exl2_config import DENSE_HEAD_BITS
from quantkit.formats.gptq import GptqCodec
from quantkit.job.job import Job
from quantkit.measurement import Measurement
from quantkit.mix_plan import (
    MixPlan,
    plan_mixes,
    require_head_bits,
    require_no_dense,
    require_reachable,
    require_target,
)
from quantkit.models.architecture import HEAD
from quantkit.progress import Progress
from quantkit.settings import QuantizeSettings

GPTQ_OPTIONS = (
    *("bits", "group_size", "sym", "act_order", "group_aware", "checkpoint_format"),
    *("rule", "skip", "lm_head", "untie_head"),
)
PARTED = "the head of this model is its embedding: rotated, they are two weights"
EXL2_OPTIONS = ("bpw", "head_bits", "include_head", "measurement", "plan")


def check_format(settings: QuantizeSettings) -> None:
    """Raises FormatError for a width or group size that the format lacks, UsageError for options that do not go
    together, PlanError for a plan or measurement that cannot be read."""
    plain = QuantizeSettings(settings.model, settings.out)
    if settings.target is not None:
        _check_target(settings.target, settings.format)
    if settings.format == "gptq":
        _refuse_others(settings, plain, EXL2_OPTIONS, "use `--format exl2` with it")
        if settings.act_order and settings.group_aware:
            raise UsageError("`--act-order` and `--group-aware` are two ways to form groups", hint="choose one of them")
        rules = read_rules(settings.rule, settings.skip)
        base = _gptq(settings, rules)
        for rule in rules:
            rule.codec(base)
    elif settings.format == "exl2":
        _refuse_others(settings, plain, GPTQ_OPTIONS, "EXL2 takes `--bpw 4.0`")
        if (settings.bpw is None) == (settings.plan is None):
            raise UsageError("EXL2 needs either a budget or a plan", hint="use `--bpw 4.0`, or `--plan plan.json`")
        if settings.plan is not None:
            _refuse_others(settings, plain, EXL2_OPTIONS[1:-1], "the plan says it already: leave it out")
        if settings.bpw is not None:
            require_target(settings.bpw)
        require_head_bits(settings.head_bits)
        # Read again when they are used: here only so that a damaged one is known before any text is.
        if settings.plan is not None:
            MixPlan.load(settings.plan)
        if settings.measurement is not None:
            Measurement.load(settings.measurement)
    else:
        raise UsageError(f"unknown format `{settings.format}`", hint="use `--format gptq` or `--format exl2`")


def _check_target(target: str, form: str) -> None:
    """What can be said of a target without a model: EXL2 has one reader."""
    if target not in TARGETS:
        raise UsageError(f"unknown target `{target}`", hint=f"use `--target` {', '.join(TARGETS)}")
    if form == "exl2" and target != "exllamav2":
        raise UsageError(
            f"`--target {target}` does not read EXL2", hint="use `--format gptq`, or `--target exllamav2`"
        )


def choose_recipe(
    settings: QuantizeSettings,
    subject: Subject,
    job: Job,
    model: str,
    run_backward: Callable[[], BackwardPass],
    progress: Progress,
) -> Recipe:
    """`job` keeps each measured block, `run_backward` is for gradients, should the model have to be measured; `model`
    is its fingerprint.

    Raises PlanError for a measurement or a plan of another model, and for a budget out of reach.
    """
    found = known_recipe(settings, subject, progress, model)
    if found is not None:
        return found
    if settings.format == "gptq":
        freedom = Freedom(settings.free_widths, settings.free_alone)
        return choose_widths(choose_gptq(settings, subject), freedom, subject, job, run_backward().found, progress)
    assert settings.bpw is not None
    expected = outline(subject)
    if settings.strict:
        require_no_dense(expected)
    require_reachable(expected, settings.bpw, head_bits=settings.head_bits, include_head=settings.include_head)
    sensitivity = run_backward().found
    measurement = measure_model(subject, job, model, sensitivity, settings.calibration, settings.seed, progress)
    return Exl2Recipe(_mixes(settings, measurement, progress))


def known_recipe(
    settings: QuantizeSettings, subject: Subject, progress: Progress, model: str | None = None
) -> Recipe | None:
    """The recipe that needs no measuring; None where it does. The fingerprint of the model is found, which reads all
    of it, where it is needed and not given as `model`. Raises as `choose_recipe` does."""
    if settings.format == "gptq":
        return None if settings.free_widths else choose_gptq(settings, subject)
    if settings.plan is not None:
        mixes = MixPlan.load(settings.plan)
        mixes.require(model or fingerprint(subject.checkpoint), as_measured(settings))
        _require_head(settings, subject, mixes.head_bits)
        return Exl2Recipe(mixes)
    _require_head(settings, subject, settings.head_bits)
    if settings.measurement is None:
        return None
    measurement = Measurement.load(settings.measurement)
    measurement.require(model or fingerprint(subject.checkpoint), as_measured(settings))
    return Exl2Recipe(_mixes(settings, measurement, progress))


def as_measured(settings: QuantizeSettings) -> str:
    """The model, as it is typed behind `quantkit measure`."""
    model = in_shell(settings.model)
    return f"{model} --rotate --seed {settings.seed}" if settings.rotate else model


def _require_head(settings: QuantizeSettings, subject: Subject, head_bits: int) -> None:
    if settings.rotate and head_bits == DENSE_HEAD_BITS and subject.checkpoint.original.model_config.tie_embeddings:
        raise UsageError(PARTED, hint="quantize it: `--head-bits 8`")


def _mixes(settings: QuantizeSettings, measurement: Measurement, progress: Progress) -> MixPlan:
    assert settings.bpw is not None
    mixes, allocation = plan_mixes(
        measurement, settings.bpw, head_bits=settings.head_bits, include_head=settings.include_head
    )
    progress.say(f"predicted of the linears: {allocation.damage:.4f}, {measurement.unit}")
    return mixes


def choose_gptq(settings: QuantizeSettings, subject: Subject) -> GptqRecipe:
    """Raises UsageError for what cannot be done with the head of this model."""
    tied = subject.checkpoint.original.model_config.tie_embeddings
    if settings.rotate and tied and not settings.untie_head:
        raise UsageError(PARTED, hint="add `--untie-head` for a head of its own; its bytes are in the report")
    if settings.lm_head and tied and not settings.untie_head:
        raise UsageError(
            "the head of this model is its embedding, which is not quantized",
            hint="add `--untie-head` for a head of its own, or leave out `--lm-head`",
        )
    if settings.untie_head and not tied:
        raise UsageError("the head of this model is a weight of its own already", hint="leave out `--untie-head`")
    rules = read_rules(settings.rule, settings.skip)
    names = {name: subject.module_on_disk(name) for name in (*(spec.name for spec in subject.linears), HEAD)}
    return GptqRecipe(_gptq(settings, rules), names, rules, settings.lm_head, settings.untie_head)


def _gptq(settings: QuantizeSettings, rules: Iterable[Rule]) -> GptqCodec:
    """The codec of linears without a rule. One asymmetric linear makes the whole folder `gptq_v2`."""
    sym = settings.sym and all((rule.changes or {}).get("sym", True) for rule in rules)
    written = settings.checkpoint_format or ("gptq" if sym else "gptq_v2")
    return GptqCodec(
        settings.bits, settings.group_size, settings.sym, settings.act_order, written, settings.group_aware
    )


def _refuse_others(settings: QuantizeSettings, plain: QuantizeSettings, names: tuple[str, ...], hint: str) -> None:
    for name in names:
        if getattr(settings, name) != getattr(plain, name):
            option = "--asym" if name == "sym" else "--" + name.replace("_", "-")
            other = " beside `--plan`" if settings.plan is not None else f" with `--format {settings.format}`"
            raise UsageError(f"`{option}` has no meaning{other}", hint=hint)
