"""`quantkit eval compare --kv A,B`: one candidate behind several caches, its models read once, in one table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands import evaluate
from quantkit.commands.evaluation.compare_report import CompareReport
from quantkit.commands.evaluation.kept_models import KeptModels
from quantkit.progress import Progress
from quantkit.runtime.cache_format import cache_format, require_distinct
from quantkit.runtime.placement import Placement
from quantkit.settings import CompareSettings


@dataclass(frozen=True, slots=True)
class CacheTable:
    """Reports over the same text, one for each cache format asked for."""

    formats: tuple[str, ...]
    reports: tuple[CompareReport, ...]

    COLUMNS = ("cache", "mean KL", "99th percentile", "same likeliest", "same five", "perplexity")

    @property
    def title(self) -> str:
        candidate, reference = self.reports[0].candidate.rpartition(", cache ")[0], self.reports[0].reference
        return f"{candidate} behind caches, against {reference}"

    @property
    def exit_code(self) -> int:
        """That of a failed gate, whichever cache failed it, else 0."""
        return max(report.exit_code for report in self.reports)

    def rows(self) -> list[list[str]]:
        """A row for each format."""
        return [
            [
                name,
                f"{report.divergence.kl_mean:.6f}",
                f"{report.divergence.kl_p99:.6f}",
                f"{report.divergence.top1_agreement:.2%}",
                f"{report.divergence.top5_agreement:.2%}",
                f"{report.divergence.candidate.perplexity:.4f}",
            ]
            for name, report in zip(self.formats, self.reports, strict=True)
        ]

    def facts(self) -> list[list[str]]:
        """What defines the figures, what the gate found of each format, and notes, each once."""
        first = self.reports[0]
        gates = [
            [f"{name}, {label}", found]
            for name, report in zip(self.formats, self.reports, strict=True)
            for label, found in report.gate.rows(report.figures())
        ]
        notes = dict.fromkeys(note for report in self.reports for note in report.notes)
        perplexity = f"{first.divergence.reference.perplexity:.4f}"
        return [
            ["perplexity of the reference", perplexity],
            *first.scored.rows(first.divergence.reference),
            *gates,
            *(["note", note] for note in notes),
        ]

    def as_json(self) -> dict[str, Any]:
        return {"candidates": [report.as_json() for report in self.reports]}


def compare_caches(settings: CompareSettings, formats: Sequence[str], progress: Progress) -> CacheTable:
    """`evaluate.compare` behind each cache format, all of which are checked first. Raises what that raises."""
    require_distinct(formats)
    placement = Placement.choose(settings.device, settings.dtype)
    judged = open_checkpoint(settings.candidate or settings.reference)
    for name in formats:
        cache_format(name, judged.model_config.head_dim, placement.dtype)
    saved = Path(settings.reference).is_file()
    models, reports = KeptModels(judged.path if saved else open_checkpoint(settings.reference).path), []
    for name in formats:
        progress.say(f"cache {name}")
        report = evaluate.compare(replace(settings, kv=name), progress, models.load)
        assert isinstance(report, CompareReport)
        reports.append(report)
    return CacheTable(tuple(formats), tuple(reports))
