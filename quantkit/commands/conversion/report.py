"""What `quantkit convert` says at its end: what was kept, what it cost in weights, bits, bytes and predictions."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from quantkit.commands.evaluation.report import json_number
from quantkit.settings import ConvertSettings

SHOWN_LINEARS = 8


class Report(Protocol):
    """What a command returns, if tables say all of it."""

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of each table for people."""

    def as_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class LinearError:
    """One linear: ‖W' - W‖ / ‖W‖ of the written weight against that of the source."""

    name: str
    error: float


@dataclass(frozen=True, slots=True)
class AddedDamage:
    """The result against its reference on text that no calibration sees, in float32.

    reference         what was compared with: the input of the conversion, or the unquantized model
    perplexity_input  of the model that was converted
    kl_mean           KL(reference ‖ result) per token, in nats, with its 95 % interval
    kl_input          KL(reference ‖ input); 0 where the input is the reference
    """

    reference: str
    windows: int
    tokens: int
    perplexity_reference: float
    perplexity_input: float
    perplexity_result: float
    kl_mean: float
    kl_ci95: tuple[float, float]
    kl_input: float
    top1_agreement: float

    def rows(self) -> list[list[str]]:
        rows = [
            ["held-back text", f"{self.windows} windows, {self.tokens} tokens"],
            ["perplexity before", f"{self.perplexity_input:.3f}"],
            ["perplexity after", f"{self.perplexity_result:.3f}"],
            [f"KL from {self.reference}", "{:.5f} ({:.5f} to {:.5f})".format(self.kl_mean, *self.kl_ci95)],
            ["same likeliest token", f"{self.top1_agreement:.1%}"],
        ]
        if self.kl_input:
            rows.insert(1, [f"perplexity of {self.reference}", f"{self.perplexity_reference:.3f}"])
            rows.insert(4, [f"KL of the input from {self.reference}", f"{self.kl_input:.5f}"])
        return rows

    def as_json(self) -> dict[str, Any]:
        value = asdict(self)
        return value | {key: json_number(value[key]) for key in value if key.startswith("perplexity")}


@dataclass(frozen=True, slots=True)
class Written:
    """What is in the new folder or file.

    parameters       weights of the model
    size_bytes       of the weight files
    bits_per_weight  of all weight files, for each parameter
    """

    tensors: int
    parameters: int
    size_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return self.size_bytes * 8 / max(1, self.parameters)


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """One conversion.

    way      how weights came over, in words
    linears  those that were made anew, worst first; empty where every weight is equal
    exact    linears whose weights were read back and found equal, bit for bit
    facts    what else this route has to say: name → value
    remarks  whatever was not ideal
    """

    settings: ConvertSettings
    way: str
    written: Written
    seconds: float
    linears: tuple[LinearError, ...] = ()
    exact: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    damage: AddedDamage | None = None

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        tables = []
        if self.remarks:
            tables.append(("not ideal", ["remark"], [[remark] for remark in self.remarks]))
        if self.linears:
            rows = [[linear.name, f"{linear.error:.5f}"] for linear in self.linears[:SHOWN_LINEARS]]
            if len(self.linears) > SHOWN_LINEARS:
                mean = sum(linear.error for linear in self.linears) / len(self.linears)
                rows.append([f"mean of {len(self.linears)}", f"{mean:.5f}"])
            tables.append(("relative weight error, worst first", ["", "error"], rows))
        tables.append((f"quantkit convert {self.settings.route}", ["", "found"], self.rows()))
        return tables

    def rows(self) -> list[list[str]]:
        """Name and figure: the summary."""
        return [
            ["written", str(self.settings.out)],
            ["weights", self.way],
            *([["read back and equal", f"{self.exact} linears"]] if self.exact else []),
            ["size", f"{self.written.size_bytes / 2**20:.1f} MiB in {self.written.tensors} tensors"],
            ["bits per weight, whole model", f"{self.written.bits_per_weight:.3f}"],
            *([name.replace("_", " "), _shown(value)] for name, value in self.facts.items()),
            ["seconds", f"{self.seconds:.1f}"],
            *([] if self.damage is None else self.damage.rows()),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "route": self.settings.route,
            "source": str(self.settings.source),
            "out": str(self.settings.out),
            "way": self.way,
            "exact": self.exact,
            **asdict(self.written),
            "file_bits_per_weight": self.written.bits_per_weight,
            **self.facts,
            "linears": [asdict(linear) for linear in self.linears],
            "remarks": list(self.remarks),
            "seconds": self.seconds,
            "evaluation": None if self.damage is None else self.damage.as_json(),
        }


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    return str(value)
