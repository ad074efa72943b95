"""Gate: conditions that a result has to meet, as `kl_mean<0.05,ppl_ratio<1.02`; exit code 3 where it does not."""

import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import GateError, UsageError

RELATIONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
DAMAGE_FIGURES = ("kl_mean", "top1_agreement", "perplexity_reference", "perplexity_candidate", "ppl_ratio")
"""What `quantize --gate` can ask for."""
EXAMPLE = '--gate "kl_mean<0.05,ppl_ratio<1.02"'


@dataclass(frozen=True, slots=True)
class Condition:
    """`figure relation bound`."""

    figure: str
    relation: str
    bound: float

    def __str__(self) -> str:
        return f"{self.figure}{self.relation}{self.bound:g}"


@dataclass(frozen=True, slots=True)
class Gate:
    """All of these must hold; without any, everything passes."""

    conditions: tuple[Condition, ...] = ()

    @classmethod
    def parse(cls, text: str | None, figures: Collection[str]) -> "Gate":
        """Raises UsageError for words that are no condition, and for a figure that is none of `figures`."""
        if text is None:
            return cls()
        conditions = []
        for part in text.split(","):
            found = re.fullmatch(r"\s*([a-z0-9_]+)\s*(<=|>=|<|>)\s*([-+.0-9e]+)\s*", part)
            try:
                bound = float(found[3]) if found else None
            except ValueError:
                bound = None
            if found is None or bound is None:
                raise UsageError(f"`{part.strip()}` in `--gate` is no condition", hint=EXAMPLE)
            if found[1] not in figures:
                raise UsageError(
                    f"`--gate` knows no figure `{found[1]}`", hint=f"use one of {', '.join(sorted(figures))}"
                )
            conditions.append(Condition(found[1], found[2], bound))
        return cls(tuple(conditions))

    def failures(self, figures: Mapping[str, float | None]) -> tuple[str, ...]:
        """Each condition that does not hold, with the figure; one that cannot be told does not hold."""
        failed = []
        for condition in self.conditions:
            figure = figures[condition.figure]
            if figure is None or not RELATIONS[condition.relation](figure, condition.bound):
                failed.append(f"{condition} does not hold: {'not known' if figure is None else f'{figure:g}'}")
        return tuple(failed)

    def exit_code(self, figures: Mapping[str, float | None]) -> int:
        return GateError.exit_code if self.failures(figures) else 0

    def rows(self, figures: Mapping[str, float | None]) -> list[list[str]]:
        """For people; nothing without conditions."""
        if not self.conditions:
            return []
        failed = self.failures(figures)
        return [["gate", "; ".join(failed) if failed else f"passed: {', '.join(map(str, self.conditions))}"]]

    def as_json(self, figures: Mapping[str, float | None]) -> dict[str, Any]:
        """The key `gate`; nothing without conditions."""
        if not self.conditions:
            return {}
        failed = list(self.failures(figures))
        return {"gate": {"conditions": [str(condition) for condition in self.conditions], "failed": failed}}
