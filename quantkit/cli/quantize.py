"""`quantkit quantize`: options → settings → `commands.quantize.run` → table or JSON."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.settings import QuantizeSettings


def quantize(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face model, or a hub id.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it appears when it is complete.")],
    format: Annotated[str, typer.Option("--format", help="Format of the result: gptq.")] = "gptq",
    bits: Annotated[int, typer.Option("--bits", help="Width of a code: 2, 3, 4 or 8.")] = 4,
    group_size: Annotated[
        int,
        typer.Option("--group-size", help="Input rows that share a scale, -1 for all; fewer are better, and bigger."),
    ] = 128,
    sym: Annotated[
        bool, typer.Option("--sym/--asym", help="Zero point in the middle, as all readers like, or free.")
    ] = True,
    act_order: Annotated[
        bool, typer.Option("--act-order", help="Groups of inputs alike in activation: better, slower to run.")
    ] = False,
    calibration: Annotated[
        str,
        typer.Option("--calibration", help="bundled, a FILE (.parquet, .jsonl or plain text), or a dataset's name."),
    ] = "bundled",
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Rows of calibration text; time grows with them.")
    ] = 128,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens in a row.")] = 512,
    seed: Annotated[int, typer.Option("--seed", help="Chooses the rows; the same seed gives the same bytes.")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="Of the calibration pass: auto, fp32, bf16 or fp16.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output folder when done.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail when a linear would stay dense or end in a short group.")
    ] = False,
    no_eval: Annotated[bool, typer.Option("--no-eval", help="Skip perplexity, KL and the sample at the end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Quantize MODEL to GPTQ against calibration text, read the result back and measure the damage."""
    settings = QuantizeSettings(
        model=model,
        out=out,
        format=format,
        bits=bits,
        group_size=group_size,
        sym=sym,
        act_order=act_order,
        calibration=calibration,
        samples=samples,
        length=length,
        seed=seed,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        strict=strict,
        evaluate=not no_eval,
    )
    from quantkit import console
    from quantkit.commands.quantize import run

    report = run(settings, console.Bars())
    if json:
        console.print_json(report.as_json())
        return
    for title, columns, rows in report.tables():
        console.print_table(title, columns, rows)
    if report.damage is not None:
        console.print_text(f"\n> {report.damage.prompt}\n{report.damage.answer}")
