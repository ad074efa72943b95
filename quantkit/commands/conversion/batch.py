"""`quantkit convert batch JOBS.toml`: many conversions in one go, one measurement shared, the rest done when one fails.

    [defaults]                       # of every job: any option of its route
    samples = 64

    [[job]]
    route = "gptq-to-exl2"
    in = "models/llama-gptq"
    out = "models/llama-exl2"
    bpw = [4.0, 5.0]                 # several rates: OUT-4bpw and OUT-5bpw

The whole file is checked before the first job begins.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from quantkit.commands import convert
from quantkit.commands.conversion.report import ConvertReport, Report
from quantkit.commands.conversion.routes import ROUTES, find, idle_options
from quantkit.errors import QuantkitError, UsageError
from quantkit.progress import Progress
from quantkit.settings import ConvertSettings

PATHS = ("measurement",)
SHARED = ("source", "original", "calibration", "samples", "length", "seed")
"""Conversions that agree in these have one measurement."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that did not end: what was said, and the exit code it would have had."""

    message: str
    hint: str | None
    exit_code: int


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Jobs in their order, each with its report or its failure."""

    jobs: tuple[ConvertSettings, ...]
    results: tuple[Report | Failure, ...]

    @property
    def exit_code(self) -> int:
        """0, or that of the first failure."""
        return next((result.exit_code for result in self.results if isinstance(result, Failure)), 0)

    def front(self) -> set[int]:
        """Places of the results that no other of the same input beats in both size and KL."""
        sizes: dict[int, tuple[Path, int, float]] = {}
        for place, (job, result) in enumerate(zip(self.jobs, self.results, strict=True)):
            if isinstance(result, ConvertReport) and result.damage is not None:
                sizes[place] = job.source, result.written.size_bytes, result.damage.kl_mean
        return {
            place
            for place, (source, size, damage) in sizes.items()
            if not any(
                other[0] == source and other[1] <= size and other[2] <= damage and other[1:] != (size, damage)
                for other in sizes.values()
            )
        }

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        front = self.front()
        columns = ["result", "route", "size", "bits/weight", "perplexity", "KL", "Pareto"]
        rows = [
            _row(job, result, place in front)
            for place, (job, result) in enumerate(zip(self.jobs, self.results, strict=True))
        ]
        failures = [
            [str(job.out), result.message, result.hint or ""]
            for job, result in zip(self.jobs, self.results, strict=True)
            if isinstance(result, Failure)
        ]
        tables = [("quantkit convert batch", columns, rows)]
        return [*tables, ("failed", ["job", "error", "hint"], failures)] if failures else tables

    def as_json(self) -> dict[str, Any]:
        front = self.front()
        return {
            "failed": sum(isinstance(result, Failure) for result in self.results),
            "jobs": [
                {"route": job.route, "source": str(job.source), "out": str(job.out), "error": result.message}
                | {"hint": result.hint, "exit_code": result.exit_code}
                if isinstance(result, Failure)
                else {**result.as_json(), "pareto": place in front}
                for place, (job, result) in enumerate(zip(self.jobs, self.results, strict=True))
            ],
        }


def run_batch(path: Path, progress: Progress) -> BatchReport:
    """Run the jobs of a file one after another. Raises UsageError for a file that cannot be understood as a whole."""
    jobs = read_jobs(path)
    kept = [job.measurement for job in jobs]
    shared = _sharing(jobs)
    made = {job.measurement for job, own in zip(shared, kept, strict=True) if job.measurement and own is None}
    results: list[Report | Failure] = []
    try:
        for number, job in enumerate(shared, 1):
            progress.say(f"{number}/{len(jobs)}: {job.route} {job.source} → {job.out}")
            results.append(_attempt(job, progress))
    finally:
        for file in made:
            file.unlink(missing_ok=True)
    return BatchReport(tuple(jobs), tuple(results))


def read_jobs(path: Path) -> list[ConvertSettings]:
    """Raises UsageError, naming the job and its key, for anything that is no list of jobs."""
    hint = "see `docs/guides/convert.md`"
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {error.strerror}", hint=hint) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"`{path}` is not TOML: {error}", hint=hint) from error
    unknown = said.keys() - {"defaults", "job"}
    listed, defaults = said.get("job"), said.get("defaults", {})
    if unknown or not isinstance(listed, list) or not listed or not isinstance(defaults, dict):
        what = f"unknown table `{min(unknown)}`" if unknown else "no `[[job]]`"
        raise UsageError(f"`{path}`: {what}", hint=hint)
    jobs = [job for number, own in enumerate(listed, 1) for job in _jobs(own, defaults, f"job {number} of `{path}`")]
    outs = [job.out.absolute() for job in jobs]
    for out in outs:
        if outs.count(out) > 1:
            raise UsageError(f"`{path}` writes `{out}` more than once", hint="give each job an `out` of its own")
    return jobs


def _jobs(own: Any, defaults: Mapping[str, Any], where: str) -> list[ConvertSettings]:
    """One table as settings: several where `bpw` has several rates."""
    if not isinstance(own, dict) or not all(isinstance(own.get(key), str) for key in ("route", "in", "out")):
        raise UsageError(f"{where} needs the texts `route`, `in` and `out`", hint="see `docs/guides/convert.md`")
    route = find(own["route"])
    if route is None:
        names = ", ".join(route.name for route in ROUTES)
        raise UsageError(f"{where}: there is no route `{own['route']}`", hint=f"routes: {names}")
    known = {*route.options, "overwrite"}
    idle = idle_options(route.name) if own.get("data_free", defaults.get("data_free")) else ()
    values = {key: value for key, value in defaults.items() if key in known and key not in idle}
    values |= {key: value for key, value in own.items() if key not in ("route", "in", "out")}
    if foreign := sorted(values.keys() - known):
        raise UsageError(f"{where}: `{foreign[0]}` has no meaning for `{route.name}`", hint="leave it out")
    if strange := sorted(defaults.keys() - {field.name for field in fields(ConvertSettings)}):
        raise UsageError(f"`defaults` has `{strange[0]}`, which no route reads", hint="leave it out")
    rates = values.pop("bpw", None)
    settings = ConvertSettings(route.name, Path(own["in"]), Path(own["out"]), **_typed(values, where))
    if not isinstance(rates, list):
        return [settings if rates is None else replace(settings, bpw=_number(rates, where))]
    return [
        replace(settings, bpw=_number(rate, where), out=settings.out.with_name(f"{settings.out.name}-{rate:g}bpw"))
        for rate in rates
    ]


def _typed(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values as the settings have them: each of the type of its default, numbers and paths where that is None."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        default = ConvertSettings.__dataclass_fields__[name].default
        wanted: type
        if name in PATHS:
            value, wanted = Path(value) if isinstance(value, str) else value, Path
        elif name == "match":
            value, wanted = _number(value, where), float
        elif isinstance(default, tuple):
            value, wanted = tuple(value) if isinstance(value, list) else value, tuple
        else:
            wanted = {"head_bits": int, "original": str}.get(name, type(default))
        if type(value) is not wanted and not isinstance(value, wanted if wanted is Path else ()):
            raise UsageError(f"{where}: `{name}` is {value!r}, expected {wanted.__name__}", hint="correct it")
        found[name] = value
    return found


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where}: {value!r} is no number", hint="write it as 4.0")
    return float(value)


def _sharing(jobs: Sequence[ConvertSettings]) -> list[ConvertSettings]:
    """The same jobs; those that would measure the same model over the same text are given one file for it."""
    first: dict[tuple[Any, ...], Path] = {}
    keys = [_key(job) for job in jobs]
    shared = []
    for job, key in zip(jobs, keys, strict=True):
        if key is not None and keys.count(key) > 1:
            file = first.setdefault(key, job.out.absolute().with_name(f".{job.out.name}.batch-measurement.json"))
            job = replace(job, measurement=file)
        shared.append(job)
    return shared


def _key(job: ConvertSettings) -> tuple[Any, ...] | None:
    route = find(job.route)
    if route is None or "measurement" not in route.options or job.data_free or job.measurement is not None:
        return None
    return tuple(getattr(job, name) for name in SHARED)


def _attempt(job: ConvertSettings, progress: Progress) -> Report | Failure:
    try:
        return convert.run(job, progress)
    except QuantkitError as error:
        failure = Failure(error.message, error.hint, error.exit_code)
    except (OSError, RuntimeError, MemoryError) as error:
        failure = Failure(str(error) or type(error).__name__, None, 1)
    progress.say(f"failed: {failure.message}")
    return failure


def _row(job: ConvertSettings, result: Report | Failure, on_front: bool) -> list[str]:
    if isinstance(result, Failure):
        return [str(job.out), job.route, "failed", "", "", "", ""]
    if not isinstance(result, ConvertReport):
        return [str(job.out), job.route, "", "", "", "", ""]
    damage = result.damage
    own = result.facts.get("bits_per_weight", result.written.bits_per_weight)
    return [
        str(job.out),
        job.route,
        f"{result.written.size_bytes / 2**20:.1f} MiB",
        f"{own:.3f}",
        "" if damage is None else f"{damage.perplexity_result:.3f}",
        "" if damage is None else f"{damage.kl_mean:.5f}",
        "*" if on_front else "",
    ]
