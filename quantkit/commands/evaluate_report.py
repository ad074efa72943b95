"""What `quantkit eval` says: figures, with the text, windows, BOS handling and arithmetic that define them.

A perplexity means nothing without these, so every report states them.
"""

import math
from dataclasses import dataclass
from typing import Any

from quantkit.evaluators.divergence import Divergence
from quantkit.evaluators.perplexity import Perplexity
from quantkit.runtime.placement import Placement

CONVENTION = "windows without overlap, each from position 0, the first token of a window is not scored"


@dataclass(frozen=True, slots=True)
class Scored:
    """What was scored, and how: the part of a report that makes its figures comparable.

    source       file, data set or bundled text
    text_tokens  tokens of the whole text; the windows cover the first part of them
    bos          whether a BOS token stood in front of every window
    """

    source: str
    text_tokens: int
    length: int
    bos: bool
    placement: Placement

    def rows(self, score: Perplexity) -> list[list[str]]:
        return [
            ["text", self.source],
            ["windows", f"{score.windows} of {self.length} tokens: {score.tokens} of the text's {self.text_tokens}"],
            ["scored", f"{score.predictions} predictions"],
            ["convention", CONVENTION],
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
            "convention": CONVENTION,
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
            ["perplexity", f"{self.score.perplexity:.4f}"],
            ["mean negative log-likelihood", f"{self.score.mean_nll:.5f} nats"],
            *self.scored.rows(self.score),
            *(["note", note] for note in self.notes),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "perplexity": json_number(self.score.perplexity),
            "mean_nll": self.score.mean_nll,
            **self.scored.as_json(self.score),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class CompareReport:
    """A candidate against its reference."""

    reference: str
    candidate: str
    divergence: Divergence
    scored: Scored
    notes: tuple[str, ...] = ()

    def rows(self) -> list[list[str]]:
        """Name and figure, for the console."""
        found = self.divergence
        low, high = found.kl_ci95
        return [
            ["mean KL", f"{found.kl_mean:.6f} nats"],
            ["95 % interval", f"{low:.6f} to {high:.6f}, bootstrap over blocks of neighbouring tokens"],
            ["90th, 99th percentile", f"{found.kl_p90:.6f}, {found.kl_p99:.6f}"],
            ["same likeliest token", f"{found.top1_agreement:.2%}"],
            ["perplexity of the reference", f"{found.reference.perplexity:.4f}"],
            ["perplexity of the candidate", f"{found.candidate.perplexity:.4f}"],
            *self.scored.rows(found.reference),
            *(["note", note] for note in self.notes),
        ]

    def as_json(self) -> dict[str, Any]:
        found = self.divergence
        return {
            "reference": self.reference,
            "candidate": self.candidate,
            "kl_mean": found.kl_mean,
            "kl_ci95": list(found.kl_ci95),
            "kl_p90": found.kl_p90,
            "kl_p99": found.kl_p99,
            "top1_agreement": found.top1_agreement,
            "perplexity_reference": json_number(found.reference.perplexity),
            "perplexity_candidate": json_number(found.candidate.perplexity),
            "mean_nll_reference": found.reference.mean_nll,
            "mean_nll_candidate": found.candidate.mean_nll,
            **self.scored.as_json(found.reference),
            "notes": list(self.notes),
        }


def json_number(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None
