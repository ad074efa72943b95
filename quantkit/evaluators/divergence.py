"""Divergence of a candidate model from its reference, teacher-forced over the same windows of text.

At every position both models see the same tokens and `KL(reference || candidate) = Σ p_ref · (ln p_ref - ln p_cand)` is
taken over the whole vocabulary, in nats, in float64. Both models run window after window and their logits exist for a
few positions at a time, so neither ever holds all of them; what is kept is a few numbers for each prediction.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.evaluators.perplexity import Perplexity, batches, predictions
from quantkit.evaluators.statistics import bootstrap_interval
from quantkit.models.transformer import Model
from quantkit.progress import Progress, Silent

CHANGE_PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
WORST = 10
"""Predictions of the highest KL that are shown."""
CONTEXT = 24
"""Tokens before such a prediction that are shown with it."""
TOP = 5


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A prediction where the candidate is far from its reference.

    context     ids of the tokens before it, at most `CONTEXT`
    target      the id that follows in the text, with its probability in both models
    choices     the likeliest id of the reference and of the candidate, each with its probability there
    """

    window: int
    position: int
    kl: float
    context: tuple[int, ...]
    target: int
    target_probabilities: tuple[float, float]
    choices: tuple[tuple[int, float], tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a candidate is from its reference.

    kl_mean             mean KL over all predictions, in nats
    kl_ci95             95 % interval of that mean, by `bootstrap_interval`
    kl_p90, kl_p99      percentiles of the KL of single predictions
    top1_agreement      share of predictions where both models find the same token likeliest
    top5_agreement      mean share of the reference's five likeliest tokens that are among the candidate's five
    change_percentiles  of the change in probability of the token that follows, candidate less reference: percentile →
                        change
    change_rms          root of the mean square of that change
    correlation         Pearson's, of the log-likelihoods of the tokens that follow; None where one has no spread
    worst               the predictions of the highest KL
    kl_error            how far `kl_mean` nearly always is at most from that of full logits: three standard errors of a
                        sample and the bound of rounding; 0 where full logits were used
    notes               what was compared otherwise than one would expect
    """

    kl_mean: float
    kl_ci95: tuple[float, float]
    kl_p90: float
    kl_p99: float
    top1_agreement: float
    top5_agreement: float
    change_percentiles: dict[int, float]
    change_rms: float
    correlation: float | None
    worst: tuple[WorstToken, ...]
    reference: Perplexity
    candidate: Perplexity
    kl_error: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """What is kept of every prediction: float64 `[10, windows, n]`.

    In this order: KL, variance of its estimate (0 from full logits), negative log-likelihood of the token that follows
    in reference and candidate, likeliest id of both, probability of each there, overlap of the top five,
    bound of what rounding adds to the error of KL (0 from full logits).
    """

    values: Tensor

    @classmethod
    def empty(cls, windows: Tensor, first: int) -> "Scores":
        # Filled in place: small results kept between large pieces would keep the allocator from using the gaps again.
        return cls(torch.empty(10, len(windows), windows.shape[1] - first, dtype=torch.float64))

    def put(self, row: int, start: int, piece: Tensor) -> None:
        """Predictions of some windows from `row` on, from position `start` on: `[10, b, c]`."""
        self.values[:, row : row + piece.shape[1], start : start + piece.shape[2]] = piece

    def divergence(self, windows: Tensor, first: int, notes: tuple[str, ...] = ()) -> Divergence:
        """All figures."""
        kl, variance, loss_reference, loss_candidate, *_, overlap, rounding = self.values
        agrees = (self.values[4] == self.values[5]).double()
        change = (-loss_candidate).exp() - (-loss_reference).exp()
        p90, p99 = np.percentile(kl.numpy(), [90, 99]).tolist()
        spread = min(float(loss_reference.std()), float(loss_candidate.std())) if kl.numel() > 1 else 0.0
        pair = torch.stack([loss_reference.reshape(-1), loss_candidate.reshape(-1)])
        percentiles = np.percentile(change.numpy(), CHANGE_PERCENTILES).tolist()
        return Divergence(
            kl_mean=float(kl.mean()),
            kl_ci95=bootstrap_interval(kl),
            kl_p90=p90,
            kl_p99=p99,
            top1_agreement=float(agrees.mean()),
            top5_agreement=float(overlap.mean()),
            change_percentiles=dict(zip(CHANGE_PERCENTILES, percentiles, strict=True)),
            change_rms=float((change**2).mean().sqrt()),
            correlation=float(torch.corrcoef(pair)[0, 1]) if spread > 0 else None,
            worst=self._worst(windows, first),
            reference=Perplexity.of(loss_reference),
            candidate=Perplexity.of(loss_candidate),
            kl_error=3 * float(variance.sum().sqrt()) / kl.numel() + float(rounding.mean()),
            notes=notes,
        )

    def _worst(self, windows: Tensor, first: int) -> tuple[WorstToken, ...]:
        kl = self.values[0].reshape(-1)
        found = []
        for flat in kl.topk(min(WORST, kl.numel())).indices.tolist():
            window, at = divmod(flat, self.values.shape[2])
            values = self.values[:, window, at].tolist()
            position = at + first
            found.append(
                WorstToken(
                    window=window,
                    position=position,
                    kl=values[0],
                    context=tuple(windows[window, max(0, position - CONTEXT) : position].tolist()),
                    target=int(windows[window, position]),
                    target_probabilities=(float(np.exp(-values[2])), float(np.exp(-values[3]))),
                    choices=((int(values[4]), values[6]), (int(values[5]), values[7])),
                )
            )
        return tuple(found)


def compare(
    reference: Model, candidate: Model, windows: Tensor, progress: Progress | None = None, *, first: int = 1
) -> Divergence:
    """Divergence over windows, int64 `[n, L]`: the tokens from position `first` of each on are predicted.

    Models with a different number of padding rows in their vocabulary are compared on the rows that both have.
    Raises CheckpointError when the text uses ids that one of them lacks, GateError when logits are not finite.
    """
    vocab, notes = common_vocabulary(reference.config.vocab_size, candidate.config.vocab_size, windows)
    scores = Scores.empty(windows, first)
    for row, start, logits, targets in pieces([reference, candidate], windows, first, "compare", progress):
        left, right = (part[..., :vocab] for part in logits)
        scores.put(row, start, compare_piece(left, right, targets))
    return scores.divergence(windows, first, notes)


def pieces(
    models: list[Model], windows: Tensor, first: int, label: str, progress: Progress | None = None
) -> Iterator[tuple[int, int, list[Tensor], Tensor]]:
    """`predictions` of all windows: the first window of a piece, its first prediction, logits and targets."""
    done = 0
    with (progress or Silent()).task(label, total=len(windows)) as task:
        for ids in batches(windows):
            start = 0
            for logits, targets in predictions(models, ids, first):
                yield done, start, logits, targets
                start += targets.shape[1]
            done += len(ids)
            task.advance(len(ids))


def common_vocabulary(reference: int, candidate: int, windows: Tensor) -> tuple[int, tuple[str, ...]]:
    """How many ids both models know, and a note where that is not all; CheckpointError where the text has others."""
    common = min(reference, candidate)
    if int(windows.max()) >= common:
        raise CheckpointError(
            f"the text has token id {int(windows.max())}, but the models know {reference} and {candidate} ids",
            hint="compare a model with quantizations of itself only",
        )
    if reference == candidate:
        return common, ()
    return common, (f"vocabularies of {reference} and {candidate} rows: compared on the first {common}",)


def divergences(reference: Tensor, candidate: Tensor) -> Tensor:
    """KL(reference || candidate) at each position, in nats: logits `[..., vocab]` of both → float64 `[...]`."""
    left, right = reference.double().log_softmax(-1), candidate.double().log_softmax(-1)
    return (left.exp() * (left - right)).sum(-1)


def compare_piece(reference: Tensor, candidate: Tensor, targets: Tensor) -> Tensor:
    """Logits `[b, c, vocab]` of both → `[10, b, c]` for `Scores`."""
    left = reference.double().log_softmax(-1)
    right = candidate.to(reference.device).double().log_softmax(-1)
    kl = (left.exp() * (left - right)).sum(-1)
    chosen = targets.to(reference.device)[..., None]
    losses = [-likely.gather(-1, chosen)[..., 0] for likely in (left, right)]
    choices = [likely.argmax(-1, keepdim=True) for likely in (left, right)]
    surest = [likely.gather(-1, best)[..., 0].exp() for likely, best in zip((left, right), choices, strict=True)]
    overlap = top_overlap(top_ids(left), top_ids(right))
    exact = torch.zeros_like(kl)
    return torch.stack([kl, exact, *losses, *(best[..., 0] for best in choices), *surest, overlap, exact]).cpu()


def top_ids(likely: Tensor) -> Tensor:
    """The `TOP` likeliest ids, int64 `[…, TOP]`; all of a vocabulary that is smaller."""
    return likely.topk(min(TOP, likely.shape[-1])).indices


def top_overlap(reference: Tensor, candidate: Tensor) -> Tensor:
    """Share of the reference's ids `[…, n]` that are among the candidate's, float64 `[…]`."""
    return (reference[..., None] == candidate[..., None, :]).any(-1).double().mean(-1)
