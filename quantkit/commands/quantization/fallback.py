"""Descent: what is done on a GPU, and again with less where its memory is not enough: smaller batches, then single rows
with Hessians and linears one by one, then the CPU, for that step alone.

Hidden states, encoded weights and what is finished are in main memory or on the disk, so that a step can begin again.
Where a GPU and a CPU sum in the same order the bytes are the same; where they do not, the last bits of a step that fell
to the CPU are those of the CPU.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from quantkit.calibration.stream import ActivationStream
from quantkit.commands.quantization.job import Subject, on_gpu
from quantkit.commands.quantization.memory_budget import DEFAULT, Budget
from quantkit.errors import BackendError
from quantkit.job.job import Job
from quantkit.models.transformer import Block, Rotary
from quantkit.progress import Progress
from quantkit.runtime.placement import Placement

Found = TypeVar("Found")
SMALLER, SINGLE, CPU = "smaller batches", "single rows, Hessians and linears one by one", "the CPU"
EXHAUSTED = ("out of memory", "OUT_OF_MEMORY", "ALLOC_FAILED")
"""What torch, the driver and NVIDIA's libraries call it in errors that are not torch.OutOfMemoryError."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """A step for which the memory of the GPU was not enough, and what it was done with in the end."""

    step: str
    did: str


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The subject with the budget and the placement that a step is tried with."""

    subject: Subject
    words: str


def levels(subject: Subject) -> Iterator[Level]:
    """From the one that the work begins with to the least; on a CPU there is one."""
    yield Level(subject, "")
    if not on_gpu(subject.placement):
        return
    budget, row = subject.budget, max(1, subject.rows.shape[1])
    smaller = _shared(budget, row, 4)
    single = replace(_shared(budget, row, 1 << 20), hessian_bytes=0, apart=True)
    for found, words in ((smaller, SMALLER), (single, SINGLE)):
        if found != budget:
            yield Level(replace(subject, budget=found), words)
            budget = found
    on_cpu = Placement.choose("cpu", subject.placement.dtype_name)
    yield Level(replace(subject, placement=on_cpu), CPU)


def planned(subject: Subject) -> tuple[Fallback, ...]:
    """What a GPU is known to be too small for before any work, by the budget of `subject`."""
    if not on_gpu(subject.placement) or subject.budget == DEFAULT:
        return ()
    return (Fallback("all steps", SINGLE if subject.budget.apart else SMALLER),)


def _shared(budget: Budget, row: int, share: int) -> Budget:
    return replace(
        budget,
        walk_tokens=max(row, budget.walk_tokens // share),
        backward_tokens=max(row, budget.backward_tokens // share),
        logits_at_once=max(1 << 20, budget.logits_at_once // share),
    )


class Descent:
    """The steps of one piece of work, each at the least descent that its memory allows.

    A step begins where the one before it ended, but for the CPU: blocks are alike, and memory of a GPU that another
    process had may be free again.
    """

    def __init__(self, subject: Subject, progress: Progress, tried: Iterable[Level] | None = None) -> None:
        self._levels: Sequence[Level] = tuple(levels(subject) if tried is None else tried)
        self._progress = progress
        self._at = 0
        self._step = ""
        self._met: str | None = None

    def begin(self, step: str) -> None:
        """The step that is spoken of from now on."""
        self._at = min(self._at, max(0, len(self._levels) - 2))
        self._step, self._met = step, None

    def run(self, do: Callable[[Subject], Found], *, whole: bool = False) -> Found:
        """What `do` gives with the first level that suffices. What it has begun before must not be in the way.

        whole  nothing in it depends on the budget: either the GPU or the CPU
        Raises BackendError where the GPU fails for another reason.
        """
        while True:
            try:
                return do(self._levels[self._at].subject)
            except (RuntimeError, BackendError) as error:
                if not lacks_memory(error):
                    raise _told(error, self._levels[self._at].subject) from error
                if self._at + 1 == len(self._levels):
                    raise
            self._descend(whole)

    def found(self) -> list[Fallback]:
        """What became of the step in hand."""
        return [] if self._met is None else [Fallback(self._step, self._met)]

    def noted(self) -> list[dict[str, str]]:
        """The same, for a step of a job."""
        return [asdict(fallback) for fallback in self.found()]

    def _descend(self, whole: bool) -> None:
        device = self._levels[self._at].subject.placement.device
        self._at = len(self._levels) - 1 if whole else self._at + 1
        self._met = self._levels[self._at].words
        give_back(device)
        self._progress.say(f"note: {self._step}: the memory of `{device}` is not enough, going on with {self._met}")


def lacks_memory(error: Exception) -> bool:
    """Whether an error says that a device has no more memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in EXHAUSTED)


def give_back(device: str) -> None:
    """What no tensor holds any more goes to others."""
    gc.collect()  # the frames of what failed may hold each other
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def rows_at_once(stream: ActivationStream, subject: Subject) -> ActivationStream:
    """The stream for a reader with the budget of `subject`."""
    return stream.finer(max(1, subject.budget.walk_tokens // max(1, subject.rows.shape[1])))


def run_in_parts(block: Block, hidden: Tensor, rotary: Rotary, subject: Subject) -> Tensor:
    """The block's answer to states `[b, s, hidden]`, in main memory, by the rows that `subject` has budget for."""
    parts = hidden.split(max(1, subject.budget.walk_tokens // hidden.shape[1]))
    return torch.cat([block.forward(part, rotary).cpu() for part in parts])


def noted_by(job: Job) -> tuple[Fallback, ...]:
    """Those that steps of a job have noted, neighbours of one kind as one: `block 3 to block 7`."""
    found = (Fallback(**own) for value in job.values() for own in value.get("fallbacks", ()))
    return tuple(
        Fallback(run[0].step if len(run) == 1 else f"{run[0].step} to {run[-1].step}", did)
        for did, run in ((did, list(own)) for did, own in groupby(found, lambda fallback: fallback.did))
    )


def _told(error: Exception, subject: Subject) -> Exception:
    """A fault of the driver or of a kernel, in words; any other error as it is."""
    if isinstance(error, BackendError) or not on_gpu(subject.placement) or "CUDA error" not in str(error):
        return error
    first = str(error).strip().splitlines()[0]
    return BackendError(
        f"`{subject.placement.device}` failed: {first}",
        hint="run the same command again, which goes on behind what is finished; else use `--device cpu`",
    )
