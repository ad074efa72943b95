"""What `quantkit quantize` says at its end: bits, errors, damage, cost, and everything that was not ideal.

Keys of `--json` are the field names below; `linears` has one object for each quantized linear.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from quantkit.commands.evaluation.report import json_number
from quantkit.commands.quantization.fallback import Fallback
from quantkit.commands.quantization.memory_budget import FEW_TOKENS
from quantkit.plan import Plan, kind_of

UNTUNED = "tuning was no gain on unseen text: scales and norms are as they were before"
WAYS = ("own", "all", "none")
EXPERT_COLUMNS = ["block", "experts", "fewest", "median", "most", "solved with own", "with all tokens", "rounded"]


@dataclass(frozen=True, slots=True)
class LinearResult:
    """One quantized linear.

    bits          mean width of its codes
    error         Hessian-weighted squared error relative to the weighted square of the weight: what its outputs lose
    tokens        calibration tokens its Hessian was made of
    damping       added to the diagonal of the Hessian, relative to its mean; None without a Hessian
    extra_damping the Hessian could not be factored with the usual damping
    dead_inputs   input features that were zero in all tokens
    fallback      what replaced the linear's own Hessian, in words; None where nothing did
    routed        calibration tokens that the router sent to this expert; None where there is no router, or no text
    error_before  the same of the weight that this one replaces, with `--redo`; else None
    """

    name: str
    bits: float
    bits_per_weight: float
    error: float
    tokens: int
    damping: float | None
    extra_damping: bool
    dead_inputs: int
    fallback: str | None
    routed: int | None = None
    error_before: float | None = None

    @property
    def solved_with(self) -> str:
        """Whose tokens an expert was solved with: its `own`, `all` of its block, or `none`."""
        return "none" if not self.tokens else "own" if self.tokens == self.routed else "all"


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """One expert of one block: the calibration tokens that the router sent to it, and whose tokens its linears were
    solved with: its `own`, `all` of its block, or `none`; of several the last of these."""

    block: int
    expert: int
    tokens: int
    solved_with: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """Which text the Hessians come from, and in which arithmetic the model ran over it."""

    source: str
    rows: int
    length: int
    seed: int
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Tuning:
    """What tuning of scales and norms has changed on text that calibration never sees, in mean KL, and what it cost."""

    passes: int
    tokens: int
    course: tuple[float, ...]
    kl_before: float
    kl_after: float
    seconds: float
    cpu_seconds: float

    @property
    def kept(self) -> bool:
        return self.kl_after < self.kl_before

    def rows(self) -> list[list[str]]:
        passes = "1 pass" if self.passes == 1 else f"{self.passes} passes"
        what = f"{passes} over {self.tokens:,} tokens, {self.seconds:.0f} s, CPU {self.cpu_seconds:.0f} s"
        change = f"KL {self.kl_before:.4f} before, {self.kl_after:.4f} after"
        return [["tuning", f"{what}; {change}{'' if self.kept else ': not kept'}"]]


@dataclass(frozen=True, slots=True)
class Gradients:
    """The backward pass that said which tokens matter: over how many, and what it cost."""

    tokens: int
    seconds: float
    cpu_seconds: float

    def rows(self) -> list[list[str]]:
        """Name and figure, for people."""
        return [["gradients", f"{self.tokens} tokens, {self.seconds:.0f} s, {self.cpu_seconds:.0f} s of processor"]]


@dataclass(frozen=True, slots=True)
class Damage:
    """The result against the original on text that calibration never saw, both in float32."""

    windows: int
    tokens: int
    perplexity_reference: float
    perplexity_candidate: float
    kl_mean: float
    kl_ci95: tuple[float, float] | None
    top1_agreement: float
    prompt: str
    answer: str
    device: str

    def rows(self) -> list[list[str]]:
        """Name and figure, for people."""
        interval = "" if self.kl_ci95 is None else " ({:.4f} to {:.4f})".format(*self.kl_ci95)
        return [
            ["held-back text", f"{self.windows} windows, {self.tokens} tokens"],
            ["perplexity before", f"{self.perplexity_reference:.3f}"],
            ["perplexity after", f"{self.perplexity_candidate:.3f}"],
            ["mean KL", f"{self.kl_mean:.4f}{interval}"],
            ["same likeliest token", f"{self.top1_agreement:.1%}"],
        ]

    def figures(self) -> dict[str, float | None]:
        """What a gate can ask for: the keys of `commands.gate.DAMAGE_FIGURES`."""
        return {
            "kl_mean": self.kl_mean,
            "top1_agreement": self.top1_agreement,
            "perplexity_reference": json_number(self.perplexity_reference),
            "perplexity_candidate": json_number(self.perplexity_candidate),
            "ppl_ratio": json_number(self.perplexity_candidate / self.perplexity_reference),
        }

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> Self:
        """What `as_json` gave. A perplexity that JSON has lost was infinite."""
        lost = {name: math.inf for name in ("perplexity_reference", "perplexity_candidate") if value[name] is None}
        interval = value["kl_ci95"]
        return cls(**{**value, **lost, "kl_ci95": None if interval is None else tuple(interval)})

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "perplexity_reference": json_number(self.perplexity_reference),
            "perplexity_candidate": json_number(self.perplexity_candidate),
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """Wall and processor seconds of quantizing, the process's peak memory until then; and the same with measuring."""

    seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    total_seconds: float
    total_cpu_seconds: float
    total_peak_memory_bytes: int

    def rows(self) -> list[list[str]]:
        """Name and figure, for people."""
        rows = [
            ["time", f"{self.seconds:.0f} s, {self.cpu_seconds:.0f} s of processor"],
            ["peak memory", f"{self.peak_memory_bytes / 2**20:.0f} MiB"],
        ]
        if self.total_seconds > self.seconds:
            rows += [
                ["time with measuring", f"{self.total_seconds:.0f} s, {self.total_cpu_seconds:.0f} s of processor"],
                ["peak memory with measuring", f"{self.total_peak_memory_bytes / 2**20:.0f} MiB"],
            ]
        return rows


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """The result of one run. `size_bytes` counts the weight files; `parameters` all weights of the model."""

    out: Path
    format: str
    effort: str
    settings: dict[str, Any]
    backend: str
    plan: Plan
    linears: tuple[LinearResult, ...]
    parameters: int
    size_bytes: int
    calibration: Calibration
    gradients: Gradients | None
    cost: Cost
    damage: Damage | None
    tuning: Tuning | None = None
    fallbacks: tuple[Fallback, ...] = ()
    notes: tuple[str, ...] = ()
    device_peak_memory_bytes: int | None = None

    @property
    def bits_per_weight(self) -> float:
        """Of the blocks' linears: all stored bits, those left dense, side data and an added head included."""
        return self.plan.bits_per_weight

    @property
    def file_bits_per_weight(self) -> float:
        """Of the whole model: all bytes of the weight files."""
        return self.size_bytes * 8 / self.parameters

    @property
    def experts(self) -> tuple[ExpertTokens, ...]:
        """Every expert that a router chooses from; none where no text was read."""
        found: dict[tuple[int, int], list[LinearResult]] = {}
        for linear in self.linears:
            if linear.routed is not None:
                block, expert = (int(part) for part in linear.name.split(".") if part.isdigit())
                found.setdefault((block, expert), []).append(linear)
        return tuple(
            ExpertTokens(*place, own[0].routed or 0, max((linear.solved_with for linear in own), key=WAYS.index))
            for place, own in sorted(found.items())
        )

    def remarks(self) -> list[str]:
        """Whatever was not ideal: the model, dense linears, short groups, extra damping, dead inputs, fallbacks."""
        degraded = (
            (linear.name, text)
            for linear in self.linears
            for text in (
                f"needed a damping of {linear.damping:.2g}" if linear.extra_damping else None,
                f"{linear.dead_inputs} input features were always zero" if linear.dead_inputs else None,
                linear.fallback,
            )
            if text
        )
        tuning = [] if self.tuning is None or self.tuning.kept else [UNTUNED]
        fallen = [f"{one.step}: the GPU had too little memory, done with {one.did}" for one in self.fallbacks]
        fallen += [FEW_TOKENS] if fallen and self.experts and FEW_TOKENS not in self.notes else []
        solved = [f"`{name}`: {text}" for name, text in degraded]
        return [*self.notes, *self.plan.remarks(), *solved, *tuning, *fallen]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of each table for people."""
        tables = [
            ("error by kind of linear", ["", "linears", "bits/weight", "mean", "worst", "in block"], self._kind_rows()),
            *([("experts: calibration tokens", EXPERT_COLUMNS, self._expert_rows())] if self.experts else []),
            (str(self.out), ["", ""], self.rows()),
        ]
        remarks = [[remark] for remark in self.remarks()]
        return [("not ideal", ["remark"], remarks), *tables] if remarks else tables

    def rows(self) -> list[list[str]]:
        """Name and figure: the summary."""
        text, head, added = self.calibration, self.plan.head, self.plan.added_bits / 8
        peak = self.device_peak_memory_bytes
        rows = [
            ["bits per weight, linears", f"{self.bits_per_weight:.3f}"],
            ["bits per weight, whole model", f"{self.file_bits_per_weight:.3f}"],
            *([] if head is None else [["bits per weight, head", f"{head.stored_bits / head.weights:.3f}"]]),
            *([["added by a head of its own", f"{added / 2**20:.1f} MiB"]] if added else []),
            ["size", f"{self.size_bytes / 2**20:.1f} MiB"],
            *([["rotated", f"by seed {text.seed}, norms in the linears"]] if self.settings["rotate"] else []),
            ["linears", f"{len(self.plan.quantized)} quantized, {len(self.plan.dense)} left dense"],
            ["effort", self.effort],
            ["calibration", f"{text.source}, {text.rows} × {text.length} tokens, {text.dtype}"],
            *([] if self.gradients is None else self.gradients.rows()),
            *([] if self.tuning is None else self.tuning.rows()),
            *self.cost.rows(),
            *([] if peak is None else [["peak memory of the GPU", f"{peak / 2**20:.0f} MiB"]]),
        ]
        return rows if self.damage is None else rows + self.damage.rows()

    def _kind_rows(self) -> list[list[str]]:
        rows = []
        for kind, linears in _by_kind(self.linears):
            worst = max(linears, key=lambda linear: linear.error)
            rows.append(
                [
                    kind,
                    str(len(linears)),
                    f"{_mean(linear.bits_per_weight for linear in linears):.3f}",
                    f"{_mean(linear.error for linear in linears):.5f}",
                    f"{worst.error:.5f}",
                    next((part for part in worst.name.split(".") if part.isdigit()), ""),
                ]
            )
        return rows

    def _expert_rows(self) -> list[list[str]]:
        rows = []
        for block in sorted({expert.block for expert in self.experts}):
            own = [expert for expert in self.experts if expert.block == block]
            tokens = sorted(expert.tokens for expert in own)
            ways = [sum(expert.solved_with == way for expert in own) for way in WAYS]
            figures = (block, len(own), tokens[0], tokens[len(own) // 2], tokens[-1], *ways)
            rows.append([str(figure) for figure in figures])
        return rows

    def as_json(self) -> dict[str, Any]:
        """All of it; the same keys whatever the run."""
        return {
            "out": str(self.out),
            "finished_before": False,
            "format": self.format,
            **self.settings,
            "effort": self.effort,
            "backend": self.backend,
            "bits_per_weight": self.bits_per_weight,
            "file_bits_per_weight": self.file_bits_per_weight,
            "size_bytes": self.size_bytes,
            "parameters": self.parameters,
            "plan": self.plan.as_json(),
            "errors": {kind: _mean(linear.error for linear in linears) for kind, linears in _by_kind(self.linears)},
            "linears": [asdict(linear) for linear in self.linears],
            "experts": [asdict(expert) for expert in self.experts],
            "remarks": self.remarks(),
            "fallbacks": [asdict(fallback) for fallback in self.fallbacks],
            "calibration": asdict(self.calibration),
            "gradients": None if self.gradients is None else asdict(self.gradients),
            "tuning": None if self.tuning is None else {**asdict(self.tuning), "kept": self.tuning.kept},
            **asdict(self.cost),
            "device_peak_memory_bytes": self.device_peak_memory_bytes,
            "evaluation": None if self.damage is None else self.damage.as_json(),
            "redo": None,
        }


UNKNOWN_AFTERWARDS = (
    *("errors", "linears", "experts", "remarks", "fallbacks", "gradients", "tuning", "device_peak_memory_bytes"),
    *(each.name for each in fields(Cost)),
)
"""What a report says that nobody can tell of a result that was made before."""


def known_afterwards(
    format: str,
    effort: str,
    settings: Mapping[str, Any],
    backend: str,
    plan: Plan | None,
    parameters: int,
    size_bytes: int,
    calibration: Calibration,
) -> dict[str, Any]:
    """What `QuantizeReport.as_json` says, of a result that was made before; None for what is not known any more."""
    return {
        "format": format,
        **settings,
        "effort": effort,
        "backend": backend,
        "file_bits_per_weight": size_bytes * 8 / parameters,
        "parameters": parameters,
        "plan": None if plan is None else plan.as_json(),
        **dict.fromkeys(UNKNOWN_AFTERWARDS),
        "calibration": asdict(calibration),
        "redo": None,
    }


def _by_kind(linears: Iterable[LinearResult]) -> list[tuple[str, list[LinearResult]]]:
    kinds: dict[str, list[LinearResult]] = {}
    for linear in linears:
        kinds.setdefault(kind_of(linear.name), []).append(linear)
    return list(kinds.items())


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / max(1, len(listed))
