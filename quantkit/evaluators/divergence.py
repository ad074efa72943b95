"""Divergence of a candidate model from its reference, teacher-forced over the same windows of text.

At every position both models see the same tokens and `KL(reference || candidate) = Σ p_ref · (ln p_ref - ln p_cand)` is
taken over the whole vocabulary, in nats, in float64. Both models run window after window and their logits exist for a
few positions at a time, so neither ever holds all of them; what is kept is one number for each prediction.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.evaluators.perplexity import Perplexity, batches, predictions
from quantkit.models.transformer import Model
from quantkit.progress import Progress, Silent

BLOCK = 32
"""Predictions that are resampled together: neighbours in a text are alike, far ones are not."""
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a candidate is from its reference.

    kl_mean         mean KL over all predictions, in nats
    kl_ci95         95 % interval of that mean, by `bootstrap_interval`
    kl_p90, kl_p99  percentiles of the KL of single predictions
    top1_agreement  share of predictions where both models find the same token likeliest
    notes           what was compared otherwise than one would expect
    """

    kl_mean: float
    kl_ci95: tuple[float, float]
    kl_p90: float
    kl_p99: float
    top1_agreement: float
    reference: Perplexity
    candidate: Perplexity
    notes: tuple[str, ...] = ()


def compare(
    reference: Model, candidate: Model, windows: Tensor, progress: Progress | None = None, *, first: int = 1
) -> Divergence:
    """Divergence over windows, int64 `[n, L]`: the tokens from position `first` of each on are predicted.

    Models with a different number of padding rows in their vocabulary are compared on the rows that both have.
    Raises CheckpointError when the text uses ids that one of them lacks, GateError when logits are not finite.
    """
    vocab, notes = common_vocabulary(reference, candidate, windows)
    # Filled in place: small results kept between large pieces would keep the allocator from using the gaps again.
    scores = torch.empty(4, len(windows), windows.shape[1] - first, dtype=torch.float64)
    done = 0
    with (progress or Silent()).task("compare", total=len(windows)) as task:
        for ids in batches(windows):
            start = 0
            for (left, right), targets in predictions([reference, candidate], ids, first):
                end = start + targets.shape[1]
                piece = _compare_piece(left[..., :vocab], right[..., :vocab], targets)
                scores[:, done : done + len(ids), start:end] = piece
                start = end
            done += len(ids)
            task.advance(len(ids), note=f"KL {float(scores[0, :done].mean()):.5f}")
    divergence, agrees, loss_reference, loss_candidate = scores
    p90, p99 = np.percentile(divergence.numpy(), [90, 99]).tolist()
    return Divergence(
        kl_mean=float(divergence.mean()),
        kl_ci95=bootstrap_interval(divergence),
        kl_p90=p90,
        kl_p99=p99,
        top1_agreement=float(agrees.mean()),
        reference=Perplexity.of(loss_reference),
        candidate=Perplexity.of(loss_candidate),
        notes=notes,
    )


def common_vocabulary(reference: Model, candidate: Model, windows: Tensor) -> tuple[int, tuple[str, ...]]:
    """How many ids both models know, and a note where that is not all; CheckpointError where the text has others."""
    sizes = reference.config.vocab_size, candidate.config.vocab_size
    common = min(sizes)
    if int(windows.max()) >= common:
        raise CheckpointError(
            f"the text has token id {int(windows.max())}, but the models know {sizes[0]} and {sizes[1]} ids",
            hint="compare a model with quantizations of itself only",
        )
    if sizes[0] == sizes[1]:
        return common, ()
    return common, (f"vocabularies of {sizes[0]} and {sizes[1]} rows: compared on the first {common}",)


def bootstrap_interval(values: Tensor) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean of `values [windows, n]`, over blocks of neighbours that do not overlap.

    (Künsch 1989; blocks are shorter than `BLOCK` where there would be fewer than eight.) The same values give the same
    interval; that of a single value is the value.
    """
    size = max(1, min(BLOCK, values.numel() // 8))
    blocks = [block for row in values for block in row.split(size)]
    sums = np.array([float(block.sum()) for block in blocks])
    counts = np.array([len(block) for block in blocks])
    random = np.random.default_rng(0)
    draws = (random.integers(len(blocks), size=len(blocks)) for _ in range(RESAMPLES))
    low, high = np.percentile([sums[draw].sum() / counts[draw].sum() for draw in draws], [2.5, 97.5])
    return float(low), float(high)


def divergences(reference: Tensor, candidate: Tensor) -> Tensor:
    """KL(reference || candidate) at each position, in nats: logits `[..., vocab]` of both → float64 `[...]`."""
    left, right = reference.double().log_softmax(-1), candidate.double().log_softmax(-1)
    return (left.exp() * (left - right)).sum(-1)


def _compare_piece(reference: Tensor, candidate: Tensor, targets: Tensor) -> Tensor:
    """Logits `[b, c, vocab]` of both → KL, agreement (0 or 1) and the negative log-likelihoods of both, `[4, b, c]`."""
    left = reference.double().log_softmax(-1)
    right = candidate.to(reference.device).double().log_softmax(-1)
    divergence = (left.exp() * (left - right)).sum(-1)
    agrees = (left.argmax(-1) == right.argmax(-1)).double()
    chosen = targets.to(reference.device)[..., None]
    losses = [-likely.gather(-1, chosen)[..., 0] for likely in (left, right)]
    return torch.stack([divergence, agrees, *losses]).cpu()
