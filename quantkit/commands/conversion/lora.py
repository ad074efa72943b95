"""`quantkit convert merge-lora`: PEFT adapters folded into the weights they adapt, by the sum of `checkpoint.merged`.

Sums are made in float32 and rounded once to the dtype of the weight.
"""

import time

import torch
from torch import Tensor

from quantkit.checkpoint.adapter import Adapter, open_weighted
from quantkit.checkpoint.merged import Weighted, added, require_fit, require_no_tied_embedding
from quantkit.checkpoint.reader import Checkpoint
from quantkit.commands.conversion.folder import open_source, rewriting
from quantkit.commands.conversion.report import ConvertReport
from quantkit.errors import CheckpointError, FormatError, UsageError
from quantkit.progress import Progress
from quantkit.settings import ConvertSettings


def merge_lora(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """Raises UsageError without an adapter, CheckpointError for one that does not fit the model or cannot be merged,
    FormatError for a quantized model. Then nothing is left behind; in memory is one weight."""
    start = time.monotonic()
    if not settings.adapters:
        raise UsageError("no adapter was named", hint="use `--adapter DIR`, or `--adapter A=0.7 --adapter B`")
    source = open_source(settings.source)
    if source.quantization is not None:
        raise FormatError(
            f"`{source.path}` is quantized: adapters are merged into dense weights",
            hint="`quantkit convert gptq-to-hf` first, and quantize the result anew",
        )
    adapters = [open_weighted(text, "=", "--adapter") for text in settings.adapters]
    for adapter, weight in adapters:
        shapes = {name: source.info(name).shape for name in adapter.targets if source.has(name)}
        require_fit(adapter, weight, shapes, source.path)
        _require_places(adapter, source)
    merged, largest, replaced = 0, 0.0, 0
    with (
        rewriting(source, settings.out, progress, overwrite=settings.overwrite) as new,
        progress.task(settings.route, total=len(source.names())) as task,
    ):
        for name in source.names():
            before = source.tensor(name)
            after = _merged(name, before, adapters)
            if after is not before:
                merged += 1
                largest = max(largest, _change(after, before))
            for adapter, _ in adapters:
                if name in adapter.replacements:
                    after = adapter.replacement(name).to(before.dtype)
                    replaced += 1
            if not bool(torch.isfinite(after).all()):
                where = f"`{name}` in `{source.info(name).file}`"
                raise FormatError(f"{where} leaves the range of its dtype when merged", hint="use a smaller weight")
            new.add(name, after)
            task.advance(note=name)
        written = new.finish(source.config)
    return ConvertReport(
        settings,
        way="rounded once where an adapter adds to them, else as they were",
        written=written,
        seconds=time.monotonic() - start,
        facts={
            "adapters": ", ".join(f"{adapter.path} × {weight:g}" for adapter, weight in adapters),
            "merged_weights": merged,
            "replaced_tensors": replaced,
            "largest_relative_change": largest,
        },
        remarks=tuple(note for adapter, _ in adapters for note in adapter.notes),
    )


def _require_places(adapter: Adapter, source: Checkpoint) -> None:
    """What the files have no tensor of its own for would be left out in silence, or change more than it should."""
    for name in sorted(set(adapter.targets) - set(source.names())):
        raise CheckpointError(
            f"`{adapter.path}` adapts `{name}`, which goes by another name in the files of `{source.path}`",
            hint="apply it while the model runs: `quantkit generate MODEL --lora ADAPTER`",
        )
    require_no_tied_embedding(adapter, bool(source.config.get("tie_word_embeddings")), source.path)


def _merged(name: str, before: Tensor, adapters: Weighted) -> Tensor:
    """The same tensor, as it is, where no adapter adds to it."""
    total = added(name, adapters)
    return before if total is None else (before.to(torch.float32) + total).to(before.dtype)


def _change(after: Tensor, before: Tensor) -> float:
    whole = float(before.to(torch.float32).norm())
    return float((after.to(torch.float32) - before.to(torch.float32)).norm()) / whole if whole else 0.0
