"""`quantkit plan`: a measurement and a budget → the mix of each linear, as a file to edit or to quantize with."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from quantkit.allocation import Allocation
from quantkit.measurement import Measurement
from quantkit.mix_plan import MixPlan, chosen_candidates, plan_mixes, require_no_dense
from quantkit.plan import kind_of
from quantkit.progress import Progress
from quantkit.settings import PlanSettings


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What was chosen. `damage` is in the unit of the measurement; no plan of this budget is below `bound`."""

    out: Path
    plan: MixPlan
    allocation: Allocation
    weights: int
    measurement: Measurement

    @property
    def bits_per_weight(self) -> float:
        return self.allocation.bits / self.weights

    def rows(self) -> list[list[str]]:
        """Name and figure: the summary."""
        part = "linears and head" if self.plan.include_head else "linears"
        return [
            [f"bits per weight, {part}", f"{self.bits_per_weight:.4f} of {self.plan.target:g}"],
            [f"predicted, {self.measurement.unit}", f"{self.allocation.damage:.4f}"],
            ["least possible", f"{self.allocation.bound:.4f}"],
            ["linears", f"{len(self.plan.linears)} quantized, {len(self.plan.dense)} left dense"],
        ]

    def kind_rows(self) -> list[list[str]]:
        """Each kind of linear: how many, and least, mean and most bits per weight."""
        kinds: dict[str, list[tuple[float, float]]] = {}
        weights = {linear.name: linear.weights for linear in self.measurement.linears}
        for name, chosen in chosen_candidates(self.measurement, self.allocation).items():
            kinds.setdefault(kind_of(name), []).append((chosen.bits / weights[name], chosen.damage))
        return [
            [
                kind,
                str(len(found)),
                f"{min(bits for bits, _ in found):.2f}",
                f"{sum(bits for bits, _ in found) / len(found):.2f}",
                f"{max(bits for bits, _ in found):.2f}",
                f"{sum(damage for _, damage in found):.4f}",
            ]
            for kind, found in kinds.items()
        ]

    def dense_rows(self) -> list[list[str]]:
        """Linears that stay dense: each kind with the reason and its share of all bits, and what can be done."""
        kinds: dict[tuple[str, str], list[int]] = {}
        for linear in self.measurement.dense:
            kinds.setdefault((kind_of(linear.name), linear.dense_because or ""), []).append(linear.dense_bits)
        rows = [
            [f"`{kind}` ({len(bits)}×): {reason}; {sum(bits) / self.allocation.bits:.1%} of the bits"]
            for (kind, reason), bits in kinds.items()
        ]
        return [*rows, [f"to give the others {self.plan.target:g} bits: `--bpw {self.proposal:g}`"]] if rows else []

    @property
    def proposal(self) -> float:
        """The target at which quantized linears alone would have the bits asked for, upwards to two digits."""
        fixed = sum(linear.dense_bits for linear in self.measurement.dense)
        left = self.weights - sum(linear.weights for linear in self.measurement.dense)
        return ceil((fixed + self.plan.target * left) / self.weights * 100) / 100

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of each table for people."""
        columns = ["bits per weight", "linears", "least", "mean", "most", "damage"]
        tables = [("by kind of linear", columns, self.kind_rows()), (str(self.out), ["", ""], self.rows())]
        return [("left dense", ["linears"], self.dense_rows()), *tables] if self.measurement.dense else tables

    def as_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "target": self.plan.target,
            "include_head": self.plan.include_head,
            "head_bits": self.plan.head_bits,
            "bits_per_weight": self.bits_per_weight,
            "bits": self.allocation.bits,
            "unit": self.measurement.unit,
            "damage": self.allocation.damage,
            "bound": self.allocation.bound,
            "linears": dict(self.plan.linears),
            "dense": dict(self.plan.dense),
            "proposed_target": self.proposal if self.plan.dense else None,
        }


def run(settings: PlanSettings, progress: Progress) -> PlanReport:
    """Raises PlanError for a file that is no measurement and for a target out of reach; under `strict` FormatError for
    linears that EXL2 cannot hold."""
    measurement = Measurement.load(settings.measurement)
    if settings.strict:
        require_no_dense(measurement)
    plan, allocation = plan_mixes(
        measurement, settings.bpw, head_bits=settings.head_bits, include_head=settings.include_head
    )
    plan.save(settings.out)
    weights = measurement.weights + (measurement.head_weights if settings.include_head else 0)
    progress.say(f"wrote {settings.out}")
    return PlanReport(settings.out, plan, allocation, weights, measurement)
