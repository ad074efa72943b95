"""`quantkit inspect`: options → settings → `commands.inspect.run` → tables or JSON."""

from typing import Annotated

import typer

from quantkit.cli.options import Json
from quantkit.settings import InspectSettings


def inspect(
    model: Annotated[str, typer.Argument(help="Folder of a model, quantized or not, or a hub id.")],
    json: Json = False,
) -> None:
    """Say what a model is: format, real bits per weight by part, sizes, tokenizer and chat template, and who can load
    it."""
    settings = InspectSettings(model)
    from quantkit import console
    from quantkit.commands.inspect import run

    report = run(settings, console.Bars())
    if json:
        console.print_json(report.as_json())
        return
    console.print_table(str(report.path), ["", ""], report.rows(), text_columns=2)
    console.print_table("by part", ["", "weights", "bits/weight", "MiB", "stored as"], report.part_rows())
    if report.verdicts:
        columns = ["", "loads", "why not, or what to mind"]
        console.print_table("who can load it", columns, report.verdict_rows(), text_columns=3)
    for note in report.notes:
        console.print_text(f"note: {note}")
