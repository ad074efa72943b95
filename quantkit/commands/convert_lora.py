"""`quantkit convert merge-lora`: PEFT adapters folded into the weights they adapt.

    W' = W + Σ_i weight_i · s_i · B_i A_i        s = alpha / r, or alpha / √r with rsLoRA (arXiv 2312.03732)

Sums are made in float32 and rounded once to the dtype of the weight. What an adapter holds and this cannot merge is
refused by name: a tensor left out in silence would be another adapter.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.adapter import Adapter, open_adapter
from quantkit.checkpoint.reader import Checkpoint
from quantkit.commands.convert_folder import open_source, rewriting
from quantkit.commands.convert_report import ConvertReport
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
    adapters = [_named(text) for text in settings.adapters]
    for adapter, weight in adapters:
        _check(adapter, weight, source)
    merged, largest, replaced = 0, 0.0, 0
    with (
        rewriting(source, settings.out, overwrite=settings.overwrite) as new,
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
                raise FormatError(f"`{name}` leaves the range of its dtype when merged", hint="use a smaller weight")
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


def _named(text: str) -> tuple[Adapter, float]:
    """`DIR` or `DIR=0.5`; a folder whose own name has a `=` is taken as it is."""
    path, _, number = text.rpartition("=")
    if not path or Path(text).exists():
        return open_adapter(Path(text)), 1.0
    try:
        weight = float(number)
    except ValueError as error:
        raise UsageError(f"`{number}` in `{text}` is no weight", hint="use `--adapter DIR=0.5`") from error
    return open_adapter(Path(path)), weight


def _check(adapter: Adapter, weight: float, source: Checkpoint) -> None:
    for name in adapter.targets:
        if not source.has(name):
            raise CheckpointError(
                f"`{adapter.path}` adapts `{name}`, which is not in `{source.path}`",
                hint="merge it into the model that it was trained on",
            )
        expected, found = source.info(name).shape, adapter.shape(name)
        if tuple(found) != tuple(expected):
            raise CheckpointError(
                f"`{adapter.path}` adapts `{name}` as {list(found)}, it is {list(expected)} in `{source.path}`",
                hint="merge it into the model that it was trained on",
            )
    if adapter.replacements and weight != 1.0:
        raise UsageError(
            f"`{adapter.path}` replaces `{min(adapter.replacements)}` as a whole, which has no weight of {weight:g}",
            hint="leave out the weight of this adapter",
        )


def _merged(name: str, before: Tensor, adapters: Sequence[tuple[Adapter, float]]) -> Tensor:
    """The same tensor, as it is, where no adapter adds to it."""
    total: Tensor | None = None
    for adapter, weight in adapters:
        if name in adapter.deltas:
            own = weight * adapter.delta(name)
            total = own if total is None else total + own
    return before if total is None else (before.to(torch.float32) + total).to(before.dtype)


def _change(after: Tensor, before: Tensor) -> float:
    whole = float(before.to(torch.float32).norm())
    return float((after.to(torch.float32) - before.to(torch.float32)).norm()) / whole if whole else 0.0
