"""Greedy talks over a page pool, driven by the test alone, so that every manner of writing is certain to occur: a prompt
at once, one token of one text, one of each of several, and several at once of which some are taken back.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit.models.transformer import Model
from quantkit.runtime.cache import CacheView
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.page_pool import PagePool

Guess = Callable[[int, list[int]], list[int]]
"""Number of a text, and its ids so far → what may come next. The same in every run."""


def forward(model: Model, pool: PagePool, sequences: Sequence[CacheSequence], pieces: Sequence[list[int]], last: int) -> list[Tensor]:
    """Logits `[at most last, vocab]` of the last tokens of each piece."""
    counts = [len(piece) for piece in pieces]
    view = CacheView(pool, sequences, counts)
    shown = [min(count, last) for count in counts]
    ends = (view.last + 1).tolist()
    wanted = [column for end, count in zip(ends, shown, strict=True) for column in range(end - count, end)]
    ids = torch.tensor([[token for piece in pieces for token in piece]])
    with torch.inference_mode():
        return list(model.forward(ids, cache=view, wanted=torch.tensor(wanted))[0].split(shown))


def talk(model: Model, pool: PagePool, prompts: list[list[int]], count: int, guess: Guess | None = None) -> tuple[list[list[int]], Tensor]:
    """Greedy answers of `count` tokens, and the logits behind each pass. Guesses are checked in one window; those from
    the first wrong one on are taken back."""
    sequences = [CacheSequence(pool, len(prompt) + count) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    kept: list[Tensor] = []
    pieces = prompts
    while min(map(len, answers)) < count:
        logits = forward(model, pool, sequences, pieces, last=64 if answers[0] else 1)
        for sequence, answer, piece, rows in zip(sequences, answers, pieces, logits, strict=True):
            guessed, stood = piece[1:] if answer else [], 0
            while stood < len(guessed) and guessed[stood] == int(rows[stood].argmax()):
                stood += 1
            sequence.truncate(sequence.length - len(guessed) + stood)
            answer += [*guessed[:stood], int(rows[stood].argmax())]
            kept.append(rows[stood])
        pieces = [
            [answer[-1], *(guess(index, prompt + answer) if guess else ())]
            for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
    for sequence in sequences:
        sequence.close()
    return [answer[:count] for answer in answers], torch.stack(kept)
