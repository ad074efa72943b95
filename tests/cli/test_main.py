"""One manner for all commands: exit codes, `error:` and `hint:` on stderr, a clean stdout."""

import subprocess
import sys

import pytest

from quantkit import cli
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


def test_interrupt_exits_with_130() -> None:
    program = (
        "import sys\nfrom quantkit import cli\nimport quantkit.commands.doctor as doctor\n"
        "def interrupted(): raise KeyboardInterrupt\n"
        "doctor.run = interrupted\nsys.exit(cli.run(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "error: interrupted\n"
