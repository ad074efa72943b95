"""Conversations that a model has with itself: bundled prompts, answered by many at once until a budget is used up.

An answer that ends before its budget is followed by a bundled question of the user, so that every conversation reaches
the length where a lossy cache or weights too coarse begin to show. All run side by side, each over its own pages of one
cache, one pass of the weights for a token of each.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files

import torch
from torch import Tensor

from quantkit.calibration.text import held_back_text
from quantkit.errors import CheckpointError, RequestError
from quantkit.evaluators.degeneration import Answer
from quantkit.models.transformer import Model
from quantkit.progress import Progress, Silent
from quantkit.runtime.cache import CacheView
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.finite import locate, require_finite
from quantkit.runtime.page_pool import PagePool
from quantkit.runtime.sampler import Sampling, choose
from quantkit.runtime.tokenizer import Tokenizer

MOST_ANSWERS = 16
"""A conversation ends after this many, however much of its budget is left: a model that says nothing is heard out."""
MARK = "\u241eanswer\u241e"
"""Stands for an answer while the template around it is looked at."""
SIDE_BY_SIDE = 16
"""Conversations at once: more of them need more memory for the cache."""
APPENDS = (1, 2, 3, 5, 8)
"""Tokens at once when a conversation is read again: what a cache does with several at once is looked at too."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A bundled prompt.

    ask           what the user says
    alone         whether a healthy small model answers it without loops, so that it tells something without a reference
    least_tokens  an answer that ends before has not done what was asked
    short         one or a few words are asked for, so that the answer has to end
    context       characters of bundled text in front, with `needle` in their middle
    find          what the first answer has to contain, alternatives separated by `|`
    quick         part of the small set
    """

    name: str
    kind: str
    ask: str
    alone: bool
    least_tokens: int
    short: bool = False
    context: int = 0
    needle: str = ""
    find: str = ""
    quick: bool = False

    @property
    def text(self) -> str:
        """The user's first words, the text around a needle included."""
        if not self.context:
            return self.ask
        text = held_back_text()[: self.context]
        middle = text.find(". ", len(text) // 2) + 2
        return f"{text[:middle]}{self.needle} {text[middle:]}\n\n{self.ask}"

    def found_in(self, answer: str) -> bool | None:
        """Whether an answer has what it should; None where nothing is looked for."""
        return any(part.lower() in answer.lower() for part in self.find.split("|")) if self.find else None


def bundled_prompts(quick: bool) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    """The prompts, and what the user says when an answer has ended."""
    data = json.loads(files("quantkit.evaluators").joinpath("data", "probe.json").read_text(encoding="utf-8"))
    prompts = tuple(Prompt(**entry) for entry in data["prompts"])
    return tuple(prompt for prompt in prompts if prompt.quick or not quick), tuple(data["follow_ups"])


@dataclass(frozen=True, slots=True)
class Frame:
    """How a tokenizer writes a conversation: the ids that begin it, and those between an answer and the next."""

    tokenizer: Tokenizer
    follow_ups: tuple[str, ...]

    def begin(self, prompt: Prompt) -> list[int]:
        """A chat where the model has a template that takes it, else plain text."""
        try:
            return self.tokenizer.chat([{"role": "user", "content": prompt.text}])
        except (RequestError, CheckpointError):
            return self.tokenizer.encode(f"{prompt.text}\n", special=True)

    def go_on(self, turn: int) -> list[int]:
        """What stands between the end of answer number `turn` and the beginning of the next."""
        ask = self.follow_ups[turn % len(self.follow_ups)]
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": MARK},
            {"role": "user", "content": ask},
        ]
        try:
            between = self.tokenizer.template().render(messages).rpartition(MARK)[2]
        except (RequestError, CheckpointError):
            between = f"\n\n{ask}\n"
        return self.tokenizer.encode(between)


@dataclass(slots=True)
class Conversation:
    """One conversation as it goes. `answered` marks the ids that the model has said itself."""

    prompt: Prompt
    seen: list[int]
    sampling: Sampling
    random: torch.Generator
    pending: list[int]
    left: int
    answers: list[Answer] = field(default_factory=list)
    answered: list[bool] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)
    _entropies: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, prompt: Prompt, frame: Frame, sampling: Sampling, seed: int, tokens: int) -> "Conversation":
        ids = frame.begin(prompt)
        random = torch.Generator().manual_seed(seed)
        return cls(prompt, list(ids), sampling, random, list(ids), tokens, answered=[False] * len(ids))

    def hear(self, token: int, entropy: float, frame: Frame) -> None:
        """Take the next token of the model."""
        if token in frame.tokenizer.eos_ids:
            self._close(frame, stopped=True)
            if len(self.answers) == MOST_ANSWERS:
                self.left = 0
            else:
                self._say(frame.go_on(len(self.answers) - 1))
            return
        self.seen.append(token)
        self.answered.append(True)
        self.pending = [token]
        self._ids.append(token)
        self._entropies.append(entropy)
        self.left -= 1
        if self.left <= 0:
            self._close(frame, stopped=False)

    def _say(self, ids: Sequence[int]) -> None:
        self.seen += ids
        self.answered += [False] * len(ids)
        self.pending = list(ids)

    def _close(self, frame: Frame, stopped: bool) -> None:
        text = frame.tokenizer.decode(self._ids)
        self.answers.append(Answer(tuple(self._ids), tuple(self._entropies), stopped, text))
        self._ids.clear()
        self._entropies.clear()


@torch.inference_mode()
def converse(
    model: Model,
    conversations: Sequence[Conversation],
    frame: Frame,
    cache: CachePlan,
    progress: Progress | None = None,
) -> int:
    """Let every conversation use its budget up; returns how many pages had to be streamed.

    Raises GateError when logits are not finite, RequestError where there is no memory for the cache.
    """
    streamed = 0
    total = sum(conversation.left for conversation in conversations)
    with (progress or Silent()).task(f"talking, cache {cache.label(model)}", total=total) as task:
        for start in range(0, len(conversations), SIDE_BY_SIDE):
            part = conversations[start : start + SIDE_BY_SIDE]
            room = [most_positions(one.prompt, frame, one.left) for one in part]
            pool = cache.pool_of(model, room)
            sequences = [CacheSequence(pool, tokens) for tokens in room]
            while active := [index for index, one in enumerate(part) if one.left > 0]:
                before = sum(part[index].left for index in active)
                logits = _forward(
                    model, [part[index] for index in active], pool, [sequences[index] for index in active]
                )
                for index, row, entropy in zip(active, logits, _entropies(logits), strict=True):
                    one = part[index]
                    seen = torch.tensor(one.seen)
                    one.hear(choose(row, seen, one.sampling, one.random), entropy, frame)
                task.advance(before - sum(max(0, part[index].left) for index in active))
            streamed += pool.pages_streamed
    return streamed


def most_positions(prompt: Prompt, frame: Frame, tokens: int) -> int:
    """Positions that a conversation of a prompt may take."""
    turns = [len(frame.go_on(index)) for index in range(MOST_ANSWERS)]
    return len(frame.begin(prompt)) + tokens + sum(turns)


def _forward(
    model: Model, conversations: Sequence[Conversation], pool: PagePool, sequences: Sequence[CacheSequence]
) -> Tensor:
    """Logits `[conversations, vocab]` behind what each has pending."""
    inputs = []
    for one, sequence in zip(conversations, sequences, strict=True):
        if model.must_restart(sequence.length, len(one.seen)):
            sequence.truncate(0)
            one.pending = list(one.seen)
        inputs.append(one.pending)
    view = CacheView(pool, sequences, [len(ids) for ids in inputs])
    flat = torch.tensor([[index for ids in inputs for index in ids]])
    logits = model.forward(flat, cache=view, wanted=view.last)[0]
    for one, row in zip(conversations, logits, strict=True):
        locate(model, torch.tensor([one.seen]), partial(require_finite, row))
    return logits


def _entropies(logits: Tensor) -> list[float]:
    """Nats, of each row of `[n, vocab]`."""
    likely = logits.log_softmax(-1)
    values: list[float] = (-(likely.exp() * likely).sum(-1)).tolist()
    return values


@torch.inference_mode()
def read_again(model: Model, conversation: Conversation, cache: CachePlan) -> Tensor:
    """Logits `[answered tokens, vocab]` of what a conversation's model said, read a few tokens at a time (`APPENDS`).

    Raises GateError when logits are not finite.
    """
    ids = conversation.seen
    pool = cache.pool_of(model, [len(ids)])
    sequence = CacheSequence(pool, len(ids))
    sequence.known = len(ids)
    first = conversation.answered.index(True)
    kept, done, turn = [], 0, 0
    while done < len(ids) - 1:
        count = first if done == 0 else min(APPENDS[turn % len(APPENDS)], len(ids) - 1 - done)
        turn += 1
        following = range(done + 1, done + count + 1)
        wanted = torch.tensor([at - done - 1 for at in following if conversation.answered[at]], dtype=torch.int64)
        view = CacheView(pool, [sequence], [count])
        logits = model.forward(torch.tensor([ids[done : done + count]]), cache=view, wanted=wanted)[0]
        locate(model, torch.tensor([ids]), partial(require_finite, logits))
        kept.append(logits)
        done += count
    return torch.cat(kept)


@torch.inference_mode()
def read_whole(model: Model, conversation: Conversation) -> Tensor:
    """The same logits from one pass without a cache. Raises GateError when they are not finite."""
    ids = torch.tensor([conversation.seen])
    before = torch.tensor(conversation.answered[1:]).nonzero()[:, 0]
    logits = model.head(model.hidden(ids[:, :-1])[:, before])[0]
    locate(model, ids, partial(require_finite, logits))
    return logits
