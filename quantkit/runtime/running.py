"""Running: an answer with its place in the cache, and the pass of the model that takes one or many of them further.

    running = Running(Answer(request, tokenizer), CacheSequence(pool))
    while running.answer.finish_reason is None:
        (deltas,) = step(model, pool, [(running, 2048)])

What the cache lacks is fed: a piece of the prompt, one new token, or that and a few guesses at what follows it, which
are then checked all at once. Alone or in a batch, with guesses or without, it is this pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.models.transformer import Model
from quantkit.runtime.acceptance import Guess
from quantkit.runtime.answer import Answer
from quantkit.runtime.cache import CacheView
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.decoding import Decoding
from quantkit.runtime.drafts import Drafting
from quantkit.runtime.finite import locate
from quantkit.runtime.page_pool import PagePool
from quantkit.runtime.request import Delta, Tally


class Running:
    """One request under way. `fed` counts the tokens that the model has read for it, guesses and repetitions too."""

    def __init__(self, answer: Answer, sequence: CacheSequence, drafting: Drafting | None = None) -> None:
        self.answer = answer
        self.sequence = sequence
        self.tally = Tally()
        self.fed = 0
        self.drafting = drafting
        self._guesses: list[Guess] = []
        self._complete = False

    @property
    def lacking(self) -> int:
        """Tokens of the text that the cache does not have yet; what is chosen next needs them all."""
        return len(self.answer.ids) - min(self.sequence.length, len(self.answer.ids) - 1)

    def cut(self) -> None:
        """Take back what the cache has beyond the text: guesses that did not stand, and tokens that the answer took
        back. Where a window has dropped what is seen from there, the text is to be read again from its beginning."""
        length = min(self.sequence.length, len(self.answer.ids) - 1)
        if self.sequence.can_cut(length):
            self.sequence.truncate(length)
        else:
            self.sequence.restart()

    def align(self, model: Model) -> None:
        """Leave in the cache what is of use for what comes next, before anyone counts what is `lacking`."""
        self.cut()
        length, sequence = len(self.answer.ids), self.sequence
        known = max(sequence.length, sequence.known) if sequence.length else 0
        if model.must_restart(known, length) or model.must_restart(length, known):  # a ban may go back over the change
            sequence.restart()

    def feed(self, model: Model, most: int) -> list[int]:
        """The tokens of the next pass, at most so many."""
        self.align(model)
        ids, sequence = self.answer.ids, self.sequence
        sequence.known = len(ids)
        tokens = ids[sequence.length : sequence.length + most]
        self._complete = sequence.length + len(tokens) == len(ids)
        self._guesses = self._guess(model, most - len(tokens)) if self._complete else []
        self.fed += len(tokens) + len(self._guesses)
        return tokens + [guess.token for guess in self._guesses]

    @property
    def wanted(self) -> int:
        """The last so many of the tokens fed are those whose logits are wanted."""
        return 1 + len(self._guesses) if self._complete else 0

    def take(self, logits: Tensor) -> list[Delta]:
        """What comes of logits `[wanted, vocab]`: the guesses that stand, and one token that the model adds to them."""
        deltas: list[Delta] = []
        answer, tally = self.answer, self.tally
        if not self._complete:
            return deltas
        tally.passes += 1
        tally.checked += bool(self._guesses)
        tally.guessed += len(self._guesses)
        for row, guess in zip(logits, [*self._guesses, None], strict=True):
            before = len(answer.ids)
            deltas += answer.advance(row, guess)
            tally.tokens += len(answer.ids) > before
            stands = guess is not None and len(answer.ids) == before + 1 and answer.ids[-1] == guess.token
            tally.accepted += stands
            if answer.finish_reason is not None or not stands:
                break
        return deltas

    def _guess(self, model: Model, room: int) -> list[Guess]:
        """None where what is read now would change the rotation of what is read later: the guesses must not matter."""
        most = min(room, self.answer.left - 1)
        if self.drafting is None or most < 1:
            return []
        known = len(self.answer.ids)
        for rope in set(model.config.ropes):
            if rope.depends_on_length and not torch.equal(rope.frequencies(known), rope.frequencies(known + most)):
                return []
        return self.drafting.guess(self.answer, most)


@torch.inference_mode()
def step(
    model: Model, pool: PagePool, parts: Sequence[tuple[Running, int]], decoding: Decoding | None = None
) -> list[list[Delta]]:
    """One pass of the model over at most so many tokens of each; the deltas of each. `decoding`, of the same model and
    pool, takes the passes that it can.

    Raises CacheFull when the pool has too few pages, and GateError for logits that are no finite numbers.
    """
    fed = [running.feed(model, most) for running, most in parts]
    counts = [len(tokens) for tokens in fed]
    wanted = [running.wanted for running, _ in parts]
    ends = torch.tensor(counts).cumsum(0).tolist()
    rows = [column for end, count in zip(ends, wanted, strict=True) for column in range(end - count, end)]
    if decoding is not None and decoding.takes(counts):
        with decoding.undisturbed():
            every = decoding.logits([running.sequence for running, _ in parts], fed)
            return _taken(model, parts, every[torch.tensor(rows, dtype=torch.int64, device=every.device)], wanted)
    view = CacheView(pool, [running.sequence for running, _ in parts], counts)
    ids = torch.tensor([[token for tokens in fed for token in tokens]])
    if not rows:
        model.hidden(ids, cache=view)
        return [[] for _ in parts]
    logits = model.forward(ids, cache=view, wanted=torch.tensor(rows))[0]
    return _taken(model, parts, logits, wanted)


def _taken(
    model: Model, parts: Sequence[tuple[Running, int]], logits: Tensor, wanted: Sequence[int]
) -> list[list[Delta]]:
    deltas = []
    for (running, _), mine in zip(parts, logits.split(list(wanted)), strict=True):
        deltas.append(_located(model, running, mine))
    return deltas


def _located(model: Model, running: Running, logits: Tensor) -> list[Delta]:
    text = torch.tensor([running.answer.ids])
    return locate(model, text, lambda: running.take(logits))
