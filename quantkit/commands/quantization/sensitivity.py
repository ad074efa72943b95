"""The backward pass of a command: over how much of its text, where its states live, what it cost."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from quantkit.calibration import sensitivity
from quantkit.calibration.sensitivity import Covariances, Sensitivity, TokenWeights, chunk_sizes
from quantkit.commands.quantization.fallback import Descent
from quantkit.commands.quantization.job import Subject
from quantkit.job.job import Job, Step
from quantkit.models.architecture import block_of
from quantkit.progress import Progress

STEP = "gradients"


@dataclass(frozen=True, slots=True, eq=False)
class BackwardPass:
    """What it found, in wall and processor seconds of the process that ran it."""

    found: Sensitivity
    seconds: float
    cpu_seconds: float


class RunBackward(Protocol):
    """`run_backward`, or what runs it but once for several jobs over the same text."""

    def __call__(self, subject: Subject, job: Job, seed: int, progress: Progress) -> BackwardPass: ...


class RunOnce:
    """Every job after the first is given what the first has found. All must be of one model, text, seed and dtype.

    That outlives the first job, so the covariances of all blocks are in memory meanwhile.
    """

    def __init__(self) -> None:
        self._found: BackwardPass | None = None

    def __call__(self, subject: Subject, job: Job, seed: int, progress: Progress) -> BackwardPass:
        result = run_backward(subject, job, seed, progress, known=self._found)
        self._found = replace(result, found=replace(result.found, covariances=dict(result.found.covariances)))
        return self._found


def run_backward(
    subject: Subject, job: Job, seed: int, progress: Progress, *, known: BackwardPass | None = None
) -> BackwardPass:
    """Over the first rows of the text: a few thousand tokens say enough. One that the job has is not run again, and one
    that is `known` is only kept there.

    The states go to a folder of the job where they are too many for the memory.
    """
    if not job.has(STEP):
        descent = Descent(subject, progress)
        descent.begin("gradients")
        descent.run(partial(_keep_backward, job, seed, progress, known, descent))
        job.keep_states()
    value = job.value(STEP)
    return BackwardPass(_unpack(value, job), value["seconds"], value["cpu_seconds"])


def _keep_backward(
    job: Job, seed: int, progress: Progress, known: BackwardPass | None, descent: Descent, subject: Subject
) -> None:
    with job.step(STEP) as step:
        blocks: list[dict[str, int]] = []

        def keep(covariances: Covariances) -> None:
            """Those of one block go into one tensor: a file should not have one for each expert."""
            step.add(
                _covariances(len(blocks)),
                torch.cat([chunk.flatten().cpu() for chunks in covariances.values() for chunk in chunks]),
            )
            blocks.append({name: sum(map(len, chunks)) for name, chunks in covariances.items()})

        result = known or _run(subject, job, seed, progress, keep)
        if known:
            for _, names in groupby(known.found.covariances, block_of):
                keep({name: known.found.covariances[name] for name in names})
        step.finish(
            {
                **_pack(result.found, step),
                "covariances": blocks,
                "seconds": result.seconds,
                "cpu_seconds": result.cpu_seconds,
                "fallbacks": descent.noted(),
            }
        )


def _run(
    subject: Subject, job: Job, seed: int, progress: Progress, keep: Callable[[Covariances], None]
) -> BackwardPass:
    start = time.monotonic(), time.process_time()
    folder = job.new_states(STEP) if subject.backward_spilled_bytes > 0 else None
    found = sensitivity.measure(
        subject.checkpoint,
        subject.config,
        subject.architecture,
        subject.backward_rows,
        seed=seed,
        dtype=subject.placement.dtype,
        device=subject.placement.device,
        folder=folder,
        progress=progress,
        keep=keep,
        batch_tokens=subject.budget.backward_tokens,
        logits_at_once=subject.budget.logits_at_once,
    )
    return BackwardPass(found, time.monotonic() - start[0], time.process_time() - start[1])


class _KeptCovariances(Mapping[str, tuple[Tensor, ...]]):
    """Those of a job, of which one block is in memory."""

    def __init__(self, job: Job, blocks: Sequence[Mapping[str, int]]) -> None:
        self._job = job
        self._blocks = blocks
        self._place = {name: number for number, names in enumerate(blocks) for name in names}
        self._held: tuple[int, Mapping[str, tuple[Tensor, ...]]] = -1, {}

    def __getitem__(self, name: str) -> tuple[Tensor, ...]:
        number = self._place[name]
        if self._held[0] != number:
            self._held = -1, {}
            values = self._job.tensor(STEP, _covariances(number))
            self._held = number, dict(_cut(self._blocks[number], values))
        return self._held[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)


def _covariances(number: int) -> str:
    return f"covariances {number}"


def _pack(found: Sensitivity, step: Step) -> dict[str, object]:
    """Tensors of one kind go into one, since there may be more of them than a file should have."""
    _add(step, "outputs", found.outputs.values(), torch.float64)
    _add(step, "weights", (stage.weights for stage in found.stages.values()), torch.float32)
    _add(step, "tokens", (stage.tokens for stage in found.stages.values()), torch.int64)
    return {
        "tokens": found.tokens,
        "outputs": {name: len(squares) for name, squares in found.outputs.items()},
        "stages": {name: len(stage.tokens) for name, stage in found.stages.items()},
    }


def _add(step: Step, name: str, parts: Iterable[Tensor], dtype: torch.dtype) -> None:
    step.add(name, torch.cat([torch.empty(0, dtype=dtype), *(part.cpu() for part in parts)]))


def _unpack(value: dict, job: Job) -> Sensitivity:
    outputs, stages = value["outputs"], value["stages"]
    squares = job.tensor(STEP, "outputs").split(list(outputs.values()))
    sizes = list(stages.values())
    seen = zip(job.tensor(STEP, "weights").split(sizes), job.tensor(STEP, "tokens").split(sizes), strict=True)
    return Sensitivity(
        value["tokens"],
        dict(zip(outputs, squares, strict=True)),
        {name: TokenWeights(*pair) for name, pair in zip(stages, seen, strict=True)},
        _KeptCovariances(job, value["covariances"]),
    )


def _cut(outputs: Mapping[str, int], values: Tensor) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    start = 0
    for name, count in outputs.items():
        chunks = []
        for size in chunk_sizes(count):
            chunks.append(values[start : start + size * size].view(size, size))
            start += size * size
        yield name, tuple(chunks)
