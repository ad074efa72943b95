"""`quantkit measure`: options → settings → `commands.measure.run` → table or JSON."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import (
    Calibration,
    CalibrationDtype,
    Device,
    JobFolder,
    Json,
    MaxMemory,
    Restart,
    Rotate,
    RowLength,
    Samples,
    memory_bytes,
)
from quantkit.settings import MeasureSettings


def measure(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face model, or a hub id.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: JSON, for `quantkit plan`.")],
    rotate: Rotate = False,
    calibration: Calibration = "bundled",
    samples: Samples = 128,
    length: RowLength = 512,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, help="Chooses the rows, and draws labels for gradients.")
    ] = 0,
    device: Device = "auto",
    dtype: CalibrationDtype = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that another command made.")] = False,
    job: JobFolder = None,
    restart: Restart = False,
    max_memory: MaxMemory = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only say what would be done, and what it takes of time, memory and disk."),
    ] = False,
    json: Json = False,
) -> None:
    """Measure what each EXL2 layout of each linear of MODEL would cost in bits and do in damage."""
    settings = MeasureSettings(
        model=model,
        out=out,
        rotate=rotate,
        calibration=calibration,
        samples=samples,
        length=length,
        seed=seed,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        job=job,
        restart=restart,
        max_memory=memory_bytes("--max-memory", max_memory),
    )
    from quantkit import console

    if dry_run:
        from quantkit.commands.measuring.outlook import foresee

        console.print_report(foresee(settings, console.Bars()), as_json=json)
        return
    from quantkit.commands.measure import run

    console.print_report(run(settings, console.Bars()), as_json=json)
