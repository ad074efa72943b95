"""The backward pass of a command: over how much of its text, where its states live, what it cost."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantkit.calibration import sensitivity
from quantkit.calibration.sensitivity import Sensitivity, TokenWeights, chunk_sizes
from quantkit.commands.quantize_job import Subject
from quantkit.job.job import Job, Step
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
    """Every job after the first is given what the first has found. All must be of one model, text, seed and dtype."""

    def __init__(self) -> None:
        self._found: BackwardPass | None = None

    def __call__(self, subject: Subject, job: Job, seed: int, progress: Progress) -> BackwardPass:
        self._found = run_backward(subject, job, seed, progress, known=self._found)
        return self._found


def run_backward(
    subject: Subject, job: Job, seed: int, progress: Progress, *, known: BackwardPass | None = None
) -> BackwardPass:
    """Over the first rows of the text: a few thousand tokens say enough. One that the job has is not run again, and one
    that is `known` is only kept there.

    The states go to a folder of the job where they are too many for the memory.
    """
    if job.has(STEP):
        value = job.value(STEP)
        found = _unpack(value, dict(job.tensors(STEP)))
        return BackwardPass(found, value["seconds"], value["cpu_seconds"])
    result = known or _run(subject, job, seed, progress)
    with job.step(STEP) as step:
        value = _pack(result.found, step)
        step.finish({**value, "seconds": result.seconds, "cpu_seconds": result.cpu_seconds})
    job.keep_states()
    return result


def _run(subject: Subject, job: Job, seed: int, progress: Progress) -> BackwardPass:
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
    )
    return BackwardPass(found, time.monotonic() - start[0], time.process_time() - start[1])


def _pack(found: Sensitivity, step: Step) -> dict[str, object]:
    """Tensors of one kind go into one, since there may be more of them than a file should have."""
    _add(step, "outputs", found.outputs.values(), torch.float64)
    _add(step, "weights", (stage.weights for stage in found.stages.values()), torch.float32)
    _add(step, "tokens", (stage.tokens for stage in found.stages.values()), torch.int64)
    chunks = [chunk.flatten() for chunks in found.covariances.values() for chunk in chunks]
    _add(step, "covariances", chunks, torch.bfloat16)
    return {
        "tokens": found.tokens,
        "outputs": {name: len(squares) for name, squares in found.outputs.items()},
        "stages": {name: len(stage.tokens) for name, stage in found.stages.items()},
    }


def _add(step: Step, name: str, parts: Iterable[Tensor], dtype: torch.dtype) -> None:
    step.add(name, torch.cat([torch.empty(0, dtype=dtype), *(part.cpu() for part in parts)]))


def _unpack(value: dict, tensors: dict[str, Tensor]) -> Sensitivity:
    outputs, stages = value["outputs"], value["stages"]
    squares = tensors["outputs"].split(list(outputs.values()))
    sizes = list(stages.values())
    seen = zip(tensors["weights"].split(sizes), tensors["tokens"].split(sizes), strict=True)
    return Sensitivity(
        value["tokens"],
        dict(zip(outputs, squares, strict=True)),
        {name: TokenWeights(*pair) for name, pair in zip(stages, seen, strict=True)},
        {name: tuple(chunks) for name, chunks in _unpack_covariances(outputs, tensors["covariances"])},
    )


def _unpack_covariances(outputs: Mapping[str, int], values: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
    start = 0
    for name, count in outputs.items():
        chunks = []
        for size in chunk_sizes(count):
            chunks.append(values[start : start + size * size].view(size, size))
            start += size * size
        yield name, chunks
