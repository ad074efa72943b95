"""`quantkit eval perplexity` and `quantkit eval compare`: text → windows → figures, with all that defines them.

A perplexity means nothing without its text, window length, BOS handling and arithmetic, so every report states them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.dataset import read_dataset
from quantkit.calibration.text import held_back_text, read_text
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.errors import CalibrationError, CheckpointError, RequestError, UsageError
from quantkit.evaluators.divergence import Divergence
from quantkit.evaluators.divergence import compare as measure_divergence
from quantkit.evaluators.perplexity import Perplexity, cut_windows, score
from quantkit.models.config import ModelConfig
from quantkit.models.transformer import Model
from quantkit.progress import Progress
from quantkit.runtime.load import load_model
from quantkit.runtime.placement import Placement
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import CompareSettings, PerplexitySettings, TextSettings

CONVENTION = "windows without overlap, each from position 0, the first token of a window is not scored"
SPLITS = {"wikitext2": "test", "c4": "validation"}
ENDLESS = {"c4"}
"""Data sets too large to be read whole; `ENDLESS_WINDOWS` are scored unless `--windows` says otherwise."""
ENDLESS_WINDOWS = 256
CHARACTERS_PER_TOKEN = 16
"""Of an endless data set this much text is read for each token: several times what any language needs."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What was scored, and how: the part of a report that makes its figures comparable.

    source       file, data set or bundled text
    text_tokens  tokens of the whole text; the windows cover the first part of them
    bos          whether a BOS token stood in front of every window
    """

    source: str
    text_tokens: int
    length: int
    bos: bool
    placement: Placement

    def rows(self, score: Perplexity) -> list[list[str]]:
        return [
            ["text", self.source],
            ["windows", f"{score.windows} of {self.length} tokens: {score.tokens} of the text's {self.text_tokens}"],
            ["scored", f"{score.predictions} predictions"],
            ["convention", CONVENTION],
            ["BOS", "yes, in front of every window" if self.bos else "no"],
            ["arithmetic", f"{self.placement.dtype_name} on {self.placement.device}, backend {self.placement.backend}"],
        ]

    def as_json(self, score: Perplexity) -> dict[str, Any]:
        return {
            "source": self.source,
            "text_tokens": self.text_tokens,
            "tokens": score.tokens,
            "predictions": score.predictions,
            "windows": score.windows,
            "length": self.length,
            "convention": CONVENTION,
            "bos": self.bos,
            "dtype": self.placement.dtype_name,
            "device": self.placement.device,
            "backend": self.placement.backend,
        }


def _json_number(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    """One model's perplexity. `notes` are for people: what may make the figure mean something else."""

    model: str
    score: Perplexity
    scored: Scored
    notes: tuple[str, ...] = ()

    def rows(self) -> list[list[str]]:
        """Name and figure, for the console."""
        return [
            ["perplexity", f"{self.score.perplexity:.4f}"],
            ["mean negative log-likelihood", f"{self.score.mean_nll:.5f} nats"],
            *self.scored.rows(self.score),
            *(["note", note] for note in self.notes),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "perplexity": _json_number(self.score.perplexity),
            "mean_nll": self.score.mean_nll,
            **self.scored.as_json(self.score),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class CompareReport:
    """A candidate against its reference."""

    reference: str
    candidate: str
    divergence: Divergence
    scored: Scored
    notes: tuple[str, ...] = ()

    def rows(self) -> list[list[str]]:
        """Name and figure, for the console."""
        found = self.divergence
        low, high = found.kl_ci95
        return [
            ["mean KL", f"{found.kl_mean:.6f} nats"],
            ["95 % interval", f"{low:.6f} to {high:.6f}, bootstrap over blocks of neighbouring tokens"],
            ["90th, 99th percentile", f"{found.kl_p90:.6f}, {found.kl_p99:.6f}"],
            ["same likeliest token", f"{found.top1_agreement:.2%}"],
            ["perplexity of the reference", f"{found.reference.perplexity:.4f}"],
            ["perplexity of the candidate", f"{found.candidate.perplexity:.4f}"],
            *self.scored.rows(found.reference),
            *(["note", note] for note in self.notes),
        ]

    def as_json(self) -> dict[str, Any]:
        found = self.divergence
        return {
            "reference": self.reference,
            "candidate": self.candidate,
            "kl_mean": found.kl_mean,
            "kl_ci95": list(found.kl_ci95),
            "kl_p90": found.kl_p90,
            "kl_p99": found.kl_p99,
            "top1_agreement": found.top1_agreement,
            "perplexity_reference": _json_number(found.reference.perplexity),
            "perplexity_candidate": _json_number(found.candidate.perplexity),
            "mean_nll_reference": found.reference.mean_nll,
            "mean_nll_candidate": found.candidate.mean_nll,
            **self.scored.as_json(found.reference),
            "notes": list(self.notes),
        }


def perplexity(settings: PerplexitySettings, progress: Progress) -> PerplexityReport:
    """Score one model.

    Raises UsageError for settings, CheckpointError for the model's files, CalibrationError for the text, RequestError
    for windows beyond the model's context, GateError when logits are no finite numbers.
    """
    placement = Placement.choose(settings.device, settings.dtype)
    checkpoint = open_checkpoint(settings.model)
    tokenizer = Tokenizer.open(checkpoint.path)
    source, text = _read(settings.text)
    ids = tokenizer.encode(text)
    windows = _cut(settings.text, ids, tokenizer, _context(checkpoint))
    model = load_model(checkpoint, placement.device, placement.dtype)
    result = score(model, windows, progress, first=_first(settings.text))
    notes = checkpoint.notes + _bos_notes(model, tokenizer, windows, result, settings.text.bos)
    return PerplexityReport(settings.model, result, _scored(settings.text, source, ids, placement), notes)


def compare(settings: CompareSettings, progress: Progress) -> CompareReport:
    """Judge a candidate by its reference, on the reference's tokens. Raises what `perplexity` raises, and
    CheckpointError for two models that split the text into different tokens."""
    placement = Placement.choose(settings.device, settings.dtype)
    checkpoints = open_checkpoint(settings.reference), open_checkpoint(settings.candidate)
    tokenizer = Tokenizer.open(checkpoints[0].path)
    source, text = _read(settings.text)
    ids = tokenizer.encode(text)
    windows = _cut(settings.text, ids, tokenizer, min(map(_context, checkpoints)))
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


def _first(settings: TextSettings) -> int:
    """The first predicted position of a window: the same token with and without a BOS in front."""
    return 2 if settings.bos else 1


def _context(checkpoint: Checkpoint) -> int:
    return ModelConfig.read(checkpoint.config, str(checkpoint.path / "config.json")).context


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
