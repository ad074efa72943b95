"""Progress is an argument: commands report to it and know nothing of the screen.

`with progress.task("quantize", total=30) as task: task.advance(note="block 3, mlp.down_proj, error 0.012")`
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Task(Protocol):
    """One bar: what is done, of how much."""

    def advance(self, steps: int = 1, *, note: str = "") -> None: ...


class Progress(Protocol):
    """Where a command reports to: `task` opens a bar, `say` writes one line beside it."""

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]: ...

    def say(self, line: str) -> None: ...


class _SilentTask:
    def advance(self, steps: int = 1, *, note: str = "") -> None:
        pass


class _TqdmTask:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def advance(self, steps: int = 1, *, note: str = "") -> None:
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(steps)


class Tqdm:
    """Bars for scripts and notebooks, on stderr: the default of the Python API for everything that takes long."""

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]:
        from tqdm.auto import tqdm

        with tqdm(total=total, desc=label) as bar:
            yield _TqdmTask(bar)

    def say(self, line: str) -> None:
        from tqdm import tqdm

        tqdm.write(line, file=sys.stderr)


class Silent:
    """Reports nothing."""

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]:
        yield _SilentTask()

    def say(self, line: str) -> None:
        pass


NOBODY = Silent()
"""Where a command does not say to whom its parts report."""
