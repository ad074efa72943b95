"""`quantkit convert ROUTE IN OUT`: one command for each route."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.settings import ConvertSettings

convert = typer.Typer(
    help="Convert a model from one format to another.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Source = Annotated[Path, typer.Argument(metavar="IN", help="The model to convert.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; appears only when it is complete.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output folder if it exists.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


@convert.command("gguf-to-hf")
def gguf_to_hf(source: Source, out: Out, overwrite: Overwrite = False, as_json: AsJson = False) -> None:
    """Dequantize a GGUF file into a Hugging Face folder: float16 weights, config and tokenizer."""
    _run(ConvertSettings(route="gguf-to-hf", source=source, out=out, overwrite=overwrite), as_json)


def _run(settings: ConvertSettings, as_json: bool) -> None:
    from quantkit import console
    from quantkit.commands.convert import run

    report = run(settings, console.Bars())
    if as_json:
        console.print_json(report.as_json())
    else:
        console.print_table(f"quantkit convert {settings.route}", ["", "found"], report.rows())
