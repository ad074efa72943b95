"""Answer: one request on its way, from logits to deltas. It runs no model: whoever does feeds it, alone or in a batch.

    answer = Answer(request, tokenizer)
    while answer.finish_reason is None:
        logits = …                          # of the token that follows answer.ids
        yield from answer.advance(logits)   # answer.ids may be shorter afterwards than before

A token whose text may begin a banned string waits together with its logits. When the string is complete, the answer
goes back to the token it began with, rules that one out there, and chooses again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.runtime.acceptance import Guess, certain, settle
from quantkit.runtime.request import Delta, Request
from quantkit.runtime.sampler import Sampling, choose, distribution
from quantkit.runtime.stops import StopStrings, beginning_of, first_of
from quantkit.runtime.tokenizer import Tokenizer, TokenStream

ATTEMPTS = 1000
"""Ways tried around banned strings before an answer ends for want of one."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A token that nobody has seen yet: its text, and what it takes to choose another in its place."""

    token: int
    log_probability: float
    piece: str
    before: TokenStream
    logits: Tensor
    ruled_out: frozenset[int]


class Answer:
    """`ids` are prompt and answer; `finish_reason` is None until the last delta is out."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.ids = list(request.ids)
        self.finish_reason: str | None = None
        self.prompt_tokens = len(self.ids)
        self.random = torch.Generator().manual_seed(request.seed)
        self._text = tokenizer.stream()
        self._stops = StopStrings(request.stops)
        self._waiting: list[_Waiting] = []
        self._attempts = 0

    def sampling_after(self, ids: Sequence[int]) -> Sampling:
        """How the token is chosen that follows `ids`, prompt and answer."""
        chosen = self.request.sampling
        return chosen if isinstance(chosen, Sampling) else chosen(ids[self.prompt_tokens :])

    @property
    def left(self) -> int:
        """How many tokens may still come."""
        return self.request.max_new_tokens - (len(self.ids) - self.prompt_tokens)

    def advance(self, logits: Tensor, guess: Guess | None = None) -> list[Delta]:
        """The next token, chosen from float32 logits [vocab]: the deltas that are certain now, often one, perhaps none.

        With a `guess` it is as often that token as can be without being drawn from another distribution. Raises
        GateError when a logit is not a finite number.
        """
        ruled_out: frozenset[int] = frozenset()
        while True:
            token = self._choose(logits, guess, ruled_out)
            guess = None
            end = self._append(token, logits, ruled_out)
            clash = first_of(self.request.banned, self._waiting_text)
            if clash is None:
                return self._release(end)
            logits, ruled_out = self._go_back(clash[0])
            self._attempts += 1
            if self._attempts == ATTEMPTS or len(ruled_out) == logits.shape[0]:
                return self._give_up(token, logits)

    def _choose(self, logits: Tensor, guess: Guess | None, ruled_out: frozenset[int]) -> int:
        seen, sampling = torch.tensor(self.ids), self.sampling_after(self.ids)
        if guess is None or sampling.greedy:
            return choose(logits, seen, sampling, self.random, self.prompt_tokens, ruled_out)
        chances = distribution(logits, seen, sampling, self.prompt_tokens)
        drawn_from = certain(guess.token, len(chances)) if guess.chances is None else guess.chances
        return int(settle(chances[None], torch.tensor([guess.token]), drawn_from[None], self.random))

    def _append(self, token: int, logits: Tensor, ruled_out: frozenset[int]) -> str | None:
        """Take a token in; the reason if it is the last one."""
        before = self._text.copy() if self.request.banned else self._text
        self.ids.append(token)
        end = "stop" if token in self.request.stop_ids else None if self.left else "length"
        piece = "" if end == "stop" else self._text.push(token)
        if end:
            piece += self._text.finish()
        self._wait(token, piece, before, logits, ruled_out)
        return end

    @property
    def _waiting_text(self) -> str:
        return "".join(token.piece for token in self._waiting)

    def _go_back(self, index: int) -> tuple[Tensor, frozenset[int]]:
        """Forget the waiting tokens from the one that began character `index` of their text; its logits, and what may
        not come in its place."""
        first, passed = 0, 0
        for number, token in enumerate(self._waiting):
            if passed + len(token.piece) > index:
                # A character spread over several tokens begins with the first of them, which adds no text.
                first = first if passed == index else number
                break
            if token.piece:
                first = number + 1
            passed += len(token.piece)
        culprit = self._waiting[first]
        del self.ids[len(self.ids) - (len(self._waiting) - first) :], self._waiting[first:]
        self._text = culprit.before
        return culprit.logits, culprit.ruled_out | {culprit.token}

    def _give_up(self, token: int, logits: Tensor) -> list[Delta]:
        """End here: `token` is one of those that are ruled out, so it adds no text."""
        self.ids.append(token)
        self._wait(token, "", self._text, logits, frozenset())
        return self._release("banned")

    def _wait(
        self, token: int, piece: str, before: TokenStream, logits: Tensor, ruled_out: frozenset[int]
    ) -> None:
        probability = float(logits[token] - logits.logsumexp(0))
        self._waiting.append(_Waiting(token, probability, piece, before, logits, ruled_out))

    def _release(self, end: str | None) -> list[Delta]:
        """Deltas of the tokens that no longer need to wait; all of them at the `end`."""
        count = len(self._waiting) if end else self._certain()
        if count:
            self._attempts = 0
        released, self._waiting = self._waiting[:count], self._waiting[count:]
        deltas: list[Delta] = []
        for number, token in enumerate(released):
            deltas.extend(self._deliver(token, end if number == count - 1 else None))
            if self.finish_reason is not None:
                del self.ids[len(self.ids) - (count - 1 - number) - len(self._waiting) :]
                self._waiting = []
                break
        return deltas

    def _certain(self) -> int:
        """How many of the waiting tokens cannot become part of a banned string."""
        if not self.request.banned:
            return len(self._waiting)
        text = self._waiting_text
        safe = len(text) - beginning_of(self.request.banned, text)
        count = passed = 0
        for number, token in enumerate(self._waiting):
            passed += len(token.piece)
            if passed > safe:
                return count
            if token.piece:  # those without text may be the first bytes of what follows them
                count = number + 1
        return count if self._text.unfinished else len(self._waiting)

    def _deliver(self, token: _Waiting, end: str | None) -> Iterator[Delta]:
        text = self._stops.push(token.piece)
        if self._stops.found is not None:
            end = "stop"
        elif end:
            text += self._stops.finish()
        delta = Delta(text, token.token, end, token.log_probability, self._stops.found)
        for callback in self.request.callbacks:
            returned = callback(delta)
            if returned is None:
                if end is None:
                    return
                returned = replace(delta, text="")
            delta = replace(returned, finish_reason=end or returned.finish_reason)
        self.finish_reason = delta.finish_reason
        yield delta
