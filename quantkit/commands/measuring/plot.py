"""A measurement as a picture: the damage of each block, and of each kind of linear by its bits."""

from pathlib import Path
from typing import Any

from quantkit.errors import PlanError, UsageError
from quantkit.measurement import MeasuredLinear, Measurement, damage_near
from quantkit.plan import kind_of

FORMATS = ("svg", "png", "pdf")
LEVELS = (2.3, 3.2, 4.2, 5.2)


def require_plots(path: Path) -> None:
    """UsageError for a picture of a kind that cannot be drawn, or where the library that draws is absent."""
    if path.suffix.removeprefix(".") not in FORMATS:
        raise UsageError(f"`{path.name}` names no kind of picture", hint="use `--plot measurement.svg`, or .png")
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError as error:
        hint = "pip install 'quantkit[plots]'"
        raise UsageError("`--plot` needs `matplotlib`, which is not installed", hint=hint) from error


def plot(measurement: Measurement, path: Path) -> None:
    """Draw into `path`, by its ending SVG, PNG or PDF; the same measurement gives the same picture.

    Raises UsageError as `require_plots` does, PlanError where the file cannot be written.
    """
    require_plots(path)
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    blocks, kinds = figure.subplots(1, 2)
    _draw_blocks(blocks, measurement)
    _draw_kinds(kinds, measurement)
    kind = path.suffix.removeprefix(".")
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    try:
        with matplotlib.rc_context({"svg.hashsalt": measurement.model}):
            figure.savefig(path, format=kind, metadata=dates[kind], dpi=150)
    except OSError as error:
        raise PlanError(f"`{path}` cannot be written: {error.strerror}", hint="choose another `--plot`") from error


def _draw_blocks(axes: Any, measurement: Measurement) -> None:
    blocks = measurement.choices_by_block()
    for bits in LEVELS:
        axes.plot(list(blocks), [damage_near(own, bits) for own in blocks.values()], marker=".", label=f"{bits:g} bits")
    if measurement.checks:
        places = [check.block for check in measurement.checks]
        seen, predicted = ([getattr(check, side) for check in measurement.checks] for side in ("seen", "predicted"))
        axes.scatter(places, seen, marker="x", color="black", label="KL seen", zorder=3)
        axes.scatter(places, predicted, facecolors="none", edgecolors="black", label="predicted for it", zorder=3)
    _label(axes, "block", f"damage, {measurement.unit}")


def _draw_kinds(axes: Any, measurement: Measurement) -> None:
    """Damage against bits: all linears of a kind in their n-th candidate, or, where they were measured together, each
    block by itself."""
    if measurement.together:
        for place, choice in enumerate(measurement.choices):
            curve = sorted(_curve([choice]))
            axes.plot(*zip(*curve, strict=True), color="gray", alpha=0.5, label=None if place else "a part of a block")
    else:
        kinds: dict[str, list[tuple[MeasuredLinear, ...]]] = {}
        for choice in measurement.choices:
            kinds.setdefault(kind_of(choice[0].name), []).append(choice)
        for kind, choices in kinds.items():
            axes.plot(*zip(*_curve(choices), strict=True), marker=".", label=kind)
    _label(axes, "bits per weight, side data included", f"damage, {measurement.unit}")


def _curve(choices: list[tuple[MeasuredLinear, ...]]) -> list[tuple[float, float]]:
    """Bits per weight and damage of all of them in their n-th candidate, for each n that all have."""
    linears = [linear for choice in choices for linear in choice]
    weights = sum(linear.weights for linear in linears)
    return [
        (sum(each.bits for each in alike) / weights, sum(each.damage for each in alike))
        for alike in zip(*(linear.candidates for linear in linears), strict=False)
    ]


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize="small")
