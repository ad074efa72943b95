"""Perplexity of a model over windows of text, in the convention of the GPTQ paper (arXiv:2210.17323, section 4).

Tokens of the whole text are cut into windows that do not overlap, a last partial one is dropped, each window stands
for itself from position 0, and the `L - 1` next-token predictions inside it are scored. perplexity = exp(mean negative
log-likelihood in nats). With a BOS id every window gets it in front, and the same `L - 1` predictions are scored.

With a stride below `L` windows overlap, and each one after the first scores its last `stride` tokens only: every token
but the text's first is scored once, with at least `L - stride` tokens before it.

Logits are made for a few positions at a time: at 49,152 words a window of 2048 would take 400 MB in float32.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.errors import CalibrationError, RequestError, UsageError
from quantkit.evaluators.statistics import standard_error
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

    mean_nll        mean negative log-likelihood of the scored predictions, in nats
    tokens          tokens covered, those included that are not scored
    predictions     next-token predictions scored
    window_nll      the mean of each window
    standard_error  of `mean_nll`, see `evaluators.statistics`; None of a text too short for it
    """

    mean_nll: float
    tokens: int
    predictions: int
    window_nll: tuple[float, ...]
    standard_error: float | None = None

    @classmethod
    def of(cls, losses: Tensor | Sequence[Tensor], unscored: int | None = None) -> "Perplexity":
        """From the negative log-likelihood of every prediction, float64, a row for each window.

        unscored  tokens covered but not scored: by default one in each window
        """
        scored = sum(row.numel() for row in losses)
        return cls(
            mean_nll=float(torch.cat([row.reshape(-1) for row in losses]).mean()),
            tokens=scored + (len(losses) if unscored is None else unscored),
            predictions=scored,
            window_nll=tuple(float(row.mean()) for row in losses),
            standard_error=standard_error(losses),
        )

    @property
    def windows(self) -> int:
        return len(self.window_nll)

    @property
    def perplexity(self) -> float:
        """exp(mean_nll); infinite where that is beyond a float."""
        return _exp(self.mean_nll)

    @property
    def perplexity_error(self) -> float | None:
        """Standard error of the perplexity, to first order: perplexity times that of the mean."""
        return None if self.standard_error is None else self.perplexity * self.standard_error


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def cut_windows(
    ids: Sequence[int],
    length: int,
    windows: int | None,
    context: int,
    bos_id: int | None = None,
    stride: int | None = None,
) -> Tensor:
    """The first `windows` windows of a text (None: all), int64 `[windows, length]`; a `bos_id` makes each one longer.

    stride  tokens from the beginning of one window to that of the next; None is `length`
    Raises UsageError for a length that has nothing to predict, RequestError for one beyond the model's `context`,
    CalibrationError for a text that has fewer windows.
    """
    if length < 2:
        raise UsageError(
            f"`--length` is {length}: a window needs 2 tokens to have one to predict", hint="--length 2048"
        )
    if windows is not None and windows < 1:
        raise UsageError(f"`--windows` is {windows}, expected 1 or more", hint="leave it out for all windows")
    if stride is not None and not 1 <= stride <= length:
        raise UsageError(
            f"`--stride` is {stride}, expected 1 to the length of a window, {length}", hint=f"--stride {length // 2}"
        )
    front = [] if bos_id is None else [bos_id]
    if length + len(front) > context:
        raise RequestError(
            f"windows of {length + len(front)} tokens do not fit into the model's context of {context}",
            hint=f"--length {context - len(front)}",
        )
    step = stride or length
    there = max(0, (len(ids) - length) // step + 1)
    if there < (windows or 1):
        raise CalibrationError(
            f"the text has {len(ids)} tokens, which makes {there} windows of {length}; {windows or 1} asked for",
            hint=f"--windows {there}" if there else f"a longer text{_or_shorter_windows(len(ids))}",
        )
    count = windows or there
    rows = torch.tensor(ids, dtype=torch.int64).unfold(0, length, step)[:count]
    return torch.cat([torch.tensor(front, dtype=torch.int64).expand(count, -1), rows], dim=1)


def _or_shorter_windows(tokens: int) -> str:
    return f", or --length {tokens} at most" if tokens >= 2 else ""


def score(
    model: Model, windows: Tensor, progress: Progress | None = None, *, first: int = 1, later: int | None = None
) -> Perplexity:
    """Perplexity over windows, int64 `[n, L]`: the tokens from position `first` of each on are predicted.

    later  the first scored position of all windows but the first, where they overlap

    Raises GateError when logits are not finite.
    """
    groups = [(windows, first)]
    if later is not None and later != first and len(windows) > 1:
        groups = [(windows[:1], first), (windows[1:], later)]
    # Filled in place: small results kept between large pieces would keep the allocator from using the gaps again.
    losses = [torch.empty(len(part), part.shape[1] - at, dtype=torch.float64) for part, at in groups]
    done = total = 0.0
    with (progress or Silent()).task("perplexity", total=len(windows)) as task:
        for (part, at), kept in zip(groups, losses, strict=True):
            row = 0
            for ids in batches(part):
                start = 0
                for (logits,), targets in predictions([model], ids, at):
                    end = start + targets.shape[1]
                    kept[row : row + len(ids), start:end] = negative_log_likelihood(logits, targets)
                    start = end
                total += float(kept[row : row + len(ids)].sum())
                done += kept[row : row + len(ids)].numel()
                row += len(ids)
                task.advance(len(ids), note=f"perplexity {_exp(total / done):.4f}")
    rows = [row for kept in losses for row in kept]
    return Perplexity.of(rows, unscored=None if len(groups) == 1 else 1)


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
    flat = F.cross_entropy(logits.flatten(0, -2), targets.to(logits.device).flatten(), reduction="none")
    return flat.reshape(targets.shape).double().cpu()
