"""The `quantkit` command. `main` is the one place where errors become words and exit codes."""

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

INTERRUPTED = 130
RESUMED = ("quantize", "measure", "convert gptq-to-exl2", "convert exl2-to-gptq")
"""Commands that go on where they were ended."""
NOT_RESUMED = (("", "--dry-run"), ("convert gptq-to-exl2 ", "--data-free"))
"""Beginnings of these, with an option that makes them keep nothing."""


def main() -> None:
    """Run the command line and exit with the code of `quantkit.errors` (0, 2, 3, 10 to 16, 130, 1)."""
    try:
        from quantkit import heap
        from quantkit.console import prepare_streams

        heap.settle()
        heard = _hear_interrupts()
        prepare_streams()
        code = run(sys.argv[1:], heard)
    except KeyboardInterrupt:  # while modules are imported
        sys.stderr.write("error: interrupted\n")
        code = INTERRUPTED
    sys.exit(code)


def run(arguments: list[str], heard: Sequence[int] = ()) -> int:
    """Run one command line; returns its exit code. An error leaves nothing on stdout under `--json`.

    `heard`: the signals that have interrupted the process, growing as they come. What fails without a reason of its own
    after one was interrupted: a library may swallow the interrupt and then trip over what it left half imported.
    """
    import typer

    from quantkit.cli.app import app
    from quantkit.console import print_error
    from quantkit.errors import QuantkitError

    # Typer carries its own copy of click since 0.26 and used the package before: name its classes through Typer.
    usage_error: Any = typer.BadParameter.__bases__[0]

    debug = "--debug" in arguments
    if "--offline" in arguments:
        # Read by the hub's libraries when they are imported, which they are not before a hub id is given.
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    arguments = [argument for argument in arguments if argument not in ("--debug", "--offline")]
    try:
        code = app(arguments, prog_name="quantkit", standalone_mode=False)
        # Typer answers Ctrl-C with Exit(130), which it hands back as the command's result.
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except QuantkitError as error:
        if debug:
            traceback.print_exc()
        print_error(error.message, error.hint)
        return error.exit_code
    except typer.Exit as error:
        return error.exit_code
    except usage_error as error:
        command = error.ctx.command_path if error.ctx else "quantkit"
        message = error.format_message().replace("\n", " ")
        if not message:  # no arguments at all: the help text has been printed
            return 2
        print_error(message[0].lower() + message[1:].rstrip("."), f"`{command} --help` lists the options")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print_error("interrupted", _how_to_go_on(arguments))
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):
        # The reader of our output went away (`| head`), for which Rich and Typer leave at once: nothing more to say,
        # but what was asked for is not complete.
        _let_go_of_stdout()
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        if heard:
            print_error("interrupted", _how_to_go_on(arguments))
            return INTERRUPTED
        hint = "this is a bug: run again with `--debug` and report the traceback"
        if isinstance(error, OSError):
            hint = f"look after the disk, the file or the memory that refused; else {hint}"
        if _lacks_memory(error):
            hint = f"use less of it: fewer or shorter rows, a smaller model, or another machine; else {hint}"
        print_error(f"{type(error).__name__}: {error}", hint)
        return 1


def _hear_interrupts() -> Sequence[int]:
    """SIGTERM of a scheduler and SIGHUP of a terminal that closes are Ctrl-C: half-written files go before the process
    does. What the parent has set to be ignored (`nohup`) stays so. Returns the signals heard, as they come."""
    heard: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)
    return heard


def _how_to_go_on(arguments: list[str]) -> str:
    line = " ".join(arguments)
    kept = any(line.startswith(f"{command} ") for command in RESUMED)
    if kept and not any(line.startswith(command) and option in arguments for command, option in NOT_RESUMED):
        again = (argument for argument in arguments if argument != "--restart")
        return f"to go on with whatever is finished: `quantkit {shlex.join(again)}`"
    return f"to begin again: `quantkit {shlex.join(arguments)}`"


def _lacks_memory(error: Exception) -> bool:
    """Torch has no class of its own for a CPU whose memory is used up."""
    text = str(error)
    return isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text


def _let_go_of_stdout() -> None:
    """What is still buffered goes nowhere, and without a complaint when the process ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
