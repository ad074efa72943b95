"""What `quantkit eval` says: figures, with the text, windows, BOS handling and arithmetic that define them.

A perplexity means nothing without these, so every report states them.
"""

import math
from dataclasses import dataclass
from typing import Any

from quantkit.evaluators.perplexity import Perplexity
from quantkit.runtime.placement import Placement

CONVENTION = "windows without overlap, each from position 0, the first token of a window is not scored"
OVERLAP = "windows from position 0, {0} tokens apart: each after the first scores its last {0} tokens"


@dataclass(frozen=True, slots=True)
class Scored:
    """What was scored, and how: the part of a report that makes its figures comparable.

    source       file, data set or bundled text
    text_tokens  tokens of the whole text; the windows cover the first part of them
    bos          whether a BOS token stood in front of every window
    stride       tokens from one window to the next; None where they do not overlap
    """

    source: str
    text_tokens: int
    length: int
    bos: bool
    placement: Placement
    stride: int | None = None

    @property
    def convention(self) -> str:
        return CONVENTION if self.stride in (None, self.length) else OVERLAP.format(self.stride)

    def rows(self, score: Perplexity) -> list[list[str]]:
        return [
            ["text", self.source],
            ["windows", f"{score.windows} of {self.length} tokens: {score.tokens} of the text's {self.text_tokens}"],
            ["scored", f"{score.predictions} predictions"],
            ["convention", self.convention],
            ["BOS", "yes, in front of every window" if self.bos else "no"],
            ["arithmetic", f"{self.placement.dtype_name} on {self.placement.device}, backend {self.placement.backend}"],
        ]

    def as_json(self, score: Perplexity) -> dict[str, Any]:
        return {
            "source": self.source,
            "text_tokens": self.text_tokens,
            "tokens": score.tokens,
            "predictions": score.predictions,
            "windows": score.windows,
            "length": self.length,
            "convention": self.convention,
            "stride": self.stride or self.length,
            "bos": self.bos,
            "dtype": self.placement.dtype_name,
            "device": self.placement.device,
            "backend": self.placement.backend,
        }


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    """One model's perplexity. `notes` are for people: what may make the figure mean something else."""

    model: str
    score: Perplexity
    scored: Scored
    notes: tuple[str, ...] = ()

    def rows(self) -> list[list[str]]:
        """Name and figure, for the console."""
        return [
            ["perplexity", with_error(self.score.perplexity, self.score.perplexity_error, 4)],
            ["mean negative log-likelihood", f"{with_error(self.score.mean_nll, self.score.standard_error, 5)} nats"],
            *self.scored.rows(self.score),
            *(["note", note] for note in self.notes),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "perplexity": json_number(self.score.perplexity),
            "perplexity_error": json_number(self.score.perplexity_error),
            "mean_nll": self.score.mean_nll,
            "mean_nll_error": self.score.standard_error,
            **self.scored.as_json(self.score),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class PerplexityTable:
    """Several models over the same text."""

    reports: tuple[PerplexityReport, ...]

    COLUMNS = ("model", "perplexity", "± standard error", "nats", "predictions")

    def rows(self) -> list[list[str]]:
        """A row for each model."""
        return [
            [
                report.model,
                f"{report.score.perplexity:.4f}",
                "" if report.score.perplexity_error is None else f"{report.score.perplexity_error:.4f}",
                f"{report.score.mean_nll:.5f}",
                f"{report.score.predictions}",
            ]
            for report in self.reports
        ]

    def facts(self) -> list[list[str]]:
        """What defines the figures, and notes; a warning where models split the text into different tokens."""
        first = self.reports[0]
        notes = [["note", f"{report.model}: {note}"] for report in self.reports for note in report.notes]
        if len({report.scored.text_tokens for report in self.reports}) > 1:
            notes.append(
                ["note", "these models split the text differently: figures are per token, do not compare them"]
            )
        return [*first.scored.rows(first.score), *notes]

    def as_json(self) -> dict[str, Any]:
        return {"models": [report.as_json() for report in self.reports]}


def with_error(value: float, error: float | None, digits: int) -> str:
    """A figure with its standard error, where there is one."""
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def json_number(value: float | None) -> float | None:
    """JSON knows no infinity."""
    return value if value is not None and math.isfinite(value) else None
