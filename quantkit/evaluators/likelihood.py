"""How likely a model finds one text behind another: the sum of log-probabilities of the second one's tokens.

Texts are joined before they are made into tokens, and what is not of the first text's tokens is the second's; spaces at
the end of the first go to the second, since tokens begin with their space, not end with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quantkit.errors import RequestError
from quantkit.models.transformer import Model
from quantkit.progress import Progress, Silent
from quantkit.runtime.finite import locate, require_finite
from quantkit.runtime.tokenizer import Tokenizer

BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Pair:
    """Token ids of a text `before` and of one that follows it."""

    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The log-likelihood of a continuation in nats, its tokens, and whether each was the likeliest."""

    value: float
    tokens: int
    greedy: bool


def encode_pair(tokenizer: Tokenizer, before: str, after: str) -> Pair:
    """The tokens of both. Raises RequestError where nothing is left to predict, or nothing to predict it from."""
    text = before.rstrip()
    after = before[len(text) :] + after
    head = tokenizer.encode(text, special=tokenizer.adds_bos)
    whole = tokenizer.encode(text + after, special=tokenizer.adds_bos)
    if not head and (first := tokenizer.bos_id) is not None:
        head, whole = [first], [first, *whole]
    pair = Pair(tuple(whole[: len(head)]), tuple(whole[len(head) :]))
    if not pair.before or not pair.after:
        raise RequestError(
            f"`{before[-40:]}` → `{after[:40]}` has {len(pair.before)} and {len(pair.after)} tokens, expected some",
            hint="every item needs a question and an answer",
        )
    return pair


def require_room(pairs: Sequence[Pair], context: int) -> None:
    """Raises RequestError for pairs that the model's context does not hold: nothing is cut."""
    longest = max(len(pair.before) + len(pair.after) for pair in pairs)
    if longest - 1 > context:
        raise RequestError(
            f"an item has {longest} tokens, the model's context has {context}",
            hint="use fewer `--shots`, or leave it out",
        )


@torch.inference_mode()
def likelihoods(
    model: Model, pairs: Sequence[Pair], label: str = "likelihood", progress: Progress | None = None
) -> list[Likelihood]:
    """One for each pair, in their order. Raises GateError when logits are not finite.

    Pairs of like length go through the model together, padded on the right, where attention does not look.
    """
    order = sorted(range(len(pairs)), key=lambda at: -(len(pairs[at].before) + len(pairs[at].after)))
    found: list[Likelihood | None] = [None] * len(pairs)
    with (progress or Silent()).task(label, total=len(pairs)) as task:
        start = 0
        while start < len(order):
            width = len(pairs[order[start]].before) + len(pairs[order[start]].after) - 1
            chosen = order[start : start + max(1, BATCH_TOKENS // width)]
            rows = [list(pairs[at].before + pairs[at].after)[:-1] for at in chosen]
            hidden = model.hidden(torch.tensor([row + [0] * (width - len(row)) for row in rows]))
            for at, states, row in zip(chosen, hidden, rows, strict=True):
                found[at] = _one(model, pairs[at], states[: len(row)], row)
            start += len(chosen)
            task.advance(len(chosen))
    return [one for one in found if one is not None]


def _one(model: Model, pair: Pair, states: torch.Tensor, row: list[int]) -> Likelihood:
    """From the states `[n, hidden]` of a pair's tokens but the last."""
    logits = model.head(states[None, len(pair.before) - 1 :])[0]
    locate(model, torch.tensor([row]), partial(require_finite, logits))
    after = torch.tensor(pair.after, device=logits.device)
    likely = logits.double().log_softmax(-1).gather(-1, after[:, None])
    greedy = bool((logits.argmax(-1) == after).all())
    return Likelihood(float(likely.sum()), len(pair.after), greedy)
