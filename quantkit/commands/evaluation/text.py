"""The text of `quantkit eval`: read, cut into windows, and held against the models before their weights are read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibration.dataset import read_dataset
from quantkit.calibration.text import held_back_text, read_text
from quantkit.checkpoint.reader import Checkpoint
from quantkit.commands.evaluation.report import Scored
from quantkit.errors import CalibrationError, CheckpointError, RequestError, UsageError
from quantkit.evaluators.perplexity import Perplexity, cut_windows, score
from quantkit.models.transformer import Model
from quantkit.runtime.placement import Placement
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import TextSettings

SPLITS = {"wikitext2": "test", "c4": "validation"}
ENDLESS = {"c4"}
"""Data sets too large to be read whole; `ENDLESS_WINDOWS` are scored unless `--windows` says otherwise."""
ENDLESS_WINDOWS = 256
CHARACTERS_PER_TOKEN = 16
"""Of an endless data set this much text is read for each token: several times what any language needs."""


@dataclass(frozen=True, slots=True)
class ReadText:
    """A text as one tokenizer reads it, cut into windows `[n, L]`; tokens from position `first` on are predicted."""

    source: str
    text: str
    ids: Sequence[int]
    windows: Tensor
    first: int

    @classmethod
    def read(cls, settings: TextSettings, tokenizer: Tokenizer, context: int, stride: int | None = None) -> "ReadText":
        """Raises UsageError for settings, CalibrationError for the text, RequestError for windows beyond `context`."""
        source, text = _read(settings)
        ids = tokenizer.encode(text)
        windows = _cut(settings, ids, tokenizer, context, stride)
        return cls(source, text, ids, windows, 2 if settings.bos else 1)

    def scored(self, settings: TextSettings, placement: Placement, stride: int | None = None) -> Scored:
        """What the figures mean, for the report."""
        return Scored(self.source, len(self.ids), settings.length, settings.bos, placement, stride)


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


def _cut(settings: TextSettings, ids: Sequence[int], tokenizer: Tokenizer, context: int, stride: int | None) -> Tensor:
    if settings.bos and tokenizer.bos_id is None:
        raise RequestError(f"`{tokenizer.folder}` names no BOS token", hint="leave out `--bos`")
    count = settings.windows or (ENDLESS_WINDOWS if settings.dataset in ENDLESS else None)
    if not settings.bos:
        return cut_windows(ids, settings.length, count, context, stride=stride)
    if list(ids[:1]) == [tokenizer.bos_id]:  # spelled out in the text: it still gets one only
        ids = ids[1:]
    return cut_windows(ids, settings.length, count, context, tokenizer.bos_id, stride)


def require_known(windows: Tensor, checkpoint: Checkpoint) -> None:
    """RequestError for ids that the model does not know, before its weights are read."""
    highest, known = int(windows.max()), checkpoint.model_config.vocab_size
    if highest >= known:
        raise RequestError(
            f"the text has token id {highest}, `{checkpoint.path}` knows {known} ids: "
            "tokenizer and model do not belong together",
            hint="copy the tokenizer files of the original model into the folder",
        )


def bos_notes(model: Model, tokenizer: Tokenizer, windows: Tensor, plain: Perplexity, bos: bool) -> tuple[str, ...]:
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


def tokenizer_notes(candidate: Checkpoint, reference: Tokenizer, text: str, ids: Sequence[int]) -> tuple[str, ...]:
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
