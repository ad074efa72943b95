"""Effort: how much is done for quality, as presets with their cost."""

from dataclasses import dataclass

import torch

from quantkit.errors import UsageError
from quantkit.settings import QuantizeSettings


@dataclass(frozen=True, slots=True)
class Effort:
    """One preset.

    calibrates  text runs through the model, and errors are passed on to where they do least harm
    weighs      gradients say which tokens and outputs matter; else all do, tokens of small norm a little more than the
                rest
    tunes       scales and norms follow the gradient of KL after the rounding
    """

    name: str
    calibrates: bool = True
    weighs: bool = False
    tunes: bool = False


_ALL = (
    Effort("nearest", calibrates=False),
    Effort("fast"),
    Effort("default", weighs=True),
    Effort("best", weighs=True, tunes=True),
)
EFFORTS = {effort.name: effort for effort in _ALL}
HESSIAN_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def choose_effort(settings: QuantizeSettings) -> Effort:
    """Raises UsageError for a preset that there is not, and for options that it cannot use."""
    name = settings.effort
    if name not in EFFORTS:
        raise UsageError(f"unknown effort `{name}`", hint=f"use `--effort` with one of {', '.join(EFFORTS)}")
    effort = EFFORTS[name]
    if effort.tunes and settings.format == "exl2":
        raise UsageError(
            f"`--effort {name}` has no meaning with `--format exl2`: its scales are codes, which cannot be tuned",
            hint="use `--effort default`",
        )
    if not effort.calibrates:
        if settings.format == "exl2":
            raise UsageError(
                f"`--effort {name}` has no meaning with `--format exl2`: calibration chooses its widths",
                hint="use `--effort fast`",
            )
        plain = QuantizeSettings(settings.model, settings.out)
        for field in ("calibration", "samples", "length", "hessian_dtype", "route_all"):
            if getattr(settings, field) != getattr(plain, field):
                option = "--" + field.replace("_", "-")
                raise UsageError(
                    f"`{option}` has no meaning with `--effort {name}`, which reads no text", hint="leave it out"
                )
    return effort


def choose_hessian_dtype(name: str) -> torch.dtype:
    """Raises UsageError for anything but `fp32` and `fp64`."""
    if name not in HESSIAN_DTYPES:
        raise UsageError(f"Hessians cannot be summed in `{name}`", hint="use `--hessian-dtype fp32` or `fp64`")
    return HESSIAN_DTYPES[name]
