"""`--target`: settings held to what those who shall read the folder can load, before any work.

The rules are those of `quantkit check` (`consumers`), asked about a folder that is only planned.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit.checkpoint.spelling import spellings
from quantkit.commands.quantization.effort import choose_effort
from quantkit.commands.quantization.exl2 import choose_gptq
from quantkit.commands.quantization.job import Subject
from quantkit.commands.quantization.rules import Rule, deciding, read_rules
from quantkit.commands.quantization.widths import WIDTHS, Freedom, width_rules
from quantkit.consumers import TARGETS, Verdict, verdicts
from quantkit.errors import FormatError, QuantkitError
from quantkit.formats.gptq_config import GptqConfig, GptqSettings
from quantkit.inventory import DENSE, EXL2, GPTQ, Inventory, StoredLinear, family_name
from quantkit.models.architecture import HEAD, LinearSpec, by_stage
from quantkit.plan import PlannedLinear
from quantkit.progress import Progress
from quantkit.settings import QuantizeSettings

GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a planned folder fares: what stands in the way, and which of several classes does not load it."""

    objections: tuple[str, ...]
    second_choice: Verdict | None
    cautions: tuple[str, ...]


def fit_target(settings: QuantizeSettings, subject: Subject, progress: Progress) -> QuantizeSettings:
    """The settings that the target can load, the target itself taken out: as they are, or, where the group size was
    left to it, with another one. With `--effort best` they say what widths single linears may have there, if several.

    Raises FormatError, with the linear that stands in the way and a change that would do.
    """
    if settings.target is None:
        return settings
    outcome = _try(settings, subject)
    if outcome.objections or (outcome.second_choice and settings.free_group_size):
        for other in _group_sizes(settings):
            found = _try(other, subject)
            if not found.objections and (outcome.objections or not found.second_choice):
                progress.say(f"group size {other.group_size}, as `--target {settings.target}` needs it")
                settings, outcome = other, found
                break
    if outcome.objections:
        raise FormatError(f"`--target {settings.target}`: {outcome.objections[0]}", hint=_way_out(settings, subject))
    if outcome.second_choice is not None:
        verdict = outcome.second_choice
        progress.say(f"{verdict.consumer} will not load this: {verdict.objections[0]}")
    for caution in outcome.cautions:
        progress.say(caution)
    settings = replace(settings, free_group_size=False)
    free = _freedom(settings, subject, outcome)
    if free is not None:  # then the target is among what the result depends on
        return replace(settings, free_widths=free.widths, free_alone=free.alone)
    return replace(settings, target=None)


def _freedom(settings: QuantizeSettings, subject: Subject, outcome: _Outcome) -> Freedom | None:
    """Which widths the target reads beside `--bits`, if that leaves a choice: a linear without a rule is given each of
    them, by itself or with those that read the same input."""
    if settings.format != GPTQ or not choose_effort(settings).allots:
        return None
    rules = read_rules(settings.rule, settings.skip)
    names = [[subject.module_on_disk(spec.name) for spec in stage] for stage in by_stage(subject.linears)]
    free = [stage for stage in names if not any(deciding(rules, name) for name in stage)]
    if not free:
        return None
    widest = max(free, key=len)
    for alone, changed in ((True, widest[:1]), (False, widest)):
        widths = [
            bits
            for bits in WIDTHS
            if bits == settings.bits or _reads(settings, subject, width_rules(dict.fromkeys(changed, bits)), outcome)
        ]
        if min(widths) < settings.bits < max(widths):
            return Freedom(tuple(widths), alone)
    return None


def _reads(settings: QuantizeSettings, subject: Subject, rules: Sequence[Rule], outcome: _Outcome) -> bool:
    """Whether the target loads a folder with these rules as well as without them."""
    try:
        found = _try(replace(settings, rule=(*settings.rule, *(rule.text for rule in rules))), subject)
    except QuantkitError:  # a width that the rest of the settings does not go with
        return False
    return not found.objections and (found.second_choice is None or outcome.second_choice is not None)


def _try(settings: QuantizeSettings, subject: Subject) -> _Outcome:
    found = {verdict.consumer: verdict for verdict in verdicts(planned_inventory(settings, subject))}
    objections: list[str] = []
    cautions: list[str] = []
    second: Verdict | None = None
    for group in TARGETS[settings.target or "any"]:
        loading = [name for name in group if found[name].loads]
        if not loading:
            first = found[group[-1]]
            objections.append(f"{first.consumer} will not load this: {first.objections[0]}")
            continue
        if loading[0] != group[0]:
            second = found[group[0]]
        cautions += [f"{loading[0]}: {caution}" for caution in found[loading[0]].cautions]
    return _Outcome(tuple(objections), second, tuple(cautions))


def _group_sizes(settings: QuantizeSettings) -> Iterator[QuantizeSettings]:
    if settings.format == GPTQ and settings.free_group_size:
        for size in GROUP_SIZES:
            if size != settings.group_size:
                yield replace(settings, group_size=size)


def _way_out(settings: QuantizeSettings, subject: Subject) -> str:
    """One change that would do, as it is typed; else to do without the target."""
    plain = QuantizeSettings(settings.model, settings.out)
    changes: list[tuple[str, dict[str, Any]]] = [
        ("leave out `--rule` and `--skip`", {"rule": (), "skip": ()}),
        ("use `--sym`", {"sym": True, "checkpoint_format": None}),
        ("use `--bits 4`", {"bits": 4}),
        ("use `--bits 8`", {"bits": 8}),
        *((f"use `--group-size {size}`", {"group_size": size}) for size in GROUP_SIZES),
        ("use `--bits 4 --sym`", {"bits": 4, "sym": True, "checkpoint_format": None}),
        ("leave out `--lm-head`", {"lm_head": False, "untie_head": False}),
        ("leave out `--checkpoint-format`", {"checkpoint_format": None}),
        ("use `--format gptq`", {name: getattr(plain, name) for name in ("format", "bpw", "plan", "measurement")}),
    ]
    for words, change in changes:
        other = replace(settings, **change)
        if other == settings:
            continue
        try:
            if not _try(other, subject).objections:
                return words
        except QuantkitError:  # a change that does not go together with the rest
            continue
    return "no single setting would do: leave out `--target`, or name another"


def planned_inventory(settings: QuantizeSettings, subject: Subject) -> Inventory:
    """What the folder will hold. Raises what planning raises."""
    if settings.format == EXL2:
        linears = [_planned_exl2(spec, part) for spec in subject.linears for part in _parts(spec)]
        head = None if settings.head_bits == 16 else _planned_exl2(subject.head, (HEAD, subject.head.out_features))
        return _inventory(subject, EXL2, {"quant_method": EXL2}, tuple(linears), head)
    recipe = choose_gptq(settings, subject)
    plan = recipe.plan(subject.linears, subject.head, subject.stored_bits)
    said = recipe.config(plan, 0, 0, "")
    config = GptqConfig.read(said)
    specs = {spec.name: spec for spec in (*subject.linears, subject.head)}
    stored = tuple(_planned_gptq(linear, specs[linear.name], subject, config) for linear in plan.linears)
    head = None if plan.head is None else _planned_gptq(plan.head, subject.head, subject, config)
    return _inventory(subject, GPTQ, said, stored, head, tied=subject.config.tie_embeddings and not settings.untie_head)


def _inventory(
    subject: Subject,
    method: str,
    said: Mapping[str, object],
    linears: tuple[StoredLinear, ...],
    head: StoredLinear | None,
    *,
    tied: bool | None = None,
) -> Inventory:
    return Inventory(
        family=family_name(subject.architecture),
        config=subject.config,
        tied=subject.config.tie_embeddings if tied is None else tied,
        method=method,
        quantization=said,
        in_config=True,
        linears=linears,
        head=head,
    )


def _parts(spec: LinearSpec) -> list[tuple[str, int]]:
    """Where EXL2 has a fused linear: name and outputs of each part."""
    if len(spec.widths) == 1:
        return [(spec.name, spec.out_features)]
    return list(zip(spellings(spec.name)[-1], spec.widths, strict=True))


def _planned_exl2(spec: LinearSpec, part: tuple[str, int]) -> StoredLinear:
    return StoredLinear(part[0], spec.name, spec.stage, spec.in_features, part[1], EXL2, spec.bias, 0)


def _planned_gptq(linear: PlannedLinear, spec: LinearSpec, subject: Subject, config: GptqConfig) -> StoredLinear:
    name = subject.module_on_disk(linear.name)
    settings = None if linear.layout is None else config.for_module(name)
    return StoredLinear(
        name=name,
        linear=linear.name,
        stage=spec.stage,
        in_features=linear.in_features,
        out_features=linear.out_features,
        format=DENSE if settings is None else GPTQ,
        bias=spec.bias,
        stored_bits=linear.stored_bits,
        settings=settings,
        scattered=spec.stage if settings is not None and settings.act_order else None,
        zero_points=None if settings is None else _zero_points(settings),
    )


def _zero_points(settings: GptqSettings) -> tuple[int, int]:
    """The least and greatest that may come out."""
    middle, top = 1 << settings.bits - 1, (1 << settings.bits) - 1
    if settings.sym:
        return middle, middle
    return (1 if settings.checkpoint_format == "gptq" else 0), top
