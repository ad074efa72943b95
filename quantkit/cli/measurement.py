"""`quantkit measurement show` and `quantkit measurement import`: options → settings → `commands.*_measurement`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import Json
from quantkit.settings import ImportMeasurementSettings, ShowMeasurementSettings

measurement = typer.Typer(
    help="Look at a measurement, or import one of ExLlamaV2.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@measurement.command("show")
def show(
    file: Annotated[Path, typer.Argument(help="What `quantkit measure` or `quantkit measurement import` wrote.")],
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Picture to write: FILE.svg, .png or .pdf; needs `matplotlib`.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the damage of each block and kind of linear, and how well it predicts what was seen."""
    settings = ShowMeasurementSettings(file, plot)
    from quantkit import console
    from quantkit.commands.show_measurement import run

    console.print_report(run(settings, console.Bars()), as_json=json)


@measurement.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="The `measurement.json` that ExLlamaV2 wrote.")],
    model: Annotated[str, typer.Argument(help="The unquantized model that it is of: a folder, or a hub id.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: JSON, for `quantkit plan`.")],
    json: Json = False,
) -> None:
    """Import a measurement of ExLlamaV2, which chooses for blocks as a whole and knows of no KL divergence."""
    settings = ImportMeasurementSettings(source, model, out)
    from quantkit import console
    from quantkit.commands.import_measurement import run

    console.print_report(run(settings, console.Bars()), as_json=json)
