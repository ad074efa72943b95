"""Logits to one token id: a short chain of pure functions over `[vocab]`, the last of which draws.

    penalize → temper → keep_top_k → keep_top_p → keep_min_p → draw

Each takes logits and returns logits; a token that is ruled out gets minus infinity, and the likeliest never is. So no
setting, however extreme, leaves nothing to choose from or makes a NaN.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import UsageError
from quantkit.runtime.finite import require_finite

GREEDY_BELOW = 1e-3
"""Temperatures under this are greedy: at 0.001 a token behind by 0.05 in its logit has a chance of e^-50."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose a token. The defaults are greedy.

    temperature         divides the logits; under `GREEDY_BELOW` the largest logit is taken
    top_k               keep the k likeliest; 0 or -1 keeps all
    top_p               keep the likeliest that together reach this probability; 1 keeps all, 0 the likeliest one
    min_p               drop tokens less likely than this times the likeliest; 0 keeps all
    repetition_penalty  above 1 makes tokens that were already seen less likely; 1 is none; 0.01 to 100

    Raises UsageError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0, math.inf)
        _within("top-p", self.top_p, 0, 1)
        _within("min-p", self.min_p, 0, 1)
        if self.top_k < -1:
            raise UsageError(f"`--top-k` is {self.top_k}, expected 0 (all) or more", hint="--top-k 0")
        _within("repetition-penalty", self.repetition_penalty, 0.01, 100)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def choose(logits: Tensor, seen: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """The next token: logits float32 [vocab], `seen` int64 [n] the ids so far, `random` on the CPU.

    Greedy ties go to the lower id. Raises GateError when a logit is not a finite number.
    """
    require_finite(logits)
    logits = penalize(logits, seen, sampling.repetition_penalty)
    if sampling.greedy:
        return int(logits.argmax())
    logits = temper(logits.cpu(), sampling.temperature)
    logits = keep_top_k(logits, sampling.top_k)
    logits = keep_top_p(logits, sampling.top_p)
    logits = keep_min_p(logits, sampling.min_p)
    return draw(logits, random)


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive logits of seen tokens by `penalty` and multiply the negative ones by it (CTRL,
    arXiv:1909.05858, section 4.1), once for each token however often it was seen."""
    if penalty == 1.0 or seen.numel() == 0:
        return logits
    ids = seen.to(logits.device)
    logits = logits.to(torch.float64)
    scores = logits[ids]
    return logits.index_put((ids,), torch.where(scores > 0, scores / penalty, scores * penalty))


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
    probabilities = logits[order].softmax(0)
    before = probabilities.cumsum(0) - probabilities
    keep = before < p
    keep[0] = True
    return _rule_out(logits, order[~keep])


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Rule out tokens less likely than `p` times the likeliest (arXiv:2407.01082)."""
    if p <= 0.0:
        return logits
    return logits.masked_fill(logits < logits.max() + math.log(p), -math.inf)


def draw(logits: Tensor, random: torch.Generator) -> int:
    """One id, each with its softmax probability. The same seed gives the same id on any device."""
    return int(torch.multinomial(logits.softmax(0), 1, generator=random))


def _rule_out(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.index_fill(0, ids, -math.inf)


def _within(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or math.isinf(value):
        upper = "or more" if math.isinf(high) else f"to {high}"
        raise UsageError(
            f"`--{option}` is {value}, expected {low} {upper}", hint=f"--{option} {low if value < low else 1}"
        )
