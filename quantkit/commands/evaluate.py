"""`quantkit eval perplexity` and `quantkit eval compare`: text → windows → figures, with all that defines them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from quantkit.calibration.dataset import read_dataset
from quantkit.calibration.text import held_back_text, read_text
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.commands.evaluate_report import CompareReport, PerplexityReport, Scored
from quantkit.errors import CalibrationError, CheckpointError, RequestError, UsageError
from quantkit.evaluators.divergence import compare as measure_divergence
from quantkit.evaluators.perplexity import Perplexity, cut_windows, score
from quantkit.models.transformer import Model
from quantkit.progress import Progress, Tqdm
from quantkit.runtime.load import load_model
from quantkit.runtime.placement import Placement
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import CompareSettings, PerplexitySettings, TextSettings

SPLITS = {"wikitext2": "test", "c4": "validation"}
ENDLESS = {"c4"}
"""Data sets too large to be read whole; `ENDLESS_WINDOWS` are scored unless `--windows` says otherwise."""
ENDLESS_WINDOWS = 256
CHARACTERS_PER_TOKEN = 16
"""Of an endless data set this much text is read for each token: several times what any language needs."""


@overload
def evaluate(
    model: str | Path,
    reference: None = None,
    *,
    text: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress | None = None,
    **options: Any,
) -> PerplexityReport: ...
@overload
def evaluate(
    model: str | Path,
    reference: str | Path,
    *,
    text: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress | None = None,
    **options: Any,
) -> CompareReport: ...
def evaluate(
    model: str | Path,
    reference: str | Path | None = None,
    *,
    text: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress | None = None,
    **options: Any,
) -> PerplexityReport | CompareReport:
    """The perplexity of `model`; with a `reference` how far `model` is from that. Other options are the fields of
    `quantkit.settings.TextSettings`; see `perplexity` and `compare`.

        quantkit.evaluate("models/llama-gptq", text="notes.txt", length=512).score.perplexity
        quantkit.evaluate("models/llama-gptq", "models/llama").divergence.kl_mean
    """
    scored = TextSettings(text=None if text is None else Path(text), **options)
    progress = progress or Tqdm()
    if reference is None:
        return perplexity(PerplexitySettings(str(model), scored, device, dtype), progress)
    return compare(CompareSettings(str(reference), str(model), scored, device, dtype), progress)


def perplexity(settings: PerplexitySettings, progress: Progress) -> PerplexityReport:
    """Score one model.

    Raises UsageError for settings, CheckpointError for the model's files, CalibrationError for the text, RequestError
    for windows beyond the model's context, GateError when logits are no finite numbers.
    """
    placement = Placement.choose(settings.device, settings.dtype)
    checkpoint = open_checkpoint(settings.model)
    context = checkpoint.model_config.context
    tokenizer = Tokenizer.open(checkpoint.path)
    source, text = _read(settings.text)
    ids = tokenizer.encode(text)
    windows = _cut(settings.text, ids, tokenizer, context)
    _require_known(windows, checkpoint)
    model = load_model(checkpoint, placement.device, placement.dtype)
    result = score(model, windows, progress, first=_first(settings.text))
    notes = checkpoint.notes + _bos_notes(model, tokenizer, windows, result, settings.text.bos)
    return PerplexityReport(settings.model, result, _scored(settings.text, source, ids, placement), notes)


def compare(settings: CompareSettings, progress: Progress) -> CompareReport:
    """Judge a candidate by its reference, on the reference's tokens. Raises what `perplexity` raises, and
    CheckpointError for two models that split the text into different tokens."""
    placement = Placement.choose(settings.device, settings.dtype)
    checkpoints = open_checkpoint(settings.reference), open_checkpoint(settings.candidate)
    context = min(checkpoint.model_config.context for checkpoint in checkpoints)
    tokenizer = Tokenizer.open(checkpoints[0].path)
    source, text = _read(settings.text)
    ids = tokenizer.encode(text)
    windows = _cut(settings.text, ids, tokenizer, context)
    for checkpoint in checkpoints:
        _require_known(windows, checkpoint)
    notes = checkpoints[0].notes + checkpoints[1].notes + _tokenizer_notes(checkpoints[1], tokenizer, text, ids)
    reference, candidate = (load_model(checkpoint, placement.device, placement.dtype) for checkpoint in checkpoints)
    found = measure_divergence(reference, candidate, windows, progress, first=_first(settings.text))
    scored = _scored(settings.text, source, ids, placement)
    return CompareReport(settings.reference, settings.candidate, found, scored, (*notes, *found.notes))


def _read(settings: TextSettings) -> tuple[str, str]:
    """Where the text comes from, in words, and the text."""
    if settings.text is not None and settings.dataset is not None:
        raise UsageError("`--text` and `--dataset` given, expected one of them", hint="leave out `--dataset`")
    if settings.text is not None:
        return str(settings.text), read_text(settings.text)
    if settings.dataset is None:
        return "bundled held-back text (neither `--text` nor `--dataset` given)", held_back_text()
    name, split = settings.dataset, SPLITS.get(settings.dataset, "test")
    limit, extent = None, "whole"
    if name in ENDLESS:
        limit = (settings.windows or ENDLESS_WINDOWS) * settings.length * CHARACTERS_PER_TOKEN
        extent = f"first {limit} characters"
    try:
        documents = read_dataset(name, split, limit)
    except CalibrationError as error:
        raise CalibrationError(
            error.message, hint="use a local file: `--text FILE` (.parquet, .jsonl or text)"
        ) from error
    return f"data set {name}, split {split}, {extent}", "\n\n".join(documents)


def _cut(settings: TextSettings, ids: Sequence[int], tokenizer: Tokenizer, context: int) -> Tensor:
    if settings.bos and tokenizer.bos_id is None:
        raise RequestError(f"`{tokenizer.folder}` names no BOS token", hint="leave out `--bos`")
    count = settings.windows or (ENDLESS_WINDOWS if settings.dataset in ENDLESS else None)
    if not settings.bos:
        return cut_windows(ids, settings.length, count, context)
    if list(ids[:1]) == [tokenizer.bos_id]:  # spelled out in the text: it still gets one only
        ids = ids[1:]
    return cut_windows(ids, settings.length, count, context, tokenizer.bos_id)


def _require_known(windows: Tensor, checkpoint: Checkpoint) -> None:
    """RequestError for ids that the model does not know, before its weights are read."""
    highest, known = int(windows.max()), checkpoint.model_config.vocab_size
    if highest >= known:
        raise RequestError(
            f"the text has token id {highest}, `{checkpoint.path}` knows {known} ids: "
            "tokenizer and model do not belong together",
            hint="copy the tokenizer files of the original model into the folder",
        )


def _first(settings: TextSettings) -> int:
    """The first predicted position of a window: the same token with and without a BOS in front."""
    return 2 if settings.bos else 1


def _scored(settings: TextSettings, source: str, ids: Sequence[int], placement: Placement) -> Scored:
    return Scored(source, len(ids), settings.length, settings.bos, placement)


def _bos_notes(model: Model, tokenizer: Tokenizer, windows: Tensor, plain: Perplexity, bos: bool) -> tuple[str, ...]:
    """A warning for models that expect a BOS: Gemma's perplexity without one is off by orders of magnitude."""
    if bos or not tokenizer.adds_bos or tokenizer.bos_id is None:
        return ()
    front = torch.tensor([[tokenizer.bos_id]])
    window = torch.cat([front, windows[:1]], dim=1)[:, : model.config.context]
    with_bos = score(model, window, first=2)
    return (
        f"this tokenizer puts `{tokenizer.token(tokenizer.bos_id)}` in front of texts, these windows have none: with "
        f"`--bos` the first one scores {with_bos.mean_nll:.4f} nats instead of {plain.window_nll[0]:.4f}",
    )


def _tokenizer_notes(candidate: Checkpoint, reference: Tokenizer, text: str, ids: Sequence[int]) -> tuple[str, ...]:
    """Checks that the candidate reads text as the reference does; a note says where it has no tokenizer to check."""
    if not (candidate.path / "tokenizer.json").exists():
        return (f"`{candidate.path}` has no `tokenizer.json`: the reference's tokens are used",)
    if Tokenizer.open(candidate.path).encode(text) != ids:
        raise CheckpointError(
            f"`{candidate.path}` and `{reference.folder}` split the text into different tokens, so that their "
            "predictions cannot be compared",
            hint="compare a model with quantizations of itself",
        )
    return ()
