"""The Typer app: one small module for each command group, imported here; torch is imported only inside commands."""

import typer

from quantkit.cli.check import check
from quantkit.cli.convert import convert
from quantkit.cli.doctor import doctor
from quantkit.cli.evaluate import evaluate
from quantkit.cli.generate import generate
from quantkit.cli.inspect import inspect
from quantkit.cli.measure import measure
from quantkit.cli.measurement import measurement
from quantkit.cli.options import summary
from quantkit.cli.plan import plan
from quantkit.cli.quantize import quantize
from quantkit.cli.recommend import recommend
from quantkit.version import VERSION

app = typer.Typer(
    name="quantkit",
    help="Quantize language models to GPTQ and EXL2, convert between formats, and prove each result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes break words and cut names of options at 80 columns, and swallow brackets
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"quantkit {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
    debug: bool = typer.Option(False, "--debug", help="Anywhere: the traceback of an error before its words."),
    offline: bool = typer.Option(False, "--offline", help="Anywhere: models and data sets from the local cache only."),
) -> None:
    """`main` takes `--debug` and `--offline` out wherever they stand; here they are for the list of options."""


for _command in (quantize, measure, plan, generate, check, inspect, recommend, doctor):
    app.command(short_help=summary(_command))(_command)
app.add_typer(measurement, name="measurement")
app.add_typer(convert, name="convert")
app.add_typer(evaluate, name="eval")
