"""Perplexity of a model over windows of text, in the convention of the GPTQ paper (arXiv:2210.17323, section 4).

Tokens of the whole text are cut into windows that do not overlap, a last partial one is dropped, each window stands
for itself from position 0, and the `L - 1` next-token predictions inside it are scored. perplexity = exp(mean negative
log-likelihood in nats). With a BOS id every window gets it in front, and the same `L - 1` predictions are scored.

Logits are made for a few positions at a time: at 49,152 words a window of 2048 would take 400 MB in float32.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantkit.errors import CalibrationError, RequestError, UsageError
from quantkit.models.transformer import Model
from quantkit.progress import Progress, Silent
from quantkit.runtime.finite import locate, require_finite

BATCH_TOKENS = 2048
"""Short windows go through the model together, up to this many tokens."""
LOGIT_BYTES = 16 << 20
"""Memory for one piece of float32 logits."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The score of one model.

    mean_nll     mean negative log-likelihood of the scored predictions, in nats
    tokens       tokens covered: windows times length
    predictions  next-token predictions scored
    window_nll   the mean of each window
    """

    mean_nll: float
    tokens: int
    predictions: int
    window_nll: tuple[float, ...]

    @classmethod
    def of(cls, losses: Tensor) -> "Perplexity":
        """From the negative log-likelihood of every prediction, float64 `[windows, predictions]`."""
        windows, scored = losses.shape
        return cls(float(losses.mean()), windows * (scored + 1), windows * scored, tuple(losses.mean(dim=1).tolist()))

    @property
    def windows(self) -> int:
        return len(self.window_nll)

    @property
    def perplexity(self) -> float:
        """exp(mean_nll); infinite where that is beyond a float."""
        return math.exp(self.mean_nll) if self.mean_nll < 700 else math.inf


def cut_windows(
    ids: Sequence[int], length: int, windows: int | None, context: int, bos_id: int | None = None
) -> Tensor:
    """The first `windows` windows of a text (None: all), int64 `[windows, length]`; a `bos_id` makes each one longer.

    Raises UsageError for a length that has nothing to predict, RequestError for one beyond the model's `context`,
    CalibrationError for a text that has fewer windows.
    """
    if length < 2:
        raise UsageError(
            f"`--length` is {length}: a window needs 2 tokens to have one to predict", hint="--length 2048"
        )
    if windows is not None and windows < 1:
        raise UsageError(f"`--windows` is {windows}, expected 1 or more", hint="leave it out for all windows")
    front = [] if bos_id is None else [bos_id]
    if length + len(front) > context:
        raise RequestError(
            f"windows of {length + len(front)} tokens do not fit into the model's context of {context}",
            hint=f"--length {context - len(front)}",
        )
    there = len(ids) // length
    if there < (windows or 1):
        raise CalibrationError(
            f"the text has {len(ids)} tokens, which makes {there} windows of {length}; {windows or 1} asked for",
            hint=f"--windows {there}" if there else f"a longer text{_or_shorter_windows(len(ids))}",
        )
    count = windows or there
    rows = torch.tensor(ids[: count * length], dtype=torch.int64).reshape(count, length)
    return torch.cat([torch.tensor(front, dtype=torch.int64).expand(count, -1), rows], dim=1)


def _or_shorter_windows(tokens: int) -> str:
    return f", or --length {tokens} at most" if tokens >= 2 else ""


def score(model: Model, windows: Tensor, progress: Progress | None = None, *, first: int = 1) -> Perplexity:
    """Perplexity over windows, int64 `[n, L]`: the tokens from position `first` of each on are predicted.

    Raises GateError when logits are not finite.
    """
    # Filled in place: small results kept between large pieces would keep the allocator from using the gaps again.
    losses = torch.empty(len(windows), windows.shape[1] - first, dtype=torch.float64)
    done = 0
    with (progress or Silent()).task("perplexity", total=len(windows)) as task:
        for ids in batches(windows):
            start = 0
            for (logits,), targets in predictions([model], ids, first):
                end = start + targets.shape[1]
                losses[done : done + len(ids), start:end] = negative_log_likelihood(logits, targets)
                start = end
            done += len(ids)
            task.advance(len(ids), note=f"perplexity {Perplexity.of(losses[:done]).perplexity:.4f}")
    return Perplexity.of(losses)


def batches(windows: Tensor) -> Iterator[Tensor]:
    """Windows `[n, L]` a few at a time, `[b, L]`."""
    yield from windows.split(max(1, BATCH_TOKENS // windows.shape[1]))


@torch.inference_mode()
def predictions(models: Sequence[Model], ids: Tensor, first: int) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Teacher-forced logits of several models, a few positions at a time: (float32 `[b, c, vocab]` of each, targets
    int64 `[b, c]`). The blocks run once for a batch `[b, L]`, only the head runs in pieces.
    """
    hidden = [model.hidden(ids)[:, first - 1 : -1] for model in models]
    step = max(1, LOGIT_BYTES // (4 * len(ids) * max(model.config.vocab_size for model in models)))
    for start in range(0, ids.shape[1] - first, step):
        piece = slice(start, start + step)
        logits = [model.head(states[:, piece]) for model, states in zip(models, hidden, strict=True)]
        for model, values in zip(models, logits, strict=True):
            locate(model, ids, partial(require_finite, values))
        yield logits, ids[:, first:][:, piece]


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """float64 `[b, c]` in nats, from logits `[b, c, vocab]` and the ids that followed `[b, c]`."""
    chosen = logits.gather(-1, targets.to(logits.device)[..., None])[..., 0]
    return (logits.logsumexp(-1).double() - chosen.double()).cpu()
