"""`quantkit convert ROUTE IN OUT`: one command for each route of the table, with the options that it reads."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli import convert_options as options
from quantkit.cli.options import summary
from quantkit.commands.conversion.routes import ROUTES, Route, table
from quantkit.errors import UsageError
from quantkit.settings import ConvertSettings

convert = typer.Typer(
    help="Convert a model from one format to another.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@convert.callback()
def _root(
    context: typer.Context,
    listing: Annotated[bool, typer.Option("--list", help="The routes: what each keeps, and what it needs.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --list: one JSON object on stdout.")] = False,
) -> None:
    if json and not listing:
        raise UsageError("`--json` stands behind the route, or with `--list`", hint="quantkit convert --list --json")
    if listing:
        from quantkit import console

        if json:
            console.print_json({"routes": [route.as_json() for route in ROUTES]})
            raise typer.Exit
        console.print_table("quantkit convert ROUTE IN OUT", *table())
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def _command(route: Route) -> Callable[..., None]:
    """The function that Typer sees: its signature is made of the route's options."""

    def run_route(**values: Any) -> None:
        as_json = values.pop("json")
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        _run(ConvertSettings(route=route.name, **fields), as_json)

    names = (*options.ALWAYS_FIRST, *route.options, *options.ALWAYS_LAST)
    parameters = [options.parameter(name) for name in names]
    run_route.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run_route.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run_route.__doc__ = route.summary
    return run_route


def _run(settings: ConvertSettings, as_json: bool) -> None:
    from quantkit import console
    from quantkit.commands.convert import run

    console.print_report(run(settings, console.Bars()), as_json=as_json)


def batch(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.toml", help="Conversions, one `[[job]]` each.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
) -> None:
    """Run many conversions, go on past one that fails, and end with a table of what each result costs and loses."""
    from quantkit import console
    from quantkit.commands.conversion.batch import run_batch

    report = run_batch(jobs, console.Bars())
    console.print_report(report, as_json=json)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


convert.command("batch", short_help=summary(batch))(batch)
for _route in ROUTES:
    convert.command(_route.name, short_help=_route.summary)(_command(_route))
