"""`quantkit measure`: options → settings → `commands.measure.run` → table or JSON."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.settings import MeasureSettings


def measure(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face model, or a hub id.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: JSON, for `quantkit plan`.")],
    calibration: Annotated[
        str,
        typer.Option("--calibration", help="bundled, a FILE (.parquet, .jsonl or plain text), or a dataset's name."),
    ] = "bundled",
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Rows of calibration text; time grows with them.")
    ] = 128,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens in a row.")] = 512,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, help="Chooses the rows, and draws labels for gradients.")
    ] = 0,
    device: Annotated[str, typer.Option("--device", help="auto or cpu; cuda is refused so far.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="Of the calibration pass: auto, fp32, bf16 or fp16.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that another command made.")] = False,
    job: Annotated[
        Path | None, typer.Option("--job", help="Folder for what is finished until all is; OUT.job if not given.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Forget what is finished, the result too, and begin again.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure what each EXL2 layout of each linear of MODEL would cost in bits and do in damage."""
    settings = MeasureSettings(
        model=model,
        out=out,
        calibration=calibration,
        samples=samples,
        length=length,
        seed=seed,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        job=job,
        restart=restart,
    )
    from quantkit import console
    from quantkit.commands.measure import run

    report = run(settings, console.Bars())
    if json:
        console.print_json(report.as_json())
        return
    for title, columns, rows in report.tables():
        console.print_table(title, columns, rows)
