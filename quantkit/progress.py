"""Progress is an argument: commands report to it and know nothing of the screen.

`with progress.task("quantize", total=30) as task: task.advance(note="block 3, mlp.down_proj, error 0.012")`
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


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


class Silent:
    """Reports nothing: the default of the Python API."""

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]:
        yield _SilentTask()

    def say(self, line: str) -> None:
        pass
