"""What `quantkit eval compare` says: how far a candidate is from its reference, and where; what was saved of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.commands.evaluation.gate import Gate
from quantkit.commands.evaluation.report import Scored, json_number, with_error
from quantkit.evaluators.divergence import Divergence, WorstToken
from quantkit.runtime.tokenizer import Tokenizer

COMPARE_FIGURES = (
    "kl_mean",
    "kl_p90",
    "kl_p99",
    "top1_agreement",
    "top5_agreement",
    "change_rms",
    "correlation",
    "perplexity_reference",
    "perplexity_candidate",
    "ppl_ratio",
)
"""What `eval compare --gate` can ask for."""
NO_GATE = Gate()
SELF_KL = 1e-6
"""Nats: a model further than this from what was saved of it was not saved well."""


@dataclass(frozen=True, slots=True)
class WorstInWords:
    """A prediction of high KL as a person reads it: the text before, what follows, what both models would say."""

    token: WorstToken
    context: str
    target: str
    choices: tuple[str, str]

    def line(self) -> str:
        before, after = self.token.target_probabilities
        (_, sure), (_, other) = self.token.choices
        return (
            f"KL {self.token.kl:.3f}: …{self.context!r} → {self.target!r} ({before:.1%} → {after:.1%}); reference says "
            f"{self.choices[0]!r} ({sure:.1%}), candidate {self.choices[1]!r} ({other:.1%})"
        )

    def as_json(self) -> dict[str, Any]:
        before, after = self.token.target_probabilities
        said = [
            {"text": text, "id": index, "probability": probability}
            for text, (index, probability) in zip(self.choices, self.token.choices, strict=True)
        ]
        return {
            "kl": self.token.kl,
            "window": self.token.window,
            "position": self.token.position,
            "context": self.context,
            "target": self.target,
            "probability_reference": before,
            "probability_candidate": after,
            "reference_says": said[0],
            "candidate_says": said[1],
        }


def worst_in_words(worst: Sequence[WorstToken], tokenizer: Tokenizer) -> tuple[WorstInWords, ...]:
    return tuple(
        WorstInWords(
            token,
            tokenizer.decode(token.context),
            tokenizer.decode([token.target]),
            (tokenizer.decode([token.choices[0][0]]), tokenizer.decode([token.choices[1][0]])),
        )
        for token in worst
    )


@dataclass(frozen=True, slots=True)
class SavedCheck:
    """The reference that was saved on the way, and the same comparison made from it alone.

    share     of the bytes of float16 logits
    kl_error  how far `kl_mean` nearly always is off at most, as the file tells
    """

    path: str
    share: float
    kl_mean: float
    kl_error: float

    def rows(self, exact: float) -> list[list[str]]:
        off = abs(self.kl_mean - exact)
        held = "within" if off <= self.kl_error else "NOT WITHIN"
        return [
            ["saved reference", f"{self.path}, {self.share:.2%} of float16 logits"],
            ["mean KL from it", f"{self.kl_mean:.6f} nats, off by {off:.2g}, {held} the {self.kl_error:.2g} it states"],
        ]


@dataclass(frozen=True, slots=True)
class SavedReport:
    """A reference whose predictions were saved, with no candidate to judge."""

    reference: str
    path: Path
    share: float
    size: int
    predictions: int
    self_kl: float
    scored: Scored

    def rows(self) -> list[list[str]]:
        """Name and figure, for the console."""
        rows = [
            ["saved", f"{self.predictions} predictions in `{self.path}`"],
            ["size", f"{self.size / 2**20:.1f} MiB, {self.share:.2%} of float16 logits"],
            ["KL of the model from it", f"{self.self_kl:.2g} nats"],
            ["text", self.scored.source],
        ]
        if abs(self.self_kl) > SELF_KL:
            rows.append(["note", f"more than {SELF_KL:g}: use `eval compare` with both models where figures are small"])
        return rows

    def as_json(self) -> dict[str, Any]:
        return {
            "reference": self.reference,
            "saved": str(self.path),
            "bytes": self.size,
            "share": self.share,
            "predictions": self.predictions,
            "self_kl": self.self_kl,
            "source": self.scored.source,
        }

    @property
    def title(self) -> str:
        return self.reference

    @property
    def exit_code(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class CompareReport:
    """A candidate against its reference."""

    reference: str
    candidate: str
    divergence: Divergence
    scored: Scored
    worst: tuple[WorstInWords, ...] = ()
    notes: tuple[str, ...] = ()
    gate: Gate = NO_GATE
    saved: SavedCheck | None = None

    @property
    def title(self) -> str:
        return f"{self.candidate} against {self.reference}"

    @property
    def exit_code(self) -> int:
        """That of a failed gate, else 0."""
        return self.gate.exit_code(self.figures())

    def figures(self) -> dict[str, float | None]:
        """What a gate can ask for, see `COMPARE_FIGURES`."""
        found = self.divergence
        before, after = found.reference.perplexity, found.candidate.perplexity
        return {
            "kl_mean": found.kl_mean,
            "kl_p90": found.kl_p90,
            "kl_p99": found.kl_p99,
            "top1_agreement": found.top1_agreement,
            "top5_agreement": found.top5_agreement,
            "change_rms": found.change_rms,
            "correlation": found.correlation,
            "perplexity_reference": json_number(before),
            "perplexity_candidate": json_number(after),
            "ppl_ratio": json_number(after / before),
        }

    def rows(self) -> list[list[str]]:
        """Name and figure, for the console."""
        found = self.divergence
        low, high = found.kl_ci95
        changes = ", ".join(f"{percent}: {change:+.2%}" for percent, change in found.change_percentiles.items())
        off = f"nearly always at most {found.kl_error:.2g} nats"
        error = [["error of the estimate", off]] if found.kl_error else []
        return [
            ["mean KL", f"{found.kl_mean:.6f} nats"],
            ["95 % interval", f"{low:.6f} to {high:.6f}, bootstrap over blocks of neighbouring tokens"],
            *error,
            ["90th, 99th percentile", f"{found.kl_p90:.6f}, {found.kl_p99:.6f}"],
            ["same likeliest token", f"{found.top1_agreement:.2%}"],
            ["same five likeliest", f"{found.top5_agreement:.2%}"],
            ["change of probability", f"root mean square {found.change_rms:.2%}; percentiles {changes}"],
            ["correlation", "none" if found.correlation is None else f"{found.correlation:.5f} of log-likelihoods"],
            [
                "perplexity of the reference",
                with_error(found.reference.perplexity, found.reference.perplexity_error, 4),
            ],
            [
                "perplexity of the candidate",
                with_error(found.candidate.perplexity, found.candidate.perplexity_error, 4),
            ],
            *self.scored.rows(found.reference),
            *(self.saved.rows(found.kl_mean) if self.saved else []),
            *self.gate.rows(self.figures()),
            *(["worst token" if index == 0 else "", word.line()] for index, word in enumerate(self.worst)),
            *(["note", note] for note in self.notes),
        ]

    def as_json(self) -> dict[str, Any]:
        found = self.divergence
        saved = (
            {}
            if self.saved is None
            else {
                "saved_reference": {
                    "file": self.saved.path,
                    "share": self.saved.share,
                    "kl_mean": self.saved.kl_mean,
                    "kl_error": self.saved.kl_error,
                }
            }
        )
        return {
            "reference": self.reference,
            "candidate": self.candidate,
            **self.figures(),
            "kl_ci95": list(found.kl_ci95),
            "kl_error": found.kl_error,
            "change_percentiles": {str(percent): change for percent, change in found.change_percentiles.items()},
            "mean_nll_reference": found.reference.mean_nll,
            "mean_nll_candidate": found.candidate.mean_nll,
            "mean_nll_error_reference": found.reference.standard_error,
            "mean_nll_error_candidate": found.candidate.standard_error,
            **self.scored.as_json(found.reference),
            **saved,
            **self.gate.as_json(self.figures()),
            "worst": [word.as_json() for word in self.worst],
            "notes": list(self.notes),
        }
