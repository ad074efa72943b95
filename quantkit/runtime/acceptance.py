"""Whether a guessed token stands: the rule that leaves the distribution of the answer exactly the main model's.

A guess drawn from q is accepted with probability min(1, p / q); else the token is drawn from max(0, p - q), normalised.
Either way it comes with probability p (Leviathan et al. 2023, arXiv:2211.17192, section 2.3 and appendix A.1). That
holds only if q is what the guess was really drawn from: all settings of the draft included.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """A token that may come next, and the probabilities float64 [vocab] that it was drawn from; None if it was certain,
    as what an n-gram or a greedy draft says is."""

    token: int
    chances: Tensor | None = None


def settle(chances: Tensor, guessed: Tensor, drawn_from: Tensor, random: torch.Generator) -> Tensor:
    """The tokens that come, int64 [n], each row by itself.

    chances     float64 [n, vocab]: what the main model says
    guessed     int64 [n]
    drawn_from  float64 [n, vocab]: what each guess was drawn from
    """
    guessed = guessed[:, None]
    accepted = torch.rand(guessed.shape, generator=random, dtype=torch.float64) < (
        chances.gather(1, guessed) / drawn_from.gather(1, guessed)
    )
    rest = (chances - drawn_from).clamp(min=0)
    # Where nothing is left, p and q are equal but for rounding, and all guesses are accepted.
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, chances)
    return torch.where(accepted, guessed, torch.multinomial(rest, 1, generator=random))[:, 0]


def certain(token: int, vocab: int) -> Tensor:
    """The distribution that knows one token only, float64 [vocab]."""
    chances = torch.zeros(vocab, dtype=torch.float64)
    chances[token] = 1.0
    return chances
