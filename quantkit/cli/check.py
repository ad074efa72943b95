"""`quantkit check`: options → settings → `commands.check.run` → lines and a table, or JSON."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import Json
from quantkit.settings import CheckSettings


def check(
    path: Annotated[Path, typer.Argument(help="Folder of a model, quantized or not.")],
    json: Json = False,
) -> int:
    """List all faults of a model folder in one go, and who can load it. Exits 0 when it is sound, else with the code of
    its first fault."""
    settings = CheckSettings(path)
    from quantkit import console
    from quantkit.commands.check import run

    report = run(settings, console.Bars())
    if json:
        console.print_json(report.as_json())
    else:
        console.print_text("\n".join(report.lines()))
        console.print_table("who can load it", ["", "loads", "why not, or what to mind"], report.rows(), text_columns=3)
    return report.exit_code
