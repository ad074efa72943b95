"""One manner for all commands: exit codes, `error:` and `hint:` on stderr, a clean stdout."""

import subprocess
import sys
from contextlib import suppress

import pytest
import typer

from quantkit import cli
from quantkit.cli.app import app
from quantkit.version import VERSION

# Modules that cost more than the answer to `--help` is worth.
HEAVY = {"torch", "numpy", "numba", "datasets", "huggingface_hub", "gguf", "cupy", "tokenizers", "transformers", "pyarrow"}


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom quantkit import cli\ncode = cli.run(['--help'])\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)\nsys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"
    assert "doctor" in done.stdout


def commands(command, path=()):
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def test_help_at_80_columns_has_every_name_and_word_whole(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for path, command in commands(typer.main.get_command(app)):
        with suppress(SystemExit):
            cli.run([*path, "--help"])
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= 80, path
        names = {name for option in command.params for name in option.opts if name.startswith("-")}
        helps = {word for option in command.params for word in (getattr(option, "help", None) or "").split()}
        missing = {word for word in names | helps if word not in shown}
        assert not missing and "…" not in shown.replace("CANDIDATE…", ""), (path, missing)


def test_help_names_what_may_stand_anywhere(capsys) -> None:
    assert cli.run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "--debug" in shown and "--offline" in shown


def test_version(capsys) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"quantkit {VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bogus"], "no such option: --bogus"),
        (["bogus"], "no such command 'bogus'"),
        (["doctor", "--bogus"], "no such option: --bogus"),
        (["doctor", "surplus"], "got unexpected extra argument"),
    ],
)
def test_usage_errors_exit_with_2_and_a_hint(arguments, message, capsys) -> None:
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert "\nhint: `quantkit" in captured.err


@pytest.mark.parametrize("seed", ["-1", str(2**63)])
@pytest.mark.parametrize(
    "command",
    [["quantize", "m", "-o", "out"], ["measure", "m", "-o", "out"], ["generate", "m"], ["convert", "gptq-to-exl2", "m", "out"]],
    ids=lambda command: command[0],
)
def test_a_seed_that_no_generator_takes_is_refused(command: list[str], seed: str, capsys) -> None:
    assert cli.run([*command, "--seed", seed]) == 2
    assert "'--seed'" in capsys.readouterr().err


def test_interrupt_exits_with_130() -> None:
    program = (
        "import sys\nfrom quantkit import cli\nimport quantkit.commands.doctor as doctor\n"
        "def interrupted(): raise KeyboardInterrupt\n"
        "doctor.run = interrupted\nsys.exit(cli.run(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "error: interrupted\nhint: to begin again: `quantkit doctor`\n"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        ("MemoryError('no room')", 1, "use less of it"),
        ("RuntimeError('DefaultCPUAllocator: can\\'t allocate memory')", 1, "use less of it"),
        ("OSError(5, 'Input/output error', 'a')", 1, "look after the disk"),
        ("ValueError('two\\nlines')", 1, "error: ValueError: two lines\nhint: this is a bug"),
        ("SystemExit(1)", 1, ""),
        ("BrokenPipeError()", 1, ""),
    ],
)
def test_whatever_else_happens_has_a_code_and_a_hint(error: str, code: int, words: str) -> None:
    program = (
        "import sys\nfrom quantkit import cli\nimport quantkit.cli.app as app\n"
        f"def fail(*arguments, **options): raise {error}\n"
        "app.app = fail\nsys.exit(cli.run(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") == bool(words)


def test_what_fails_after_a_swallowed_interrupt_was_interrupted() -> None:
    """As when one comes amid an import inside a library that goes on, with half a module."""
    lines = [
        "import os, signal, sys, quantkit.cli, quantkit.cli.app as cli",
        "def app(*given, **named):",
        "    try:",
        "        os.kill(os.getpid(), signal.SIGTERM)",
        "    except KeyboardInterrupt:",
        "        raise RecursionError('half a module') from None",
        "cli.app = app",
        "sys.argv = ['quantkit', 'quantize', 'm', '-o', 'out']",
        "quantkit.cli.main()",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr.startswith("error: interrupted\nhint: to go on with whatever is finished: `") and "Recursion" not in done.stderr


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("quantize m -o out --restart", "quantkit quantize m -o out"),
        ("convert gptq-to-exl2 m out", "quantkit convert gptq-to-exl2 m out"),
        ("convert exl2-to-gptq m out --data-free", "quantkit convert exl2-to-gptq m out --data-free"),
        ("convert gptq-to-exl2 m out --data-free --bpw 4", None),
        ("quantize m -o out --dry-run", None),
        ("measure m -o out --dry-run", None),
        ("convert awq-to-gptq m out", None),
    ],
)
def test_going_on_is_promised_where_something_is_kept(line: str, kept: str | None, monkeypatch, capsys) -> None:
    import quantkit.cli.app

    def app(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantkit.cli.app, "app", app)
    assert cli.run(line.split()) == 130
    hint = f"to begin again: `quantkit {line}`" if kept is None else f"to go on with whatever is finished: `{kept}`"
    assert capsys.readouterr().err == f"error: interrupted\nhint: {hint}\n"


def test_a_reader_that_goes_away_leaves_no_words() -> None:
    command = f"{sys.executable} -m quantkit --help | head -0; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_interrupt_while_modules_are_imported() -> None:
    program = (
        "import sys\nfrom quantkit import cli\n"
        "def interrupted(*given): raise KeyboardInterrupt\n"
        "cli.run = interrupted\ncli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize(("number", "ignored", "code"), [("TERM", False, 130), ("HUP", False, 130), ("HUP", True, 0)])
def test_being_told_to_end_is_an_interrupt_unless_it_is_ignored(number: str, ignored: bool, code: int) -> None:
    program = (
        "import os, signal, sys\nfrom quantkit import cli\n"
        # Said either way: the suite itself may run under nohup, which a child would inherit.
        f"signal.signal(signal.SIG{number}, signal.SIG_{'IGN' if ignored else 'DFL'})\n"
        f"def told(*given): os.kill(os.getpid(), signal.SIG{number}); return 0\n"
        "cli.run = told\ncli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "error: interrupted\n" if code else "")
