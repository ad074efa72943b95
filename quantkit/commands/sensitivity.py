"""The backward pass of a command: over how much of its text, where its states live, what it cost."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from quantkit.calibration import sensitivity
from quantkit.calibration.sensitivity import Sensitivity
from quantkit.commands.quantize_job import Subject
from quantkit.progress import Progress


@dataclass(frozen=True, slots=True, eq=False)
class BackwardPass:
    """What it found, in wall and processor seconds."""

    found: Sensitivity
    seconds: float
    cpu_seconds: float


def run_backward(subject: Subject, folder: Path, seed: int, progress: Progress) -> BackwardPass:
    """Over the first rows of the text: a few thousand tokens say enough.

    The states go to `folder` where they are too many for the memory; it is made anew and removed at the end, and the
    caller sees to it that no other process uses it.
    """
    start = time.monotonic(), time.process_time()
    spills = subject.backward_spilled_bytes > 0
    if spills:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    try:
        found = sensitivity.measure(
            subject.checkpoint,
            subject.config,
            subject.architecture,
            subject.backward_rows,
            seed=seed,
            dtype=subject.placement.dtype,
            device=subject.placement.device,
            folder=folder if spills else None,
            progress=progress,
        )
    finally:
        if spills:
            shutil.rmtree(folder, ignore_errors=True)
    return BackwardPass(found, time.monotonic() - start[0], time.process_time() - start[1])
