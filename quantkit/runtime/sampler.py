"""Logits to one token id: a short chain of pure functions over `[vocab]`, the last of which draws.

    rule_out → penalize → discourage → temper → keep_top_k → keep_top_p → keep_min_p → keep_typical → draw

Each takes logits and returns logits; a token that is ruled out gets minus infinity, and one always remains. So no
setting, however extreme, leaves nothing to choose from or makes a NaN. `distribution` is the chain without the draw.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import UsageError
from quantkit.runtime.acceptance import certain
from quantkit.runtime.finite import require_finite

GREEDY_BELOW = 1e-3
"""Temperatures under this are greedy: at 0.001 a token behind by 0.05 in its logit has a chance of e^-50."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose a token. The defaults are greedy, and any of them compose.

    temperature         divides the logits; under `GREEDY_BELOW` the largest logit is taken
    top_k               keep the k likeliest; 0 or -1 keeps all
    top_p               keep the likeliest that together reach this probability; 1 keeps all, 0 the likeliest one
    min_p               drop tokens less likely than this times the likeliest; 0 keeps all
    typical_p           keep those nearest to the expected surprise that together reach this probability; 1 keeps all
    repetition_penalty  above 1 makes tokens of prompt and answer less likely; 1 is none; 0.01 to 100
    frequency_penalty   subtracted from a token's logit each time that the answer has it; -100 to 100
    presence_penalty    subtracted once from the logit of a token that the answer has; -100 to 100

    Raises UsageError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0, math.inf)
        _within("top-p", self.top_p, 0, 1)
        _within("min-p", self.min_p, 0, 1)
        _within("typical-p", self.typical_p, 0, 1)
        if self.top_k < -1:
            raise UsageError(f"`--top-k` is {self.top_k}, expected 0 (all) or more", hint="--top-k 0")
        _within("repetition-penalty", self.repetition_penalty, 0.01, 100)
        _within("frequency-penalty", self.frequency_penalty, -100, 100)
        _within("presence-penalty", self.presence_penalty, -100, 100)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def choose(
    logits: Tensor,
    seen: Tensor,
    sampling: Sampling,
    random: torch.Generator,
    prompt: int = 0,
    ruled_out: Collection[int] = (),
) -> int:
    """The next token: logits float32 [vocab], `seen` int64 [n] the ids so far, `random` on the CPU.

    prompt     how many of `seen` came before the answer
    ruled_out  ids that must not come, at least one of the vocabulary left

    Greedy ties go to the lower id. Raises GateError when a logit is not a finite number.
    """
    scores = _penalized(logits, seen, sampling, prompt, ruled_out)
    return int(scores.argmax()) if sampling.greedy else draw(_shaped(scores, sampling).softmax(0), random)


def distribution(
    logits: Tensor, seen: Tensor, sampling: Sampling, prompt: int = 0, ruled_out: Collection[int] = ()
) -> Tensor:
    """The probability that `choose` gives each token, float64 [vocab] on the CPU; arguments as there."""
    scores = _penalized(logits, seen, sampling, prompt, ruled_out)
    if sampling.greedy:
        return certain(int(scores.argmax()), logits.shape[0])
    return _shaped(scores, sampling).softmax(0)


def _penalized(
    logits: Tensor, seen: Tensor, sampling: Sampling, prompt: int, ruled_out: Collection[int]
) -> Tensor:
    require_finite(logits)
    if ruled_out:
        logits = _rule_out(logits, torch.tensor(sorted(ruled_out), device=logits.device))
    logits = penalize(logits, seen, sampling.repetition_penalty)
    return discourage(logits, seen[prompt:], sampling.frequency_penalty, sampling.presence_penalty)


def _shaped(scores: Tensor, sampling: Sampling) -> Tensor:
    scores = temper(scores.cpu(), sampling.temperature)
    scores = keep_top_k(scores, sampling.top_k)
    scores = keep_top_p(scores, sampling.top_p)
    scores = keep_min_p(scores, sampling.min_p)
    return keep_typical(scores, sampling.typical_p)


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive logits of seen tokens by `penalty` and multiply the negative ones by it (CTRL,
    arXiv:1909.05858, section 4.1), once for each token however often it was seen."""
    if penalty == 1.0 or seen.numel() == 0:
        return logits
    ids = seen.to(logits.device)
    logits = logits.to(torch.float64)
    scores = logits[ids]
    return logits.index_put((ids,), torch.where(scores > 0, scores / penalty, scores * penalty))


def discourage(logits: Tensor, answered: Tensor, frequency: float, presence: float) -> Tensor:
    """Subtract `frequency` times how often the answer has a token, and `presence` if it has it at all."""
    if (frequency == 0.0 and presence == 0.0) or answered.numel() == 0:
        return logits
    counts = torch.bincount(answered, minlength=logits.shape[0]).to(logits.device, torch.float64)
    return logits.to(torch.float64) - frequency * counts - presence * (counts > 0)


def temper(logits: Tensor, temperature: float) -> Tensor:
    """Logits relative to the largest, divided by `temperature`; in float64, so that nothing overflows."""
    relative = logits.to(torch.float64)
    return (relative - relative.max()) / temperature


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Rule out all but the `k` likeliest; ties keep the lower ids. 0, -1 and more than there are rule out none."""
    if k <= 0 or k >= logits.numel():
        return logits
    return _rule_out(logits, logits.argsort(descending=True, stable=True)[k:])


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Rule out what comes after the likeliest tokens have reached probability `p` together (nucleus sampling,
    arXiv:1904.09751). The token that crosses `p` stays."""
    if p >= 1.0:
        return logits
    order = logits.argsort(descending=True, stable=True)
    return _rule_out(logits, order[~_reaching(logits[order].softmax(0), p)])


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Rule out tokens less likely than `p` times the likeliest (arXiv:2407.01082)."""
    if p <= 0.0:
        return logits
    return logits.masked_fill(logits < logits.max() + math.log(p), -math.inf)


def keep_typical(logits: Tensor, p: float) -> Tensor:
    """Rule out what comes after the most typical tokens have reached probability `p` together: those whose surprise is
    nearest to the entropy (locally typical sampling, arXiv:2202.00666). The token that crosses `p` stays."""
    if p >= 1.0:
        return logits
    surprise = -logits.log_softmax(0)
    probabilities = (-surprise).exp()
    entropy = torch.where(probabilities > 0, probabilities * surprise, 0.0).sum()
    order = (surprise - entropy).abs().argsort(stable=True)
    return _rule_out(logits, order[~_reaching(probabilities[order], p)])


def draw(probabilities: Tensor, random: torch.Generator) -> int:
    """One id, each with its probability. The same seed gives the same id on any device."""
    return int(torch.multinomial(probabilities, 1, generator=random))


def _reaching(probabilities: Tensor, p: float) -> Tensor:
    """Which of these, in order, it takes to reach `p` together: at least the first."""
    keep = probabilities.cumsum(0) - probabilities < p
    keep[0] = True
    return keep


def _rule_out(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.index_fill(0, ids, -math.inf)


def _within(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or math.isinf(value):
        upper = "or more" if math.isinf(high) else f"to {high}"
        raise UsageError(
            f"`--{option}` is {value}, expected {low} {upper}", hint=f"--{option} {low if value < low else 1}"
        )
