"""`quantkit recommend`: options → settings → `commands.recommend.run` → tables or JSON."""

import re
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import Json, memory_bytes
from quantkit.errors import UsageError
from quantkit.settings import RecommendSettings


def recommend(
    model: Annotated[Path, typer.Argument(help="Folder of a model, of which config.json is enough, or that file.")],
    vram: Annotated[str | None, typer.Option("--vram", help="Memory of the card, as 24GB: 24 × 2^30 bytes.")] = None,
    ram: Annotated[
        str | None,
        typer.Option("--ram", help="Memory of the machine: for older parts of the cache; without --vram, for all."),
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", help="Positions of a sequence, as 32k; default: 32k, or the model's.")
    ] = None,
    kv: Annotated[
        str | None, typer.Option("--kv", help="Format of the cache: fp16, int8, k8v4 or q4_0; default: the best.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Sequences at once, each with a cache of its own.")] = 1,
    measurement: Annotated[
        Path | None, typer.Option("--measurement", help="What `quantkit measure` wrote: names the expected KL.")
    ] = None,
    json: Json = False,
) -> int:
    """Say which rate and which cache fit a memory, with the margin, over rates and contexts. Exits 3 when nothing
    fits."""
    settings = RecommendSettings(
        model, memory_bytes("--vram", vram), memory_bytes("--ram", ram), _tokens(context), kv, batch, measurement
    )
    from quantkit import console
    from quantkit.commands.recommend import run

    report = run(settings, console.Bars())
    if json:
        console.print_json(report.as_json())
        return 0 if report.chosen else 3
    console.print_table(f"over contexts, cache {report.kv.name}", report.grid_columns(), report.grid_rows())
    columns = ["cache", "KiB/token", "GiB", "best rate", "margin"]
    console.print_table(f"at {report.context:,} positions", columns, report.cache_rows())
    if any(fit.streamed for fits in (*report.grid, report.caches) for fit in fits):
        console.print_text("* with the older part of the cache in host memory")
    console.print_table(str(model), ["", ""], report.rows(), text_columns=2)
    return 0 if report.chosen else 3


def _tokens(text: str | None) -> int | None:
    """`32k` is 32 × 1024. Raises UsageError for anything else than that or a number."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)\s*(k?)", text.strip().lower())
    if not found:
        raise UsageError(f"`{text}` is no number of positions", hint="use `--context 32k` or `--context 32768`")
    return int(found[1]) * (1024 if found[2] else 1)
