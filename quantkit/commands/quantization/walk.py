"""BlockWalk: the calibration text on its way through the blocks, of which a job keeps every one that is finished.

A block is finished when its step is in the job together with the states behind it. The states before it go after that,
so that for a moment there are two of them on the disk, and in memory never more than a batch.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path

from quantkit.calibration.stream import ActivationStream
from quantkit.commands.quantization.job import Subject, on_gpu
from quantkit.commands.quantization.memory_budget import WALK_TOKENS
from quantkit.job.job import Job
from quantkit.models.transformer import load_embedding


def walk_tokens(subject: Subject) -> int:
    """Of a file. On a GPU it does not depend on what is free there at the moment: a job goes on with what it has."""
    return WALK_TOKENS if on_gpu(subject.placement) else subject.budget.walk_tokens


def step_of(walk: str, index: int) -> str:
    """What the step of one block is called."""
    return f"{walk} {index}"


class BlockWalk:
    """Steps `NAME 0`, `NAME 1`, … of a job, one for each block; `done` of them are finished.

    The value of a step is an object; what `follow` gave is in it under `states`.
    """

    def __init__(self, subject: Subject, job: Job, name: str) -> None:
        self._subject, self._job, self._name = subject, job, name
        self.done = next(index for index in count() if not job.has(self.step(index)))

    def step(self, index: int) -> str:
        return step_of(self._name, index)

    def open(self) -> ActivationStream:
        """The states before the first block that is not done."""
        name = self.step(self.done)
        rows = self._subject.rows
        batch_rows = max(1, walk_tokens(self._subject) // rows.shape[1])
        if self.done:
            self._job.keep_states(name)
            seal = self._job.value(self.step(self.done - 1))["states"]
            folder, width = self._job.states(name), self._subject.config.hidden_size
            return ActivationStream.resume(folder, seal, rows, batch_rows=batch_rows, hidden_size=width)
        embedding = load_embedding(  # on the CPU: rows are looked up, once
            self._subject.checkpoint,
            self._subject.config,
            self._subject.architecture,
            self._subject.placement.dtype,
        )
        self._job.keep_states()
        folder = self._job.new_states(name)
        return ActivationStream.start(embedding, rows, batch_rows=batch_rows, folder=folder)

    def aside(self, index: int, part: str) -> Path:
        """A folder for what is reached inside a block, until `leave`."""
        return self._job.new_states(f"{self.step(index)} {part}")

    def follow(self, leave: Callable[[Path], ActivationStream], index: int) -> tuple[ActivationStream, str]:
        """The states behind a block, which `leave` puts into a folder, and their seal. Those before it stay until
        `leave`."""
        behind = leave(self._job.new_states(self.step(index + 1)))
        return behind, behind.seal()

    def leave(self, index: int) -> None:
        """The states before a block and inside it go, once its step is finished."""
        self._job.keep_states(self.step(index + 1))
