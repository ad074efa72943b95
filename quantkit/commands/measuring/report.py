"""What `quantkit measure` says: damage by block and by kind of linear, and how well it predicted what was seen."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.commands.quantization.fallback import Fallback
from quantkit.measurement import MeasuredLinear, Measurement, damage_near
from quantkit.plan import kind_of

CHECK_COLUMNS = ["one block quantized", "bits/weight", "tokens", "predicted", "seen", "ratio"]
SHOWN_BITS = (2.3, 3.2, 4.2, 5.2, 6.2)


@dataclass(frozen=True, slots=True)
class MeasureReport:
    """What was measured and where it was written; or that the same command had done so before."""

    out: Path
    measurement: Measurement
    finished_before: bool = False
    fallbacks: tuple[Fallback, ...] = ()

    def kind_rows(self) -> list[list[str]]:
        """Each kind of linear: the damage of all of them at a few of the layouts. None where linears were measured
        together, and nothing is known of one alone."""
        kinds: dict[str, list[tuple[MeasuredLinear, ...]]] = {}
        for choice in () if self.measurement.together else self.measurement.choices:
            kinds.setdefault(kind_of(choice[0].name), []).append(choice)
        return [_damage_row(kind, choices) for kind, choices in kinds.items()]

    def layer_rows(self) -> list[list[str]]:
        """Each block: the damage of all its linears at the same layouts."""
        blocks = self.measurement.choices_by_block()
        return [_damage_row(f"block {number}", choices) for number, choices in blocks.items()]

    def check_rows(self) -> list[list[str]]:
        """Each block that was checked: what was predicted, what was seen, and their ratio."""
        return [
            [
                f"block {check.block}",
                f"{check.bits_per_weight:.2f}",
                str(check.tokens),
                f"{check.predicted:.5f}",
                f"{check.seen:.5f}",
                f"{check.ratio:.2f}",
            ]
            for check in self.measurement.checks
        ]

    def rows(self) -> list[list[str]]:
        """Name and figure: the summary."""
        text, linears = self.measurement.calibration, self.measurement.linears
        dense = self.measurement.dense
        tokens = f", {text['rows']} × {text['length']} tokens" if "rows" in text else ""
        return [
            ["linears", f"{len(linears) - len(dense)} measured, {len(dense)} that EXL2 cannot hold"],
            ["calibration", f"{text['source']}{tokens}"],
            ["model", self.measurement.model[:12]],
            *([["finished before", "by this command: nothing to do"]] if self.finished_before else []),
            *([fallback.step, f"the GPU had too little memory: {fallback.did}"] for fallback in self.fallbacks),
        ]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of each table for people."""
        columns = ["bits per weight, about", "linears", *(f"{bits:g}" for bits in SHOWN_BITS)]
        unit = self.measurement.unit
        tables = [
            (f"damage by block, {unit}", columns, self.layer_rows()),
            (f"damage by kind of linear, {unit}", columns, self.kind_rows()),
            ("prediction against what was seen, nats of KL", CHECK_COLUMNS, self.check_rows()),
            (str(self.out), ["", ""], self.rows()),
        ]
        return [(title, names, rows) for title, names, rows in tables if rows]

    def as_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "finished_before": self.finished_before,
            "fallbacks": [asdict(fallback) for fallback in self.fallbacks],
            **self.measurement.as_json(),
        }


def _damage_row(name: str, choices: list[tuple[MeasuredLinear, ...]]) -> list[str]:
    return [name, str(sum(map(len, choices))), *(f"{damage_near(choices, bits):.4f}" for bits in SHOWN_BITS)]
