"""The error tree. Each error says what was expected, what was found and where, and hints at a fix.

    QuantkitError            1   anything else
    ├─ UsageError            2   options that contradict each other
    ├─ GateError             3   a result that fails its gate, probe or check
    ├─ CheckpointError      10   missing shard, damaged header, absent tensor
    │  └─ UnsupportedModel  10   no catalog entry, or a config value that cannot be honoured
    ├─ FormatError          11   dtype, shape, bits or group size that a codec cannot hold
    ├─ PlanError            12   budget out of reach, unknown tensor in a plan
    ├─ CalibrationError     13   empty text, non-finite activations, Hessian that stays singular
    ├─ JobError             14   output folder of other settings or in use, damaged journal
    ├─ BackendError         15   CUDA asked for but unusable, compile or launch failure
    └─ RequestError         16   prompt longer than the cache, unknown stop token

The number is the exit code of the command line. Interrupted commands exit with 130.
"""

import os
import shlex

OWN_FAULT = "this is a fault of quantkit: please report it"
"""The hint where nothing that a user did can be the reason."""


def in_shell(path: str | os.PathLike[str]) -> str:
    """A path as a hint spells it in a command: quoted where a shell needs it, and never taken for an option."""
    text = os.fspath(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


class QuantkitError(Exception):
    """Base of all errors a user can cause: one message and one hint that can be acted on."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(QuantkitError):
    """Options that contradict each other, or a value outside its range."""

    exit_code = 2


class GateError(QuantkitError):
    """A result that fails its gate, probe or check."""

    exit_code = 3


class CheckpointError(QuantkitError):
    """A checkpoint that cannot be read, or an output that cannot be written or is another result."""

    exit_code = 10


class UnsupportedModel(CheckpointError):  # noqa: N818 - the name says what it is about
    """A model family without a catalog entry, or a config value that cannot be honoured."""


class FormatError(QuantkitError):
    """A tensor that a codec cannot hold or decode."""

    exit_code = 11


class PlanError(QuantkitError):
    """A plan that cannot be met or does not fit the model."""

    exit_code = 12


class CalibrationError(QuantkitError):
    """Calibration text or activations that cannot be used."""

    exit_code = 13


class JobError(QuantkitError):
    """A job of other settings, or in use by another process, or a folder of a job that is damaged, is none, or cannot
    be written."""

    exit_code = 14


class BackendError(QuantkitError):
    """A backend that was asked for and cannot be used."""

    exit_code = 15


class RequestError(QuantkitError):
    """A generation request that cannot be served."""

    exit_code = 16
