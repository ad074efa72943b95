"""Drafts: cheap guesses at the next tokens, which the main model then checks all at once.

    draft = ModelDraft(small_model, count=4)       # or NgramDraft(count=4)
    drafting = draft.begin(capacity, vocab)        # one for each answer
    guesses = drafting.guess(answer, most=4)

A good guess saves a pass of the main model; a bad one costs a row of it. A greedy answer is the
same either way; a drawn one is another, of the same distribution.
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from quantkit.errors import GateError, RequestError
from quantkit.models.transformer import Model
from quantkit.runtime.acceptance import Guess
from quantkit.runtime.answer import Answer
from quantkit.runtime.cache import KVCache
from quantkit.runtime.finite import locate, require_finite
from quantkit.runtime.sampler import distribution, draw
from quantkit.runtime.tokenizer import Tokenizer

NGRAMS = (4, 3, 2)
"""Lengths of the ends of a text that are looked for in it, the longest first."""


class Drafting(Protocol):
    """The draft of one answer."""

    def guess(self, answer: Answer, most: int) -> list[Guess]:
        """Up to `most` tokens that may follow what the answer has so far. Raises GateError where a draft model's logits
        are no finite numbers."""


class Draft(Protocol):
    """Where guesses come from, at most `count` at a time."""

    @property
    def count(self) -> int: ...

    def begin(self, capacity: int, vocab: int) -> Drafting:
        """For one answer: `capacity` positions that prompt and answer take at most, `vocab` ids of the main model."""


@dataclass(frozen=True, slots=True)
class NgramDraft:
    """What followed the last time that the text had the tokens it ends with. (Saxena 2023, prompt lookup decoding)"""

    count: int

    def begin(self, capacity: int, vocab: int) -> Drafting:
        return self

    def guess(self, answer: Answer, most: int) -> list[Guess]:
        return [Guess(token) for token in follow(answer.ids, min(most, self.count))]


def follow(ids: list[int], count: int) -> list[int]:
    """The `count` tokens that followed an earlier place with the same end, the latest of the longest; none if there is
    no such place. Past the end of the text it goes on repeating itself."""
    text = torch.tensor(ids)
    for length in NGRAMS:
        if len(ids) <= length:
            continue
        same = (text.unfold(0, length, 1)[:-1] == text[-length:]).all(1).nonzero()
        if len(same):
            start = int(same[-1]) + length
            found: list[int] = []
            for index in range(start, start + count):
                found.append(ids[index] if index < len(ids) else found[index - len(ids)])
            return found
    return []


@dataclass(frozen=True, slots=True)
class ModelDraft:
    """A smaller or coarser model of the same vocabulary."""

    model: Model
    count: int

    def begin(self, capacity: int, vocab: int) -> Drafting:
        cache = KVCache(self.model.config, 1, capacity, self.model.dtype, self.model.device)
        return _ModelDrafting(self, cache, vocab)


class _ModelDrafting:
    def __init__(self, draft: ModelDraft, cache: KVCache, vocab: int) -> None:
        self._draft, self._cache, self._vocab = draft, cache, vocab
        self._read: list[int] = []

    @torch.inference_mode()
    def guess(self, answer: Answer, most: int) -> list[Guess]:
        ids = list(answer.ids)
        guesses: list[Guess] = []
        if max(ids) >= self._draft.model.config.vocab_size:
            return guesses
        for _ in range(min(most, self._draft.count)):
            guess = self._next(self._logits(ids), answer, ids)
            guesses.append(guess)
            ids.append(guess.token)
            if guess.token in answer.request.stop_ids:
                break
        return guesses

    def _logits(self, ids: list[int]) -> Tensor:
        """Of the token after `ids`, float32 [vocab] of the main model: minus infinity for ids that the draft lacks."""
        known = min(len(self._read), len(ids) - 1)
        while self._read[:known] != ids[:known]:
            known -= 1
        if self._draft.model.must_restart(known, len(ids)):
            known = 0
        self._cache.truncate(known)
        logits = self._draft.model.forward(torch.tensor([ids[known:]]), cache=self._cache, last_only=True)[0, -1]
        self._read = list(ids)
        return logits[: self._vocab]

    def _next(self, logits: Tensor, answer: Answer, ids: list[int]) -> Guess:
        """Drawn as the answer draws, so that the two agree as often as they can."""
        sampling = answer.sampling_after(ids)
        text = torch.tensor(ids)
        try:
            locate(self._draft.model, text[None], partial(require_finite, logits))
        except GateError as error:
            raise GateError(
                f"the draft model: {error.message}", hint="use another `--draft`, or leave it out"
            ) from error
        chances = distribution(logits, text, sampling, answer.prompt_tokens)
        if sampling.greedy:
            return Guess(int(chances.argmax()))
        if len(chances) < self._vocab:
            chances = torch.nn.functional.pad(chances, (0, self._vocab - len(chances)))
        return Guess(draw(chances, answer.random), chances)


def require_same_vocabulary(main: Tokenizer, draft: Tokenizer) -> None:
    """Raises RequestError when an id means one thing to the model and another to the draft."""
    differing = sorted(main.vocabulary().items() ^ draft.vocabulary().items())
    if differing:
        raise RequestError(
            f"`{draft.folder}` cannot draft for `{main.folder}`: vocabularies differ, in `{differing[0][0]}` for one",
            hint="draft with a model of the same family, or with `--draft ngram`",
        )
