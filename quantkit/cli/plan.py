"""`quantkit plan`: options → settings → `commands.plan.run` → table or JSON."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import Json
from quantkit.settings import PlanSettings


def plan(
    measurement: Annotated[Path, typer.Argument(help="What `quantkit measure` wrote.")],
    bpw: Annotated[
        float, typer.Option("--bpw", help="Bits for each weight of the blocks' linears, all side data included.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: JSON, one mix for each linear.")],
    head_bits: Annotated[
        int, typer.Option("--head-bits", help="Width of the head: 2, 3, 4, 5, 6, 8, or 16 to leave it as it is.")
    ] = 6,
    include_head: Annotated[bool, typer.Option("--include-head", help="Count the head in `--bpw`.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail when EXL2 cannot hold a linear.")] = False,
    json: Json = False,
) -> None:
    """Choose for each linear of a measured model the EXL2 layout that does the least damage within a budget of bits."""
    settings = PlanSettings(measurement, bpw, out, head_bits, include_head, strict)
    from quantkit import console
    from quantkit.commands.plan import run

    console.print_report(run(settings, console.Bars()), as_json=json)
