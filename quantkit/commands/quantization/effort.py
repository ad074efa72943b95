"""Effort: how much is done for quality, as presets with their cost."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.errors import UsageError
from quantkit.settings import QuantizeSettings


@dataclass(frozen=True, slots=True)
class Effort:
    """One preset.

    calibrates  text runs through the model, and errors are passed on to where they do least harm
    weighs      gradients say which tokens and outputs matter; else all do, tokens of small norm a little more than the
                rest
    tunes       how often scales and norms follow the gradient of KL over the text, after the rounding; GPTQ only
    tunes_all   over all of it, and not its first `TUNED_TOKENS` tokens alone
    allots      linears share the bits that one width would take, where a target leaves that choice
    """

    name: str
    calibrates: bool = True
    weighs: bool = False
    tunes: int = 0
    tunes_all: bool = False
    allots: bool = False

    @property
    def optional(self) -> bool:
        """Whether the result is of use without tuning too, where that cannot be done."""
        return not self.tunes_all

    def tuned(self, rows: Tensor) -> Tensor:
        """The part of a text `[rows, length]` over which is tuned."""
        return rows if self.tunes_all else rows[: max(1, TUNED_TOKENS // max(1, rows.shape[1]))]


_ALL = (
    Effort("nearest", calibrates=False),
    Effort("fast"),
    Effort("default", weighs=True, tunes=1),
    Effort("best", weighs=True, tunes=4, tunes_all=True, allots=True),
)
EFFORTS = {effort.name: effort for effort in _ALL}
TUNED_TOKENS = 10240
UNTUNED = "scales and norms are not tuned: `--max-memory` does not hold for that, and without it less would be lost"
HESSIAN_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def choose_effort(settings: QuantizeSettings) -> Effort:
    """Raises UsageError for a preset that there is not, and for options that it cannot use. What is `optional` is left
    out with options that it cannot be done with."""
    name = settings.effort
    if name not in EFFORTS:
        raise UsageError(f"unknown effort `{name}`", hint=f"use `--effort` with one of {', '.join(EFFORTS)}")
    effort = EFFORTS[name]
    if effort.tunes and settings.format == "exl2":
        if effort.optional:
            return replace(effort, tunes=0)
        raise UsageError(
            f"`--effort {name}` has no meaning with `--format exl2`: its scales are codes, which cannot be tuned",
            hint="use `--effort default`",
        )
    if effort.tunes and settings.max_memory is not None:
        if effort.optional:
            return replace(effort, tunes=0)
        raise UsageError("`--max-memory` does not hold for tuning", hint="use `--effort default` with it")
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
