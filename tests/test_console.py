"""Streams that are closed, full, read by nobody or without the letters: results are whole or refused, never a traceback."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit import console
from quantkit.errors import QuantkitError

PATH = "models/[red]x[bold]"
ANSWER = {"text": "wörld \U0001f600", "path": "n\udcff"}
PROGRAM = f"""
import sys
from quantkit import cli, console

def run(arguments, heard):
    for number in range(200):
        console.say('narration ' + 'x' * 1000)
    console.print_json({ANSWER!r}) if arguments == ['json'] else console.print_text({ANSWER["text"]!r})
    return 0

cli.run = run
cli.main()
"""


def started(*arguments: str, prefix: str = "", encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    """A command of its own behind `main`, by a shell that may close or redirect its streams."""
    command = f'"$0" -c "$1" {" ".join(arguments)} {prefix}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, PROGRAM],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_json_is_whole_in_any_encoding(encoding: str) -> None:
    done = started("json", encoding=encoding)
    assert done.returncode == 0
    assert json.loads(done.stdout) == ANSWER


def test_letters_that_an_encoding_lacks_are_escaped() -> None:
    assert started("text", encoding="ascii").stdout == "w\\xf6rld \\U0001f600\n"
    assert started("text").stdout == "wörld \U0001f600\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full"])
def test_a_stream_that_is_closed_or_narration_that_is_lost_stops_nothing(closed: str) -> None:
    done = started("json", prefix=closed)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert (done.stdout == "") == closed.startswith(">")


def test_narration_that_nobody_reads_stops_nothing() -> None:
    done = started("json", prefix="2> >(exec true)")
    assert json.loads(done.stdout) == ANSWER
    assert done.returncode == 0


def test_a_result_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        for write in (
            lambda: console.print_json({"a": 1}),
            lambda: console.print_text("a"),
            lambda: console.print_table("a", ["b"], [["c"]]),
        ):
            with pytest.raises(QuantkitError, match="cannot be written to stdout: No space left on device") as caught:
                write()
            assert caught.value.hint
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()


def test_brackets_in_a_table_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table(PATH, ["", ""], [[PATH, "[/]"]])
    assert capsys.readouterr().out.count(PATH) == 2


WIDE = ["candidate", "bits per weight", "perplexity", "99th percentile", "same likeliest", "healthy conversations"]


@pytest.mark.parametrize("rows", [1, 2, 30])
def test_no_word_of_a_table_is_cut(rows: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one too wide for the screen: few rows turn it on its side, more stand below one another."""
    monkeypatch.setattr(console.out, "_width", 60)
    cells = [[f"a-rather-long-name-{row}", *(f"{row}{at:011}.25" for at in range(1, 6))] for row in range(rows)]
    console.print_table("wide", WIDE, cells)
    shown = capsys.readouterr().out
    words = {word for line in [*cells, WIDE] for cell in line for word in cell.split()}
    assert words <= set(shown.split()) and "…" not in shown
    assert max(map(len, shown.splitlines())) <= 60


def test_a_word_wider_than_the_screen_is_folded_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.out, "_width", 60)
    console.print_table("path", ["", ""], [["x" * 100, "y" * 100]])
    shown = capsys.readouterr().out
    assert (shown.count("x"), shown.count("y")) == (100, 100)


def test_a_bar_inside_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, where bars are drawn: what is written is read back while the bar of its command is there."""
    monkeypatch.setattr(console.err, "_force_terminal", True)
    monkeypatch.setattr(console.err, "file", io.StringIO())
    bars = console.Bars()
    with bars.task("outer", 2) as outer, bars.task("inner", 1) as inner:
        inner.advance()
        outer.advance()
    assert "\x1b[?25l" in console.err.file.getvalue(), "no bar was drawn"


def test_an_error_is_one_line_and_its_hint_another(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_error("what\nhappened", "do\r\nthis")
    assert capsys.readouterr().err == "error: what happened\nhint: do this\n"
