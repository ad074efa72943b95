"""MixPlan: which mix of widths each linear of an EXL2 model gets; a JSON file that a person may edit.

`plan_mixes(measurement, 4.0, head_bits=6)` chooses; `MixPlan.load(path)` takes whatever the file says, which is then
held to the model when it is used: each linear is listed, with a mix or with a reason to stay dense.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.allocation import Allocation, Option, allocate
from quantkit.errors import FormatError, PlanError, UsageError
from quantkit.formats import exl2_layout, exl2_mix
from quantkit.measurement import Measurement, load_json, save_json
from quantkit.models.architecture import LinearSpec
from quantkit.plan import Plan, PlannedLinear

KIND, VERSION = "quantkit plan", 1
DENSE_HEAD_BITS = 16


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
        return Plan(
            tuple(self._planned(spec, stored_bits[spec.name]) for spec in own),
            None if self.head_bits == DENSE_HEAD_BITS else _planned(head, exl2_mix.HEAD[self.head_bits]),
        )

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
            plan = cls(
                str(value["model"]),
                float(value["target"]),
                bool(value["include_head"]),
                int(value["head_bits"]),
                _strings(value["linears"]),
                _strings(value["dense"]),
            )
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
    require_head_bits(head_bits)
    if not 0 < target <= 64:
        raise UsageError(f"expected bits per weight above 0, found {target:g}", hint="use `--bpw 4.0`")
    quantized = [linear for linear in measurement.linears if linear.candidates]
    dense = [linear for linear in measurement.linears if not linear.candidates]
    if not quantized:
        raise PlanError("no linear of this model can be quantized", hint="use another format")
    weights, fixed = measurement.weights, sum(linear.dense_bits for linear in dense)
    if include_head:
        weights += measurement.head_weights
        fixed += head_stored_bits(measurement, head_bits)
    options = [[Option(found.bits, found.damage) for found in linear.candidates] for linear in quantized]
    found = allocate([*options, [Option(fixed, 0.0)]], int(target * weights), weights)
    mixes = {
        linear.name: linear.candidates[number].mix for linear, number in zip(quantized, found.chosen, strict=False)
    }
    reasons = {linear.name: linear.dense_because or "" for linear in dense}
    return MixPlan(measurement.model, target, include_head, head_bits, mixes, reasons), found


def head_stored_bits(measurement: Measurement, head_bits: int) -> int:
    """All bits of the head on disk; as many for each weight as its width where it is not quantized."""
    if head_bits == DENSE_HEAD_BITS:
        return DENSE_HEAD_BITS * measurement.head_weights
    hidden = measurement.head_inputs
    layout = exl2_layout.mixed(hidden, exl2_mix.read(exl2_mix.HEAD[head_bits]))
    return exl2_layout.stored_bits(layout, measurement.head_weights // hidden, bias=False)


def require_head_bits(head_bits: int) -> None:
    """UsageError for a width that a head cannot have."""
    if head_bits not in (*exl2_mix.HEAD, DENSE_HEAD_BITS):
        raise UsageError(
            f"a head of {head_bits} bits cannot be written", hint="use `--head-bits` 2, 3, 4, 5, 6, 8, or 16 for dense"
        )


def _planned(spec: LinearSpec, mix: str) -> PlannedLinear:
    try:
        layout = exl2_layout.mixed(spec.in_features, exl2_mix.read(mix))
    except FormatError as error:
        raise PlanError(
            f"`{spec.name}` cannot get `{mix}`: {error.message}", hint="move it to `dense` with a reason"
        ) from error
    bits = exl2_layout.stored_bits(layout, spec.out_features, spec.bias)
    return PlannedLinear(spec.name, spec.in_features, spec.out_features, layout, bits)


def _require_mix(name: str, mix: str) -> None:
    try:
        exl2_mix.read(mix)
    except FormatError as error:
        raise PlanError(f"`{name}` in the plan: {error.message}", hint=error.hint) from error


def _strings(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("expected an object of names and texts")
    return dict(value)
