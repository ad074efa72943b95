"""The options of `quantkit convert`, each once: which routes read them stands in the table of routes."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli.options import JobFolder, Restart, RowLength, Samples
from quantkit.settings import ConvertSettings

ALWAYS_FIRST, ALWAYS_LAST = ("source", "out"), ("overwrite", "json")

_ANNOTATIONS: dict[str, Any] = {
    "source": Annotated[Path, typer.Argument(metavar="IN", help="The model to convert.")],
    "out": Annotated[Path, typer.Argument(metavar="OUT", help="What to write; appears only when it is complete.")],
    "overwrite": Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")],
    "json": Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")],
    "bpw": Annotated[
        float | None,
        typer.Option("--bpw", help="Bits for each weight of the blocks' linears, all side data included."),
    ],
    "match": Annotated[
        float | None,
        typer.Option(
            "--match",
            help="In place of --bpw: the smallest result whose KL, in nats per token, is above the input's by no more "
            "than this. Without either: 0.01.",
        ),
    ],
    "head_bits": Annotated[
        int | None,
        typer.Option(
            "--head-bits", help="Width of the head: 2, 3, 4, 5, 6 or 8. A dense head stays as it is unless given."
        ),
    ],
    "data_free": Annotated[
        bool, typer.Option("--data-free", help="From the weights alone, one tensor at a time: fast, and less close.")
    ],
    "original": Annotated[
        str | None,
        typer.Option(
            "--original", help="The unquantized model: its weights are the target, and what KL is measured against."
        ),
    ],
    "measurement": Annotated[
        Path | None,
        typer.Option("--measurement", help="Damage of each mix: read where the file exists, else made and kept there."),
    ],
    "calibration": Annotated[
        str, typer.Option("--calibration", help="bundled, a FILE (.parquet, .jsonl or plain text), or a dataset.")
    ],
    "samples": Samples,
    "length": RowLength,
    "seed": Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, help="Chooses the rows; the same seed gives the same bytes.")
    ],
    "evaluate": Annotated[bool, typer.Option("--eval/--no-eval", help="KL and perplexity before and after.")],
    "dtype": Annotated[str, typer.Option("--dtype", help="Of the dense weights: fp16, bf16 or fp32.")],
    "bits": Annotated[int, typer.Option("--bits", help="Width of a code: 2, 3, 4 or 8.")],
    "group_size": Annotated[int, typer.Option("--group-size", help="Input rows that share a scale, -1 for all.")],
    "sym": Annotated[bool, typer.Option("--sym/--asym", help="Zero point in the middle, or free.")],
    "act_order": Annotated[bool, typer.Option("--act-order", help="Groups of inputs alike in activation.")],
    "shard_size": Annotated[str, typer.Option("--shard-size", help="Most data in one file, as 4GiB or 500MB.")],
    "adapters": Annotated[
        list[str], typer.Option("--adapter", help="Folder of a PEFT adapter, perhaps with a weight: DIR or DIR=0.5.")
    ],
    "job": JobFolder,
    "restart": Restart,
    "type": Annotated[str, typer.Option("--type", help="Of the linears: F16, Q8_0, Q4_0, Q4_1, or auto.")],
}


def parameter(name: str) -> inspect.Parameter:
    """What Typer reads of a function's signature for this field of the settings; `json` is the command line's own."""
    field = ConvertSettings.__dataclass_fields__.get(name)
    default: Any = inspect.Parameter.empty
    if name == "json":
        default = False
    elif field is not None and name not in ALWAYS_FIRST:
        default = list(field.default) if isinstance(field.default, tuple) else field.default
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_ANNOTATIONS[name]
    )
