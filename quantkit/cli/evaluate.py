"""`quantkit eval perplexity` and `quantkit eval compare`: options → settings → `commands.evaluate` → table or JSON."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import RunDevice, RunDtype, summary
from quantkit.errors import UsageError
from quantkit.settings import (
    CompareSettings,
    DegenerationSettings,
    PerplexitySettings,
    ReportSettings,
    TasksSettings,
    TextSettings,
)

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
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


Gate = Annotated[
    str | None,
    typer.Option("--gate", help='Conditions, as "kl_mean<0.05,ppl_ratio<1.02"; exits 3 where one does not hold.'),
]


def perplexity(
    models: Annotated[list[str], typer.Argument(help="Folders of models, or hub ids; several make one table.")],
    dataset: Dataset = None,
    text: Text = None,
    length: Length = 2048,
    windows: Windows = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", help="Tokens from one window to the next: below --length they overlap.", min=1),
    ] = None,
    bos: Bos = False,
    device: RunDevice = "auto",
    dtype: RunDtype = "auto",
    as_json: Json = False,
) -> None:
    """Perplexity of models over windows of a text, with its standard error; without --text or --dataset of a bundled
    text."""
    settings = PerplexitySettings(models[0], TextSettings(dataset, text, length, windows, bos), device, dtype, stride)
    from quantkit import console
    from quantkit.commands.evaluate import perplexities
    from quantkit.commands.evaluate import perplexity as run

    if len(models) > 1:
        table = perplexities(models, settings, console.Bars())
        if as_json:
            console.print_json(table.as_json())
            return
        console.print_table("Perplexity", list(table.COLUMNS), table.rows())
        console.print_table("of", ["", ""], table.facts(), text_columns=2)
        return
    report = run(settings, console.Bars())
    if as_json:
        console.print_json(report.as_json())
    else:
        console.print_table(f"Perplexity of {models[0]}", ["", ""], report.rows(), text_columns=2)


def compare(
    reference: Annotated[
        str, typer.Argument(help="Folder of the model that is right, a hub id, or a file of --save-reference.")
    ],
    candidate: Annotated[
        str | None, typer.Argument(help="Folder of the model to judge, or a hub id; not needed to save a reference.")
    ] = None,
    dataset: Dataset = None,
    text: Text = None,
    length: Length = 2048,
    windows: Windows = None,
    bos: Bos = False,
    save_reference: Annotated[
        Path | None,
        typer.Option("--save-reference", help="Keep what REFERENCE predicts in a file that can stand for it."),
    ] = None,
    gate: Gate = None,
    kv: Annotated[
        str | None,
        typer.Option("--kv", help="Read CANDIDATE through caches of these formats, as int8,q4_0; or REFERENCE alone."),
    ] = None,
    kv_resident: Annotated[
        int, typer.Option("--kv-resident", help="Positions that stay on the device, the rest is streamed.", min=0)
    ] = 0,
    device: RunDevice = "auto",
    dtype: RunDtype = "auto",
    as_json: Json = False,
) -> int:
    """KL divergence of CANDIDATE from REFERENCE over a text, how often both choose the same, both perplexities, and the
    tokens where they differ most."""
    texts = TextSettings(dataset, text, length, windows, bos)
    formats = tuple(part.strip() for part in kv.split(",")) if kv else (None,)
    if len(formats) > 1 and save_reference is not None:
        raise UsageError("`--save-reference` goes with one cache format at a time", hint=f"--kv {formats[0]}")
    from quantkit import console
    from quantkit.commands.compare_caches import compare_caches
    from quantkit.commands.evaluate import compare as run

    choice = (device, dtype, save_reference, gate, formats[0], kv_resident)
    settings = CompareSettings(reference, candidate, texts, *choice)
    if len(formats) > 1:
        table = compare_caches(settings, formats, console.Bars())
        if as_json:
            console.print_json(table.as_json())
        else:
            console.print_table(table.title, list(table.COLUMNS), table.rows())
            console.print_table("of", ["", ""], table.facts(), text_columns=2)
        return table.exit_code
    found = run(settings, console.Bars())
    if as_json:
        console.print_json(found.as_json())
    else:
        console.print_table(found.title, ["", ""], found.rows(), text_columns=2)
    return found.exit_code


def degeneration(
    model: Annotated[str, typer.Argument(help="Folder of a model, or a hub id.")],
    reference: Annotated[
        str | None, typer.Option("--reference", help="The model it was made from: what it does worse is what counts.")
    ] = None,
    kv: Annotated[
        str | None, typer.Option("--kv", help="Cache formats to go through, as int8,q4_0,k8v4; else that of --dtype.")
    ] = None,
    kv_resident: Annotated[
        int,
        typer.Option("--kv-resident", help="Positions that stay on the device, the rest is streamed; 0 is all.", min=0),
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A third of the prompts.")] = False,
    tokens: Annotated[int, typer.Option("--tokens", help="What the model says in one conversation.", min=16)] = 400,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampled conversations.", min=0, max=2**62)] = 0,
    device: RunDevice = "auto",
    dtype: RunDtype = "auto",
    as_json: Json = False,
) -> int:
    """Let MODEL talk at length and look for loops, stutter, collapsed entropy and wrong ends. Exits 0 when it is
    healthy, 3 when it is degenerate."""
    formats = tuple(part.strip() for part in kv.split(",")) if kv else ()
    settings = DegenerationSettings(model, reference, formats, kv_resident, quick, tokens, seed, device, dtype)
    from quantkit import console
    from quantkit.commands.evaluation.degeneration import run

    report = run(settings, console.Bars())
    if as_json:
        console.print_json(report.as_json())
        return report.exit_code
    console.print_table(f"{model}: {report.verdict}", list(report.COLUMNS), report.rows(), text_columns=2)
    console.print_table("why", ["", ""], report.facts(), text_columns=2)
    return report.exit_code


def tasks(
    model: Annotated[str, typer.Argument(help="Folder of a model, or a hub id.")],
    task: Annotated[list[str], typer.Argument(help="Files of items, .jsonl, or data sets of the hub, as id:config.")],
    limit: Annotated[
        int | None, typer.Option("--limit", help="Ask only this many items, the first ones.", min=1)
    ] = None,
    shots: Annotated[int, typer.Option("--shots", help="Items shown with their answers in front of each.", min=0)] = 0,
    field: Annotated[
        list[str] | None, typer.Option("--field", help="Rename a field of the items, as query=prompt; may be repeated.")
    ] = None,
    source: Annotated[str | None, typer.Option("--source", help="Field to translate from.")] = None,
    target: Annotated[str | None, typer.Option("--target", help="Field to translate to; scored by sacrebleu.")] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", help="Of written answers, beside exact match and F1: an installed quantkit.metrics."),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Of a data set of the hub.")] = "test",
    save_items: Annotated[
        Path | None, typer.Option("--save-items", help="Write what every item got to a .jsonl file.")
    ] = None,
    device: RunDevice = "auto",
    dtype: RunDtype = "auto",
    as_json: Json = False,
) -> None:
    """Ask MODEL the questions of files: choices by likelihood, last words, written answers, translations. The fields of
    the items tell which."""
    settings = TasksSettings(
        model,
        tuple(task),
        limit,
        shots,
        tuple(field or ()),
        source,
        target,
        tuple(metric or ()),
        split,
        save_items,
        device,
        dtype,
    )
    from quantkit import console
    from quantkit.commands.evaluation.tasks import run

    report = run(settings, console.Bars())
    if as_json:
        console.print_json(report.as_json())
        return
    console.print_table(model, list(report.COLUMNS), report.rows(), text_columns=3)
    console.print_table("of", ["", ""], report.facts(), text_columns=2)


def report(
    reference: Annotated[str, typer.Argument(help="Folder of the model that is right, or a hub id.")],
    candidates: Annotated[list[str], typer.Argument(help="Folders of its quantizations, or hub ids.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for index.html, report.json and model cards.")],
    dataset: Dataset = None,
    text: Text = None,
    length: Length = 2048,
    windows: Windows = None,
    bos: Bos = False,
    measurement: Annotated[
        Path | None, typer.Option("--measurement", help="Of `quantkit measure REFERENCE`: shows what would hurt.")
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Run the quick degeneration probe of each candidate.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder.")] = False,
    device: RunDevice = "auto",
    dtype: RunDtype = "auto",
    as_json: Json = False,
) -> None:
    """Measure quantizations of REFERENCE alike, and write a page to look at, a JSON file and a model card for each."""
    texts = TextSettings(dataset, text, length, windows, bos)
    settings = ReportSettings(reference, tuple(candidates), out, texts, measurement, probe, overwrite, device, dtype)
    from quantkit import console
    from quantkit.commands.report import run

    found = run(settings, console.Bars())
    if as_json:
        console.print_json(found.as_json())
        return
    console.print_table(f"Quantizations of {reference}", list(found.COLUMNS), found.rows())
    console.say(f"written to `{found.out}`: open `{found.out / 'index.html'}`")


for _command in (perplexity, compare, degeneration, tasks, report):
    evaluate.command(short_help=summary(_command))(_command)
