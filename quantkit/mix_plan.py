"""MixPlan: which mix of widths each linear of an EXL2 model gets; a JSON file that a person may edit.

`plan_mixes(measurement, 4.0, head_bits=6)` chooses; `MixPlan.load(path)` takes whatever the file says, which is then
held to the model when it is used: each linear is listed, with a mix or with a reason to stay dense.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from quantkit.allocation import Allocation, Option, allocate, require_feasible
from quantkit.errors import FormatError, PlanError, UsageError
from quantkit.formats import exl2_layout, exl2_mix
from quantkit.formats.codec import Layout
from quantkit.formats.exl2_config import DENSE_HEAD_BITS
from quantkit.measurement import Candidate, MeasuredLinear, Measurement, load_json, save_json
from quantkit.models.architecture import LinearSpec
from quantkit.plan import Plan, PlannedLinear

KIND, VERSION = "quantkit plan", 1
MOST_BITS = 64
NEAR = 0.995
"""A plan that takes less of its target than this is remarked upon."""


@dataclass(frozen=True, slots=True)
class MixPlan:
    """
    model         fingerprint of the model it was made for
    target        bits per weight that were asked for
    include_head  whether the head was part of that
    head_bits     16 leaves it as it is
    linears       name → mix
    dense         name → why it stays as it is
    """

    model: str
    target: float
    include_head: bool
    head_bits: int
    linears: Mapping[str, str]
    dense: Mapping[str, str]

    def save(self, path: Path) -> None:
        save_json(path, {"kind": KIND, "version": VERSION, **asdict(self)})

    def require(self, fingerprint: str, model: str) -> None:
        """PlanError unless this was planned for the model of that fingerprint."""
        if fingerprint != self.model:
            raise PlanError(
                f"the plan is for another model than `{model}`: fingerprint {self.model[:12]}, "
                f"expected {fingerprint[:12]}",
                hint=f"measure this one and plan again: `quantkit measure {model} -o measurement.json`",
            )

    def layouts(self, specs: Iterable[LinearSpec], head: LinearSpec, stored_bits: Mapping[str, int]) -> Plan:
        """The plan of a model with these linears. `stored_bits` are those of each as the source has it.

        Raises PlanError unless it speaks of all these linears and no other, and each mix fits its linear.
        """
        own = [spec for spec in specs if spec.quantizable]
        names = {spec.name for spec in own}
        for name in (*self.linears, *self.dense):
            if name not in names:
                raise PlanError(f"the plan names `{name}`, which is no linear of this model", hint="plan again")
        plan = Plan(
            tuple(self._planned(spec, stored_bits[spec.name]) for spec in own),
            None if self.head_bits == DENSE_HEAD_BITS else _planned_head(head, self.head_bits),
        )
        remarks = (self._missed(plan, head), self._dense_head(plan, head))
        return replace(plan, notes=tuple(remark for remark in remarks if remark))

    def _dense_head(self, plan: Plan, head: LinearSpec) -> str | None:
        if plan.head is not None or self.head_bits == DENSE_HEAD_BITS:
            return None
        return f"`{head.name}` stays dense: {exl2_layout.shape_refusal(head.in_features, 2)}"

    def _missed(self, plan: Plan, head: LinearSpec) -> str | None:
        """What to say of a plan that is above its target, as only an edited one can be, or far below it."""
        bits, weights = plan.stored_bits, sum(linear.weights for linear in plan.linears)
        if self.include_head:
            own = head.in_features * head.out_features
            bits += DENSE_HEAD_BITS * own if plan.head is None else plan.head.stored_bits
            weights += own
        reached = bits / weights
        if reached > self.target:
            return f"the plan takes {reached:.4f} bits per weight, more than the {self.target:g} that it was made for"
        if reached < NEAR * self.target:
            return f"the plan takes {reached:.4f} bits per weight of {self.target:g}: no linear has a step that fits"
        return None

    def _planned(self, spec: LinearSpec, stored_bits: int) -> PlannedLinear:
        if (spec.name in self.linears) == (spec.name in self.dense):
            what = "both" if spec.name in self.dense else "neither"
            raise PlanError(
                f"the plan has `{spec.name}` under {what} of `linears` and `dense`", hint="put it under one of them"
            )
        if spec.name in self.linears:
            return _planned(spec, self.linears[spec.name])
        reason = self.dense[spec.name]
        return PlannedLinear(spec.name, spec.in_features, spec.out_features, None, stored_bits, reason)

    @classmethod
    def load(cls, path: Path) -> "MixPlan":
        """Raises PlanError, naming file and key, for anything that is no plan; also for a mix that EXL2 lacks."""
        value = load_json(path, KIND, VERSION, "quantkit plan measurement.json --bpw 4.0 -o plan.json")
        try:
            keys = {"kind", "version", *(field.name for field in fields(cls))}
            if unknown := sorted(value.keys() - keys):
                raise ValueError(f"unknown key `{unknown[0]}`")
            plan = cls(
                _typed(value, "model", str),
                float(_typed(value, "target", int, float)),
                _typed(value, "include_head", bool),
                _typed(value, "head_bits", int),
                _strings(value, "linears"),
                _strings(value, "dense"),
            )
            require_target(plan.target)
            require_head_bits(plan.head_bits)
            for name, mix in plan.linears.items():
                _require_mix(name, mix)
        except (KeyError, TypeError, ValueError, UsageError) as error:
            reason = f"no key {error}" if isinstance(error, KeyError) else str(error)
            raise PlanError(f"`{path}` is a damaged plan: {reason}", hint="correct it, or plan again") from error
        if not plan.linears:
            raise PlanError(f"`{path}` quantizes no linear", hint="plan again")
        return plan


def plan_mixes(
    measurement: Measurement, target: float, *, head_bits: int, include_head: bool = False
) -> tuple[MixPlan, Allocation]:
    """The mixes of least damage that do not take more than `target` bits for each weight of the linears.

    With `include_head` the head, whose mix follows from `head_bits`, counts among the weights and bits. Raises
    PlanError for a target out of reach.
    """
    found = allocate(*_budget(measurement, target, head_bits, include_head))
    mixes = {name: candidate.mix for name, candidate in chosen_candidates(measurement, found).items()}
    reasons = {linear.name: linear.dense_because or "" for linear in measurement.dense}
    return MixPlan(measurement.model, target, include_head, head_bits, mixes, reasons), found


def chosen_candidates(measurement: Measurement, allocation: Allocation) -> dict[str, Candidate]:
    """What `plan_mixes` chose, by linear, in the order of the model."""
    found = chosen_by_linear(measurement.choices, allocation)
    return {linear.name: found[linear.name] for linear in measurement.linears if linear.name in found}


def choice_options(choices: Iterable[Sequence[MeasuredLinear]]) -> list[list[Option]]:
    """What `allocate` takes: for each choice, linears that are stored alike, what each of their candidates costs."""
    return [
        [
            Option(sum(each.bits for each in alike), sum(each.damage for each in alike))
            for alike in zip(*(linear.candidates for linear in choice), strict=True)
        ]
        for choice in choices
    ]


def chosen_by_linear(
    choices: Iterable[Sequence[MeasuredLinear]], allocation: Allocation
) -> dict[str, Candidate]:
    """The candidate of each linear where `allocate` chose among the options of these choices, and of others behind."""
    return {
        linear.name: linear.candidates[number]
        for choice, number in zip(choices, allocation.chosen, strict=False)
        for linear in choice
    }


def require_reachable(measurement: Measurement, target: float, *, head_bits: int, include_head: bool = False) -> None:
    """PlanError for a target that `plan_mixes` would find out of reach; damages may be unknown still."""
    require_feasible(*_budget(measurement, target, head_bits, include_head))


def require_no_dense(measurement: Measurement) -> None:
    """`--strict`: FormatError where the format cannot hold a linear, or only with its last 16 rows at 2 bits."""
    for linear in measurement.dense:
        raise FormatError(
            f"`{linear.name}` cannot be quantized: {linear.dense_because} ({len(measurement.dense)} such linears)",
            hint="leave out `--strict` to accept this, or use another format",
        )
    uneven = [linear for linear in measurement.linears if linear.in_features % exl2_layout.STEP]
    for linear in uneven:
        raise FormatError(
            f"`{linear.name}` has {linear.in_features} input features, no multiple of {exl2_layout.STEP}: its last "
            f"{exl2_layout.SHORT_STEP} rows can have 2 bits only ({len(uneven)} such linears)",
            hint="leave out `--strict` to accept this, or use another format",
        )


def _budget(
    measurement: Measurement, target: float, head_bits: int, include_head: bool
) -> tuple[list[list[Option]], int, int]:
    """What `allocate` takes: the options of each choice and at last of all that is fixed; bits; weights."""
    require_head_bits(head_bits)
    require_target(target)
    options = choice_options(measurement.choices)
    if not options:
        raise PlanError("no linear of this model can be quantized", hint="use another format")
    weights, fixed = measurement.weights, sum(linear.dense_bits for linear in measurement.dense)
    if include_head:
        weights += measurement.head_weights
        fixed += head_stored_bits(measurement, head_bits)
    return [*options, [Option(fixed, 0.0)]], int(target * weights), weights


def head_stored_bits(measurement: Measurement, head_bits: int) -> int:
    """All bits of the head on disk; 16 for each weight where it is not quantized."""
    hidden = measurement.head_inputs
    layout = None if head_bits == DENSE_HEAD_BITS else exl2_mix.head_layout(head_bits, hidden)
    if layout is None:
        return DENSE_HEAD_BITS * measurement.head_weights
    return exl2_layout.stored_bits(layout, measurement.head_weights // hidden, bias=False)


def require_head_bits(head_bits: int) -> None:
    """UsageError for a width that a head cannot have."""
    if head_bits not in (*exl2_mix.HEAD, DENSE_HEAD_BITS):
        raise UsageError(
            f"a head of {head_bits} bits cannot be written", hint="use `--head-bits` 2, 3, 4, 5, 6, 8, or 16 for dense"
        )


def require_target(target: float) -> None:
    """UsageError for what is no number of bits for a weight."""
    if not 0 < target <= MOST_BITS:
        message = f"expected bits per weight above 0, up to {MOST_BITS}, found {target:g}"
        raise UsageError(message, hint="use `--bpw 4.0`")


def _planned(spec: LinearSpec, mix: str) -> PlannedLinear:
    try:
        return with_layout(spec, exl2_layout.mixed(spec.in_features, exl2_mix.read(mix)))
    except FormatError as error:
        raise PlanError(
            f"`{spec.name}` cannot get `{mix}`: {error.message}", hint="move it to `dense` with a reason"
        ) from error


def _planned_head(spec: LinearSpec, head_bits: int) -> PlannedLinear | None:
    """None where EXL2 cannot hold it."""
    layout = exl2_mix.head_layout(head_bits, spec.in_features)
    return None if layout is None else with_layout(spec, layout)


def with_layout(spec: LinearSpec, layout: Layout) -> PlannedLinear:
    """A linear in an EXL2 layout, in parts where it is fused."""
    bits = exl2_layout.stored_bits_in_parts(layout, spec.widths, spec.bias)
    parts = spec.widths if len(spec.widths) > 1 else ()
    first, last = layout.groups[0].rows, layout.groups[-1].rows
    short = (last, first) if last < exl2_layout.STEP else None
    return PlannedLinear(spec.name, spec.in_features, spec.out_features, layout, bits, short_group=short, widths=parts)


def _require_mix(name: str, mix: str) -> None:
    try:
        exl2_mix.read(mix)
    except FormatError as error:
        raise PlanError(f"`{name}` in the plan: {error.message}", hint=error.hint) from error


def _typed(value: Mapping[str, Any], key: str, *types: type) -> Any:
    """`"false"` is true to Python, and true is 1: what a person wrote must be of the type itself."""
    if type(value[key]) not in types:
        raise ValueError(f"`{key}` is {json.dumps(value[key])}, expected {_NAMES[types[0]]}")
    return value[key]


_NAMES = {str: "a text", int: "a number", bool: "true or false"}


def _strings(value: Mapping[str, Any], key: str) -> dict[str, str]:
    found = value[key]
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise ValueError(f"`{key}`: expected an object of names and texts")
    return dict(found)
