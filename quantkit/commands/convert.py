"""`quantkit convert ROUTE IN OUT`: finds the route in the table, refuses options that it does not read, runs it."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.commands.conversion.report import Report
from quantkit.commands.conversion.routes import ROUTES, Route, find, idle_options
from quantkit.commands.conversion.stamp import conversion_facts, finished_conversion, stamp
from quantkit.errors import QuantkitError, UsageError
from quantkit.progress import Progress, Tqdm
from quantkit.settings import ConvertSettings


def convert(
    route: str, source: str | Path, out: str | Path, *, progress: Progress | None = None, **options: Any
) -> Report:
    """Convert `source` to `out` by a route of the command line. Options are the fields of
    `quantkit.settings.ConvertSettings`.

    report = quantkit.convert("gptq-to-exl2", "models/llama-gptq", "models/llama-exl2", bpw=5.0)
    """
    return run(ConvertSettings(route, Path(source), Path(out), **options), progress or Tqdm())


def run(settings: ConvertSettings, progress: Progress) -> Report:
    """Convert. Raises UsageError for an unknown route and for an option that it does not read, and whatever the route
    raises; then nothing is left behind."""
    route = find(settings.route)
    if route is None:
        names = ", ".join(route.name for route in ROUTES)
        raise UsageError(f"there is no route `{settings.route}`", hint=f"routes: {names}")
    _refuse_unread(settings, route)
    _refuse_idle(settings)
    module, _, function = route.home.partition(":")
    found: Callable[[ConvertSettings, Progress], Report] = getattr(
        importlib.import_module(f"quantkit.commands.{module}"), function
    )
    try:
        facts = conversion_facts(settings, progress)
        before = finished_conversion(settings, facts, progress)
        if before is not None:
            return before
        report = found(replace(settings, made_by=facts), progress)
        stamp(settings.out, facts, progress)
        return report
    except QuantkitError as error:
        # Every command writes to what `-o` names, this one to its second argument.
        error.hint = None if error.hint is None else error.hint.replace("with `-o`", "as OUT").replace("`-o`", "OUT")
        raise


def _refuse_idle(settings: ConvertSettings) -> None:
    """Options of the route that have no effect beside `--data-free`."""
    plain = ConvertSettings(settings.route, settings.source, settings.out)
    for name in idle_options(settings.route) if settings.data_free else ():
        if getattr(settings, name) != getattr(plain, name):
            raise UsageError(
                f"`--{name}` has no effect beside `--data-free`, which reads the weights alone",
                hint=f"leave out `--{name}`, or `--data-free`",
            )


def _refuse_unread(settings: ConvertSettings, route: Route) -> None:
    plain = ConvertSettings(settings.route, settings.source, settings.out)
    for name in ConvertSettings.__dataclass_fields__:
        if name not in (*route.options, "overwrite", "made_by") and getattr(settings, name) != getattr(plain, name):
            readers = [other.name for other in ROUTES if name in other.options]
            raise UsageError(
                f"`{name}` has no meaning for `{route.name}`", hint=f"leave it out; it is read by {', '.join(readers)}"
            )
