"""Effort: how much is done for quality, as presets with their cost."""

from dataclasses import dataclass

from quantkit.errors import UsageError
from quantkit.settings import QuantizeSettings


@dataclass(frozen=True, slots=True)
class Effort:
    """One preset.

    calibrates  text runs through the model, and errors are passed on to where they do least harm
    weighs      gradients say which tokens matter; else all do, those of small norm a little more than the rest
    """

    name: str
    calibrates: bool = True
    weighs: bool = False


_ALL = (Effort("nearest", calibrates=False), Effort("fast"), Effort("default", weighs=True))
EFFORTS = {effort.name: effort for effort in _ALL}


def choose_effort(settings: QuantizeSettings) -> Effort:
    """Raises UsageError for a preset that there is not, and for options that it cannot use."""
    name = settings.effort
    if name == "best":
        raise UsageError("`--effort best` does not exist yet", hint="use `--effort default`")
    if name not in EFFORTS:
        raise UsageError(f"unknown effort `{name}`", hint=f"use `--effort` with one of {', '.join(EFFORTS)}")
    effort = EFFORTS[name]
    if not effort.calibrates:
        if settings.format == "exl2":
            raise UsageError(
                f"`--effort {name}` has no meaning with `--format exl2`: calibration chooses its widths",
                hint="use `--effort fast`",
            )
        plain = QuantizeSettings(settings.model, settings.out)
        for option in ("calibration", "samples", "length"):
            if getattr(settings, option) != getattr(plain, option):
                raise UsageError(
                    f"`--{option}` has no meaning with `--effort {name}`, which reads no text", hint="leave it out"
                )
        if settings.route_all:
            raise UsageError(
                f"`--route-all` has no meaning with `--effort {name}`, which reads no text", hint="leave it out"
            )
    return effort
