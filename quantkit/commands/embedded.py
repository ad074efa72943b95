"""The calibration text as the first block sees it, for any command that walks through the blocks."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.calibration.stream import ActivationStream
from quantkit.commands.quantize_job import Subject
from quantkit.models.transformer import load_embedding

BATCH_TOKENS = 2048
"""Calibration tokens that go through a block together."""


@contextmanager
def embedded(subject: Subject, folder: Path) -> Iterator[ActivationStream]:
    """The embedded text: in memory, or, where it is large, in this folder, which is made anew and removed at the end.

    The caller sees to it that no other process uses the folder; what a killed one left there is of no use.
    """
    placement = subject.placement
    embedding = load_embedding(
        subject.checkpoint, subject.config, subject.architecture, placement.dtype, placement.device
    )
    spills = subject.spilled_bytes > 0
    if spills:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    try:
        yield ActivationStream.start(
            lambda ids: embedding(ids.to(placement.device)),
            subject.rows,
            batch_rows=max(1, BATCH_TOKENS // subject.rows.shape[1]),
            folder=folder if spills else None,
        )
    finally:
        if spills:
            shutil.rmtree(folder, ignore_errors=True)
