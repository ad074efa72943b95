"""`quantkit measure --dry-run`: what would be measured, and what it takes of time, memory and disk."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.commands.measuring.check import checked_blocks, checked_candidate
from quantkit.commands.measuring.outline import outline
from quantkit.commands.quantization.job import choose_placement, open_model, open_subject, prepare, require_finite
from quantkit.commands.quantization.memory_limit import limited
from quantkit.commands.quantization.needs import DiskNeeds, measurement_needs, require_space
from quantkit.commands.quantization.outlook import device_rows, guess, machine_memory, require_memory
from quantkit.commands.quantization.rehearsal import Rehearsal, rehearse
from quantkit.commands.quantization.resumption import job_place
from quantkit.measurement import Measurement, require_place
from quantkit.models.architecture import block_of
from quantkit.progress import Progress
from quantkit.settings import MeasureSettings, QuantizeSettings

MIDDLE_BPW = 4.0
"""Of the mixes that the rehearsal solves; each is as much work as any other."""


@dataclass(frozen=True, slots=True)
class MeasureOutlook:
    """What a measurement would hold and take."""

    out: Path
    planned: Measurement
    disk: DiskNeeds
    rehearsal: Rehearsal
    memory_bytes: int

    @property
    def candidates(self) -> int:
        """Over all linears."""
        return sum(len(linear.candidates) for linear in self.planned.linears)

    def rows(self) -> list[list[str]]:
        """Name and figure, for people."""
        rehearsal = self.rehearsal
        dense = sum(not linear.candidates for linear in self.planned.linears)
        return [
            ["linears", f"{len(self.planned.linears) - dense} to measure, {dense} that EXL2 cannot hold"],
            ["layouts in all", f"{self.candidates}"],
            ["time, about", f"{rehearsal.seconds:.0f} s, {rehearsal.backward_seconds:.0f} s of it for gradients"],
            ["peak memory, about", f"{rehearsal.peak_memory_bytes / 2**20:.0f} MiB"],
            ["memory of this machine", f"{self.memory_bytes / 2**20:.0f} MiB"],
            *device_rows(rehearsal),
            ["disk for the job meanwhile", f"{self.disk.job / 2**20:.1f} MiB"],
            ["rehearsed", f"the largest block, with {rehearsal.tokens} tokens; the check at the end was not"],
        ]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of each table for people."""
        return [(f"{self.out}, not written", ["", ""], self.rows())]

    def as_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "dry_run": True,
            "linears": len(self.planned.linears),
            "candidates": self.candidates,
            **self.rehearsal.as_json(),
            "memory_bytes": self.memory_bytes,
            "job_bytes": self.disk.job,
        }


def foresee(settings: MeasureSettings, progress: Progress) -> MeasureOutlook:
    """Raises what `measure.run` raises before work, CheckpointError where the disk would not do, and CalibrationError
    where the memory would not."""
    checkpoint = open_model(settings.model, settings.seed, rotate=settings.rotate)
    require_place(settings.out)
    place = Path(os.path.realpath(settings.out))
    subject = open_subject(checkpoint, settings, choose_placement(settings.device, settings.dtype))
    subject = limited(subject, settings.max_memory, weighs=True, measures=True, progress=progress)
    planned = outline(subject)
    choice = QuantizeSettings(settings.model, settings.out, format="exl2", bpw=MIDDLE_BPW)
    job = prepare(subject, guess(choice, subject, planned), strict=False)
    needs = measurement_needs(subject, _checked_bytes(planned, subject.config.num_layers))
    require_space(needs, place, job_place(settings.job, place, checkpoint.path))
    require_finite(checkpoint, progress)
    most = max((len(linear.candidates) for linear in planned.linears), default=0)
    rehearsal = rehearse(job, progress, weighs=True, solves=most, quantizes=False)
    memory = machine_memory()
    require_memory(rehearsal, memory)
    return MeasureOutlook(settings.out, planned, needs, rehearsal, memory)


def _checked_bytes(planned: Measurement, layers: int) -> int:
    blocks = checked_blocks(layers)
    kept = (linear for linear in planned.linears if linear.candidates and block_of(linear.name) in blocks)
    return sum(checked_candidate(linear).bits for linear in kept) // 8
