"""`quantkit eval perplexity` and `quantkit eval compare`: text → windows → figures, with all that defines them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast, overload

import torch

from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.commands.evaluation.compare_report import (
    COMPARE_FIGURES,
    CompareReport,
    SavedCheck,
    SavedReport,
    worst_in_words,
)
from quantkit.commands.evaluation.gate import Gate
from quantkit.commands.evaluation.report import PerplexityReport, PerplexityTable, Scored
from quantkit.commands.evaluation.result_file import require_absent
from quantkit.commands.evaluation.text import ReadText, bos_notes, require_known, tokenizer_notes
from quantkit.errors import CheckpointError, RequestError, UsageError
from quantkit.evaluators.cached import CachedModel
from quantkit.evaluators.divergence import compare as measure_divergence
from quantkit.evaluators.perplexity import score
from quantkit.evaluators.saved_reference import (
    SavedReference,
    compare_and_record,
    compare_saved,
    require_vocabulary,
)
from quantkit.evaluators.saved_reference import record as record_reference
from quantkit.models.transformer import Model
from quantkit.progress import Progress, Tqdm
from quantkit.runtime.cache_format import cache_format
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.load import load_model
from quantkit.runtime.placement import Placement
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import CompareSettings, PerplexitySettings, TextSettings
from quantkit.version import VERSION

Loader = Callable[[Checkpoint, str, torch.dtype], Model]
"""Checkpoint, device and dtype → its model."""
ABOUT = ("model", "text", "text_tokens", "bos", "dtype", "tokenizer", "version")
"""What a saved reference has to say of itself."""


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
    compared = compare(CompareSettings(str(reference), str(model), scored, device, dtype), progress)
    return cast(CompareReport, compared)  # there is a candidate


def perplexity(settings: PerplexitySettings, progress: Progress) -> PerplexityReport:
    """Score one model.

    Raises UsageError for settings, CheckpointError for the model's files, CalibrationError for the text, RequestError
    for windows beyond the model's context, GateError when logits are no finite numbers.
    """
    placement = Placement.choose(settings.device, settings.dtype)
    checkpoint = open_checkpoint(settings.model)
    tokenizer = Tokenizer.open(checkpoint.path)
    text = ReadText.read(settings.text, tokenizer, checkpoint.model_config.context, settings.stride)
    require_known(text.windows, checkpoint)
    model = load_model(checkpoint, placement.device, placement.dtype)
    later = None if settings.stride is None else text.windows.shape[1] - settings.stride
    later = None if later is None else max(later, text.first)
    result = score(model, text.windows, progress, first=text.first, later=later)
    notes = checkpoint.notes + bos_notes(model, tokenizer, text.windows, result, settings.text.bos)
    return PerplexityReport(settings.model, result, text.scored(settings.text, placement, settings.stride), notes)


def perplexities(models: Sequence[str], settings: PerplexitySettings, progress: Progress) -> PerplexityTable:
    """Score several models one after the other, each as `perplexity` does; `settings.model` is not read."""
    return PerplexityTable(tuple(perplexity(replace(settings, model=model), progress) for model in models))


def compare(
    settings: CompareSettings, progress: Progress, load: Loader = load_model
) -> CompareReport | SavedReport:
    """Judge a candidate by its reference, on the reference's tokens. Raises what `perplexity` raises, and
    CheckpointError for two models that split the text into different tokens.

    Without a candidate the reference's predictions are saved and nothing is judged; a reference that is a file is one
    that was saved so. `load` gives the models of two checkpoints, once all else is checked.
    """
    gate = Gate.parse(settings.gate, COMPARE_FIGURES)
    if settings.save_reference is not None and not _is_saved(settings.save_reference):
        require_absent(settings.save_reference, "--save-reference")
    placement = Placement.choose(settings.device, settings.dtype)
    cache = _cache(settings)
    if cache is not None:  # refused before any weights are read
        judged = open_checkpoint(settings.candidate or settings.reference).model_config
        cache_format(cache.kv, judged.head_dim, placement.dtype)
    if settings.candidate is None and cache is not None:  # what the cache alone does to the reference
        settings = replace(settings, candidate=settings.reference)
    if settings.candidate is None:
        return _save(settings, placement, progress)
    if Path(settings.reference).is_file():
        return _compare_saved(settings, settings.candidate, placement, gate, progress, load)
    checkpoints = open_checkpoint(settings.reference), open_checkpoint(settings.candidate)
    context = min(checkpoint.model_config.context for checkpoint in checkpoints)
    tokenizer = Tokenizer.open(checkpoints[0].path)
    text = ReadText.read(settings.text, tokenizer, context)
    for checkpoint in checkpoints:
        require_known(text.windows, checkpoint)
    notes = checkpoints[0].notes + checkpoints[1].notes
    notes += tokenizer_notes(checkpoints[1], tokenizer, text.text, text.ids)
    reference, candidate = (load(checkpoint, placement.device, placement.dtype) for checkpoint in checkpoints)
    candidate, name = _through(candidate, cache, settings.candidate)
    saved = None
    if settings.save_reference is None:
        found = measure_divergence(reference, candidate, text.windows, progress, first=text.first)
    else:
        about = _about(settings, checkpoints[0], text, placement)
        found, record, estimate = compare_and_record(
            reference, candidate, text.windows, about, progress, first=text.first
        )
        record.save(settings.save_reference)
        saved = SavedCheck(str(settings.save_reference), record.share, estimate.kl_mean, estimate.kl_error)
    scored = text.scored(settings.text, placement)
    return CompareReport(
        settings.reference,
        name,
        found,
        scored,
        worst_in_words(found.worst, tokenizer),
        (*notes, *found.notes),
        gate,
        saved,
    )


def _is_saved(path: Path) -> bool:
    """Whether it is a saved reference, which another may replace."""
    try:
        SavedReference.load(path)
    except CheckpointError:
        return False
    return True


def _cache(settings: CompareSettings) -> CachePlan | None:
    """The cache that the candidate is read through; None for none."""
    if settings.kv is None and not settings.kv_resident:
        return None
    return CachePlan(settings.kv, resident=settings.kv_resident)


def _through(candidate: Model, cache: CachePlan | None, name: str) -> tuple[Model, str]:
    """The candidate behind the cache that was asked for, and its name with that."""
    if cache is None:
        return candidate, name
    return CachedModel.of(candidate, cache), f"{name}, cache {cache.label(candidate)}"


def _save(settings: CompareSettings, placement: Placement, progress: Progress) -> SavedReport:
    if settings.save_reference is None:
        raise UsageError(
            "a reference alone, neither a candidate to judge nor a file to save it to",
            hint="name a CANDIDATE, or `--save-reference FILE`",
        )
    if settings.gate:
        raise UsageError("`--gate` has nothing to judge without a candidate", hint="leave it out, or name a CANDIDATE")
    checkpoint = open_checkpoint(settings.reference)
    tokenizer = Tokenizer.open(checkpoint.path)
    text = ReadText.read(settings.text, tokenizer, checkpoint.model_config.context)
    require_known(text.windows, checkpoint)
    model = load_model(checkpoint, placement.device, placement.dtype)
    about = _about(settings, checkpoint, text, placement)
    saved = record_reference(model, text.windows, about, progress, first=text.first)
    saved.save(settings.save_reference)
    scored = text.scored(settings.text, placement)
    path = settings.save_reference
    return SavedReport(
        settings.reference, path, saved.share, path.stat().st_size, saved.predictions, saved.self_kl, scored
    )


def _compare_saved(
    settings: CompareSettings, name: str, placement: Placement, gate: Gate, progress: Progress, load: Loader
) -> CompareReport:
    """A candidate against what was saved of its reference, over the tokens that stand in the file."""
    if settings.text != TextSettings():
        raise UsageError(
            f"`{settings.reference}` is a saved reference, which has its own text and windows",
            hint="leave out `--text`, `--dataset`, `--length`, `--windows` and `--bos`",
        )
    if settings.save_reference is not None:
        raise UsageError(f"`{settings.reference}` is saved already", hint="leave out `--save-reference`")
    saved = SavedReference.load(Path(settings.reference))
    checkpoint = open_checkpoint(name)
    config = checkpoint.model_config
    require_vocabulary(saved, config.vocab_size)
    if saved.windows.shape[1] > config.context:
        raise RequestError(
            f"the saved reference has windows of {saved.windows.shape[1]} tokens, which do not fit into the "
            f"candidate's context of {config.context}",
            hint=f"save it again with `--length {config.context}` or less",
        )
    about = _require_told(saved, settings.reference)
    notes = [*checkpoint.notes, f"the reference was saved by quantkit {about['version']}, in {about['dtype']}"]
    if about["tokenizer"] != digest_of_tokenizer(checkpoint):
        notes.append("its `tokenizer.json` is not that of the reference: the reference's tokens are used")
    candidate = load(checkpoint, placement.device, placement.dtype)
    candidate, name = _through(candidate, _cache(settings), name)
    found = compare_saved(saved, candidate, progress)
    bos = about["bos"] == "yes"
    scored = Scored(about["text"], int(about["text_tokens"]), saved.windows.shape[1] - bos, bos, placement)
    words = worst_in_words(found.worst, Tokenizer.open(checkpoint.path))
    return CompareReport(about["model"], name, found, scored, words, (*notes, *found.notes), gate)


def _require_told(saved: SavedReference, path: str) -> Mapping[str, str]:
    """What a saved reference says of itself, as `_about` wrote it. Raises CheckpointError where something lacks."""
    lacking = [f"`{name}`" for name in ABOUT if name not in saved.about]
    if lacking or not saved.about["text_tokens"].isdecimal():
        what = f"it does not say {', '.join(lacking)}" if lacking else "`text_tokens` is no number"
        raise CheckpointError(
            f"`{path}` is a damaged saved reference: {what}",
            hint="make it again with `quantkit eval compare MODEL --save-reference FILE`",
        )
    return saved.about


def _about(settings: CompareSettings, checkpoint: Checkpoint, text: ReadText, placement: Placement) -> dict[str, str]:
    return {
        "model": settings.reference,
        "text": text.source,
        "text_tokens": str(len(text.ids)),
        "bos": "yes" if settings.text.bos else "no",
        "dtype": placement.dtype_name,
        "tokenizer": digest_of_tokenizer(checkpoint),
        "version": VERSION,
    }


def digest_of_tokenizer(checkpoint: Checkpoint) -> str:
    """SHA-256 of `tokenizer.json`, or nothing where there is none."""
    file = checkpoint.path / "tokenizer.json"
    return sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
