"""The only module that prints: progress bars, tables, error + hint, `--json`.

Words and progress go to stderr, results to stdout. With `--json` stdout carries one JSON object and nothing else.
"""

import io
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from quantkit.errors import QuantkitError
from quantkit.progress import Task

if TYPE_CHECKING:
    from quantkit.commands.conversion.report import Report


class _Narration(Console):
    """stderr. Words that nobody reads any more are no reason to give up the work."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


out = Console(highlight=False, soft_wrap=False)
err = _Narration(stderr=True, highlight=False, soft_wrap=False)


def prepare_streams() -> None:
    """Makes stdout and stderr fit for any text: one that is closed leads nowhere, what an encoding lacks is escaped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_json(value: dict[str, Any]) -> None:
    """The machine-readable result: one object on stdout. Raises ValueError on NaN rather than write invalid JSON."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        line.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # a terminal without these letters, or a path that is no UTF-8
        line = json.dumps(value, allow_nan=False)
    print_text(line)


def print_table(title: str, columns: list[str], rows: list[list[str]], *, text_columns: int = 1) -> None:
    """A result for people, on stdout. The first columns are text, the others are right-aligned figures. A table whose
    words would be cut to fit the screen is laid on its side, or, where that is too wide too, row below row."""
    last = len(columns) - 1
    table = _table(title, columns, rows, text_columns)
    if last > 1 and _least_width(columns, rows) > out.width:
        heads = [columns[0], *(row[0] for row in rows)]
        turned = [[name, *(row[at + 1] for row in rows)] for at, name in enumerate(columns[1:])]
        if _least_width(heads, turned) <= out.width:
            table = _table(title, heads, turned, text_columns=len(heads))
        else:
            table = _table(title, ["", ""], [], text_columns=2)
            for row in rows:
                for at, (name, cell) in enumerate(zip(columns, row, strict=True)):
                    table.add_row(Text(name), Text(cell), end_section=at == last)
    with _written():
        out.print(table)


def _table(title: str, columns: list[str], rows: list[list[str]], text_columns: int) -> Table:
    table = Table(
        title=Text(title), title_justify="left", title_style="bold", header_style="bold", show_header=any(columns)
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < text_columns else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: brackets in a path are no markup
    return table


def _least_width(columns: list[str], rows: list[list[str]]) -> int:
    """With every word whole."""
    cells = zip(columns, *rows, strict=True)
    words = (max((cell_len(word) for cell in column for word in cell.split()), default=0) for column in cells)
    return sum(width + 3 for width in words) + 1


def print_report(report: "Report", *, as_json: bool) -> None:
    """A command's result: one JSON object, or its tables."""
    if as_json:
        print_json(report.as_json())
        return
    for title, columns, rows in report.tables():
        print_table(title, columns, rows)


def print_text(text: str, *, end: str = "\n") -> None:
    """Plain result text on stdout, as it is. Raises QuantkitError where it cannot be written."""
    with _written():
        sys.stdout.write(text + end)
        sys.stdout.flush()


@contextmanager
def _written() -> Iterator[None]:
    """A full disk behind stdout has words; a reader that went away is left to the command line."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise QuantkitError(
            f"the result cannot be written to stdout: {error.strerror}", hint="send it to a disk with space"
        ) from error


def print_error(message: str, hint: str | None) -> None:
    """`error:` and `hint:` on stderr, a line each so that both can be pasted. Where that cannot be written the exit
    code has to do."""
    lines = [f"error: {message}", *([f"hint: {hint}"] if hint else [])]
    with suppress(OSError):
        sys.stderr.write("".join(" ".join(line.splitlines()) + "\n" for line in lines))
        sys.stderr.flush()


def say(line: str) -> None:
    """One line of narration on stderr, left whole: what is wrapped cannot be pasted or searched."""
    with suppress(OSError):
        err.print(line, markup=False, soft_wrap=True)


class _Bar:
    """One bar. Off a terminal, where nothing can be redrawn, it writes a line now and then instead."""

    SECONDS_BETWEEN_LINES = 10.0

    def __init__(self, bars: Progress, label: str, total: int) -> None:
        self._bars, self._label, self._total, self._done = bars, label, total, 0
        self._id = bars.add_task(label, total=total, note="")
        self._start = self._last = time.monotonic()

    def advance(self, steps: int = 1, *, note: str = "") -> None:
        self._done += steps
        self._bars.update(self._id, advance=steps, note=note)
        now = time.monotonic()
        if err.is_terminal or now - self._last < self.SECONDS_BETWEEN_LINES:
            return
        self._last = now
        left = (now - self._start) / max(self._done, 1) * (self._total - self._done)
        say(f"{self._label}: {self._done}/{self._total}, {left:.0f} s left{', ' + note if note else ''}")


class Bars:
    """`progress.Progress` for a terminal: rich bars with elapsed time and ETA on stderr."""

    WHOLE_RUN = 1e9  # seconds

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TextColumn("eta"), TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False))
        # Work comes in bursts (the linears of a block are solved one after another, then the block runs again), so only
        # the average over the whole run foretells its end.
        bars = Progress(
            *columns, console=err, transient=True, disable=not err.is_terminal, speed_estimate_period=self.WHOLE_RUN
        )
        with bars:
            yield _Bar(bars, label, total)

    def say(self, line: str) -> None:
        say(line)
