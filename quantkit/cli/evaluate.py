"""`quantkit eval perplexity` and `quantkit eval compare`: options → settings → `commands.evaluate` → table or JSON."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.settings import CompareSettings, PerplexitySettings, TextSettings

evaluate = typer.Typer(
    help="Measure a model, or one model against another.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Dataset = Annotated[
    str | None,
    typer.Option("--dataset", help="wikitext2, c4 or another named data set; needs a network or a local cache."),
]
Text = Annotated[
    Path | None,
    typer.Option(
        "--text", help="A .parquet (column text) or .jsonl (key text), rows joined by a blank line, or a text file."
    ),
]
Length = Annotated[int, typer.Option("--length", help="Tokens in a window.", min=2)]
Windows = Annotated[int | None, typer.Option("--windows", help="Score only this many windows, the first ones.", min=1)]
Bos = Annotated[
    bool,
    typer.Option(
        "--bos",
        help="Put the model's BOS token in front of every window: Gemma needs it, other tools' figures lack it.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Arithmetic: auto (fp32 on a CPU), fp32, bf16 or fp16.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


@evaluate.command()
def perplexity(
    model: Annotated[str, typer.Argument(help="Folder of a model, or a hub id.")],
    dataset: Dataset = None,
    text: Text = None,
    length: Length = 2048,
    windows: Windows = None,
    bos: Bos = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Perplexity of MODEL over windows of a text that do not overlap; without --text or --dataset of a bundled text."""
    settings = PerplexitySettings(model, TextSettings(dataset, text, length, windows, bos), device, dtype)
    from quantkit import console
    from quantkit.commands.evaluate import perplexity as run

    report = run(settings, console.Bars())
    if as_json:
        console.print_json(report.as_json())
    else:
        console.print_table(f"Perplexity of {model}", ["", ""], report.rows())


@evaluate.command()
def compare(
    reference: Annotated[str, typer.Argument(help="Folder of the model that is right, or a hub id.")],
    candidate: Annotated[str, typer.Argument(help="Folder of the model to judge, or a hub id.")],
    dataset: Dataset = None,
    text: Text = None,
    length: Length = 2048,
    windows: Windows = None,
    bos: Bos = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """KL divergence of CANDIDATE from REFERENCE over a text, how often both choose the same, both perplexities."""
    settings = CompareSettings(reference, candidate, TextSettings(dataset, text, length, windows, bos), device, dtype)
    from quantkit import console
    from quantkit.commands.evaluate import compare as run

    report = run(settings, console.Bars())
    if as_json:
        console.print_json(report.as_json())
    else:
        console.print_table(f"{candidate} against {reference}", ["", ""], report.rows())
