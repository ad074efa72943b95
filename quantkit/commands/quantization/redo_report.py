"""What `quantkit quantize --redo` says at its end: what was solved anew, what it lost before and after, what stands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.commands.quantization.report import Damage, LinearResult, QuantizeReport
from quantkit.plan import kind_of

MOST_ROWS = 28
"""Linears that are listed one by one; more are taken together by kind."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The damage on text that calibration never sees, of the result as it was and with what was solved anew; both
    without an answer."""

    before: Damage
    after: Damage

    @property
    def kl_before(self) -> float:
        return self.before.kl_mean

    @property
    def kl_after(self) -> float:
        return self.after.kl_mean

    @property
    def worse(self) -> bool:
        return self.kl_after > self.kl_before

    @property
    def kept(self) -> Damage:
        """That of what stays."""
        return self.before if self.worse else self.after


@dataclass(frozen=True, slots=True)
class RedoReport:
    """
    made       the folder as it is now; its `linears` and `effort` are those of the redo, kept or not
    pattern    what was asked for
    judgement  None where nothing was measured
    earlier    what was redone before, in words
    """

    made: QuantizeReport
    pattern: str
    judgement: Judgement | None
    earlier: tuple[str, ...] = ()

    @property
    def out(self) -> Path:
        return self.made.out

    @property
    def damage(self) -> Damage | None:
        return self.made.damage

    @property
    def kept(self) -> bool:
        """Whether the folder has what was solved: not where the model came out worse for it."""
        return self.judgement is None or not self.judgement.worse

    def verdict(self) -> str:
        if self.judgement is None:
            back = "the whole command with `--overwrite` gives back what was there before any redo"
            return f"in place, not measured; {back}"
        if self.kept:
            return "in place"
        again = "this command given again does all of it again, with the same end"
        return f"NOT kept, as it is worse: `{self.out}` is as it was; to have it all the same, add `--no-eval`; {again}"

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of each table for people."""
        remarks = [[remark] for remark in self.made.remarks()]
        head = ["", "bits/weight", "before", "after", "change"]
        return [
            *([("not ideal", ["remark"], remarks)] if remarks else []),
            ("relative error of what was solved anew", head, _rows(self.made.linears)),
            (str(self.out), ["", ""], self.rows()),
        ]

    def rows(self) -> list[list[str]]:
        """Name and figure: the summary."""
        count, quantized = len(self.made.linears), len(self.made.plan.work)
        others = "" if count == quantized else "; the others as they were"
        found = {
            "linears": f"{count} of {quantized} quantized ones redone, `{self.pattern}`",
            "effort": f"{self.made.effort} for what was redone{others}",
        }
        rows = [["the redo is", self.verdict()], *([name, found.get(name, text)] for name, text in self.made.rows())]
        if self.judgement is not None:
            rows += [
                ["mean KL before the redo", f"{self.judgement.kl_before:.5f}"],
                ["mean KL with it", f"{self.judgement.kl_after:.5f}"],
            ]
        return [*rows, *(["redone earlier", words] for words in self.earlier)]

    def as_json(self) -> dict[str, Any]:
        return {
            **self.made.as_json(),
            "redo": redo_as_json(self.pattern, len(self.made.linears), self.earlier, self.kept, self.judgement),
        }


def redo_as_json(
    pattern: str, linears: int, earlier: Sequence[str], kept: bool, judgement: Judgement | None = None
) -> dict[str, Any]:
    """The same keys whatever is known."""
    return {
        "pattern": pattern,
        "linears": linears,
        "kept": kept,
        "kl_before": None if judgement is None else judgement.kl_before,
        "kl_after": None if judgement is None else judgement.kl_after,
        "earlier": list(earlier),
    }


def _rows(linears: Sequence[LinearResult]) -> list[list[str]]:
    """One for each linear; where they are many, means of each kind."""
    if len(linears) <= MOST_ROWS:
        return [_row(linear.name, [linear]) for linear in linears]
    kinds: dict[str, list[LinearResult]] = {}
    for linear in linears:
        kinds.setdefault(kind_of(linear.name), []).append(linear)
    return [_row(f"{kind}, {len(own)}×", own) for kind, own in kinds.items()]


def _row(name: str, linears: Sequence[LinearResult]) -> list[str]:
    before, after, bits = (
        sum(values) / len(linears)
        for values in (
            [linear.error_before or 0.0 for linear in linears],
            [linear.error for linear in linears],
            [linear.bits_per_weight for linear in linears],
        )
    )
    change = f"{after / before - 1:+.1%}" if before else ""
    return [name, f"{bits:.3f}", f"{before:.5f}", f"{after:.5f}", change]


def earlier_words(entries: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What a record says was redone."""
    return tuple(f"`{one['facts'].get('redo')}`, effort {one['facts'].get('effort')}" for one in entries)
