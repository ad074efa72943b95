"""Options that several commands have, in one wording."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Calibration = Annotated[
    str, typer.Option("--calibration", help="bundled, a FILE (.parquet, .jsonl or plain text), or a dataset's name.")
]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Rows of calibration text; time grows with them.")]
RowLength = Annotated[int, typer.Option("--length", min=1, help="Tokens in a row.")]
Device = Annotated[
    str, typer.Option("--device", help="auto (the CPU), cpu, cuda or cuda:1; no GPU has been seen doing it yet.")
]
RunDevice = Annotated[
    str, typer.Option("--device", help="auto, cpu, cuda (several if one is too small), or cuda:0,cuda:1.")
]
GenerateDtype = Annotated[
    str,
    typer.Option("--dtype", help="auto (on a CPU bf16 or fp32, by model and processor), fp32, bf16 or fp16."),
]
RunDtype = Annotated[str, typer.Option("--dtype", help="Arithmetic: auto (fp32 on a CPU), fp32, bf16 or fp16.")]
CalibrationDtype = Annotated[str, typer.Option("--dtype", help="Of the calibration pass: auto, fp32, bf16 or fp16.")]
JobFolder = Annotated[
    Path | None, typer.Option("--job", help="Folder for what is finished until all is; OUT.job if not given.")
]
Rotate = Annotated[
    bool,
    typer.Option(
        "--rotate",
        help="Turn the model first, so that it says the same and no weight stands out: it may help at few bits, "
        "compare. The seed draws the rotation.",
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="Forget what is finished, the result too, and begin again.")]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory", help="Most memory of the process, as 2GiB: smaller batches and files instead; the same result."
    ),
]
UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def summary(command: Callable[..., Any]) -> str:
    """What a list of commands says of one: the first paragraph of its own words, whole."""
    return " ".join((command.__doc__ or "").partition("\n\n")[0].split())


def memory_bytes(option: str, text: str | None) -> int | None:
    """`24GB`, `24GiB`, `24G` and `24` are all 24 × 2^30, as cards are sold. Raises UsageError for anything else."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])i?b?)?", text.strip().lower())
    if not found or float(found[1]) <= 0:
        raise UsageError(f"`{text}` is no size of memory", hint=f"use `{option} 24GB`")
    return int(float(found[1]) * UNITS[found[2] or "g"])
