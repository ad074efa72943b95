"""Scheduler: many requests on one model and one cache: who runs next, with how many tokens, on which pages.

    scheduler = Scheduler(generator, pool, Limits(most_running=16))
    numbers = [scheduler.add(request) for request in requests]      # more may be added at any time
    for number, delta in scheduler.stream():
        ...
    scheduler.served[number].completion

Each pass has a budget of tokens: one token, or a few guesses as well, of every answer under way, and pieces of prompts
with what is left. A request is admitted when its worst case has pages: prompt and all new tokens, or what a window
holds of them at once. Optimistically, when its prompt has. When an older one needs pages and there are none, the
youngest gives its own back and reads its text again later: often if admitted optimistically, else only where pages went
to the common pool that are needed again, as those do that a window drops and those that a text shared which is read
again.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from quantkit.errors import RequestError
from quantkit.runtime.adapters import AdapterSet
from quantkit.runtime.answer import Answer
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.decode_path import DecodePath
from quantkit.runtime.decoding import Decoding
from quantkit.runtime.generator import Generator
from quantkit.runtime.pace import Pace
from quantkit.runtime.page_pool import CacheFull, PagePool
from quantkit.runtime.page_store import PAGE
from quantkit.runtime.prefix_cache import PrefixCache
from quantkit.runtime.request import Completion, Delta, Request
from quantkit.runtime.running import Running, step


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at once.

    token_budget    tokens in a pass, of all requests together
    most_running    requests that have pages
    optimistic      admit by prompts, not by worst cases
    latency_target  seconds that a pass should take at most: the budget shrinks until it does; None for no target
    """

    token_budget: int = 512
    most_running: int = 16
    optimistic: bool = False
    latency_target: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("token-budget", self.token_budget), ("batch", self.most_running)):
            if value < 1:
                raise RequestError(f"`--{name}` is {value}, expected 1 or more", hint=f"--{name} 16")


@dataclass(frozen=True, slots=True)
class Served:
    """A finished request. `waited_seconds` is from its arrival to its first pages, `preemptions` how often it lost
    them, `shared_tokens` what other requests had read of its prompt before."""

    completion: Completion
    waited_seconds: float
    preemptions: int
    shared_tokens: int


@dataclass(slots=True, eq=False)
class _Entry:
    number: int
    running: Running
    capacity: int
    arrived: float
    admitted: float | None = None
    first: float | None = None
    deltas: list[Delta] = field(default_factory=list)
    preemptions: int = 0
    shared_tokens: int = 0
    turn: int = 0
    kept: bool = False

    def room(self, most: int) -> int:
        """So many tokens, or as many as can still come."""
        return min(most, max(1, self.capacity - self.running.sequence.length))


class Scheduler:
    """Runs what is added. The draft and the adapters are those of `generator` and of each request.

    passes, preemptions  so far
    served               number of a request → what came of it
    """

    def __init__(
        self,
        generator: Generator,
        pool: PagePool,
        limits: Limits | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        """`prefixes` of the same pool: what one request has read, another with the same beginning need not read."""
        self.generator = generator
        self.pool = pool
        self.limits = limits or Limits()
        self.prefixes = prefixes
        self.pace = Pace(self.limits.token_budget, self.limits.latency_target)
        self.passes = 0
        self.preemptions = 0
        self.served: dict[int, Served] = {}
        self._decodings: dict[str, Decoding] = {}
        self._count = 0
        self._waiting: deque[_Entry] = deque()
        self._running: list[_Entry] = []  # in the order of admission

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> int:
        """Its number. Raises RequestError for one that never fits, CheckpointError for adapters that do not."""
        self.generator.admit(request)
        capacity = len(request.ids) + request.max_new_tokens
        held = self.generator.cache.held(capacity)
        if held > self.pool.capacity:
            raise RequestError(
                f"{len(request.ids)} prompt tokens and {request.max_new_tokens} new ones need {held} positions, "
                f"the cache has {self.pool.capacity}",
                hint=f"`--cache-tokens {-(-held // PAGE) * PAGE}`, or fewer `--max-new-tokens`",
            )
        running = Running(Answer(request, self.generator.tokenizer), CacheSequence(self.pool))
        self._waiting.append(_Entry(self._count, running, capacity, time.perf_counter()))
        self._count += 1
        return self._count - 1

    def stream(self) -> Iterator[tuple[int, Delta]]:
        """Number and delta, as they come, until nothing is left to do."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[tuple[int, Delta]]:
        """One pass, or one for each set of adapters; what came of it."""
        self._admit()
        for entry in self._running:
            entry.running.align(self.generator.model)
        parts = self._make_room(self._choose())
        start = time.perf_counter()
        came: list[tuple[int, Delta]] = []
        groups: dict[str, list[tuple[_Entry, int]]] = {}
        for entry, most in parts:
            groups.setdefault(entry.running.answer.request.adapters.key, []).append((entry, most))
        for group in groups.values():
            adapters = group[0][0].running.answer.request.adapters
            model, decoding = self.generator.adapted(adapters), self._decoding(adapters)
            results = step(model, self.pool, [(entry.running, most) for entry, most in group], decoding)
            self.passes += 1
            for (entry, _), deltas in zip(group, results, strict=True):
                self._keep(entry, deltas)
                came += [(entry.number, delta) for delta in deltas]
        self.pace.note(sum(most for _, most in parts), time.perf_counter() - start)
        return came

    @property
    def decode_path(self) -> DecodePath:
        """Which way the steps of answers take that have no adapters."""
        return self._decoding(AdapterSet()).path

    def _decoding(self, adapters: AdapterSet) -> Decoding:
        if adapters.key not in self._decodings:
            self._decodings[adapters.key] = self.generator.decoding(adapters, self.pool)
        return self._decodings[adapters.key]

    def _admit(self) -> None:
        """Those that have waited longest, as long as they have pages. Who begins as one under way does waits for it to
        be read."""
        later: list[_Entry] = []
        while self._waiting and len(self._running) < self.limits.most_running:
            entry = self._waiting.popleft()
            if self._will_share(entry):
                later.append(entry)
            elif not self._open(entry):
                later.append(entry)
                break
        self._waiting.extendleft(reversed(later))

    def _open(self, entry: _Entry) -> bool:
        """Give it its pages, if there are so many."""
        running = entry.running
        ids, key = running.answer.ids, running.answer.request.adapters.key
        optimistic = self.limits.optimistic
        tokens = self.generator.cache.held(len(ids) + 1 if optimistic else entry.capacity)
        try:
            if self.prefixes is None:
                sequence = CacheSequence(self.pool, tokens)
            else:
                sequence = self.prefixes.open(ids, tokens, key)
        except CacheFull:
            return False
        if optimistic and self.pool.free_pages < len(self._running):  # each may soon want another page
            sequence.close()
            return False
        running.sequence = sequence
        if entry.admitted is None:
            entry.shared_tokens = sequence.length
            entry.admitted = time.perf_counter()
            running.drafting = self.generator.drafting(entry.capacity)
        self._running.append(entry)
        return True

    def _will_share(self, entry: _Entry) -> bool:
        """Whether a request under way is still reading pages that this one begins with too."""
        if self.prefixes is None:
            return False
        request, ids = entry.running.answer.request, entry.running.answer.ids
        end = PAGE * (1 + len(self.prefixes.find(ids, request.adapters.key)))
        for other in self._running:
            running = other.running
            if running.lacking > 1 and running.answer.request.adapters.key == request.adapters.key:
                theirs = running.answer.ids
                if len(ids) > end <= len(theirs) and ids[:end] == theirs[:end]:
                    return True
        return False

    def _choose(self) -> list[tuple[_Entry, int]]:
        """Who takes part in the next pass, each with at most so many tokens: at least one answer and one prompt."""
        prompts = [entry for entry in self._running if entry.running.lacking > 1]
        answers = [entry for entry in self._running if entry.running.lacking == 1]
        budget = self.pace.budget
        left = budget - budget // 4 if prompts else budget  # however many answers there are, prompts go on
        parts: list[tuple[_Entry, int]] = []
        for entry in sorted(answers, key=lambda entry: entry.turn):
            most = entry.room(1 + self.generator.draft_tokens)
            if most > left and parts:
                break
            parts.append((entry, most))
            left -= most
        left = max(1, budget - sum(most for _, most in parts))
        for entry in prompts:
            if left:
                most = min(entry.running.lacking, left, self.generator.cache.piece)
                parts.append((entry, most))
                left -= most
        for entry, _ in parts:
            entry.turn = self.passes + 1
        return parts

    def _make_room(self, parts: list[tuple[_Entry, int]]) -> list[tuple[_Entry, int]]:
        """The same without those who had to give their pages back: the youngest, until the rest has enough."""
        while sum(entry.running.sequence.lacking(most) for entry, most in parts) > self.pool.free_pages:
            if len(self._running) == 1:
                if self.prefixes is not None and self.prefixes.invalidate(everything=True):
                    continue  # pages of its own that were kept for others would have to be copied
                raise CacheFull(
                    f"one request alone needs more than the {self.pool.capacity} positions of the cache",
                    hint=f"--cache-tokens {self._running[0].capacity}",
                )
            youngest = self._running.pop()
            self._close(youngest)
            youngest.preemptions += 1
            self.preemptions += 1
            self._waiting.appendleft(youngest)
            parts = [(entry, most) for entry, most in parts if entry is not youngest]
        return parts

    def _keep(self, entry: _Entry, deltas: list[Delta]) -> None:
        now = time.perf_counter()
        if deltas and entry.first is None:
            entry.first = now
        entry.deltas += deltas
        if entry.running.answer.finish_reason is None:
            if entry.running.lacking == 1 and not entry.kept:
                self._share(entry)
            return
        self._close(entry)
        self._running.remove(entry)
        admitted, first = entry.admitted or now, entry.first or now
        tally = entry.running.tally if self.generator.draft else None
        prompt = len(entry.running.answer.request.ids)
        path = self._decoding(entry.running.answer.request.adapters).path
        completion = Completion(tuple(entry.deltas), prompt, first - admitted, now - first, tally, decode_path=path)
        waited = admitted - entry.arrived
        self.served[entry.number] = Served(completion, waited, entry.preemptions, entry.shared_tokens)

    def _share(self, entry: _Entry) -> None:
        """Let others have what it has read: once its prompt is read, and when it gives its pages back."""
        if self.prefixes is not None:
            answer, entry.kept = entry.running.answer, True
            entry.running.cut()  # no one may find positions under other tokens than those that were read there
            self.prefixes.keep(entry.running.sequence, answer.ids, answer.request.adapters.key)

    def _close(self, entry: _Entry) -> None:
        self._share(entry)
        entry.running.sequence.close()
        entry.kept = False
