"""Generator: one prompt in, tokens out: prefill, then one step for each token, with stop rules and streaming text.

    generator = Generator(model, tokenizer)
    for delta in generator.stream(Request(tokenizer.chat(messages), max_new_tokens=100)):
        print(delta.text, end="")
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from quantkit.models.transformer import Model
from quantkit.runtime.adapters import AdapterSet
from quantkit.runtime.answer import Answer
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.decoding import Decoding
from quantkit.runtime.drafts import Draft, Drafting
from quantkit.runtime.page_pool import PagePool
from quantkit.runtime.request import Completion, Delta, Request, check
from quantkit.runtime.running import Running, step
from quantkit.runtime.tokenizer import Tokenizer

WARM_UP_ROWS = 65
"""More rows than any kernel treats one by one."""


class Generator:
    """A model with its tokenizer. Every request gets its own cache.

    cache  what it shall be
    draft  guesses at tokens, which the model then checks several at once: greedy answers stay the same, drawn ones are
           others of the same distribution
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, cache: CachePlan | None = None, draft: Draft | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache or CachePlan()
        self.draft = draft
        self._adapted: dict[str, Model] = {}

    def stream(self, request: Request) -> Iterator[Delta]:
        """New tokens as they come; every check is made before this returns.

        Raises RequestError for a request that does not fit, CheckpointError for adapters that do not, GateError if the
        model's logits are no finite numbers.
        """
        return self._steps(*self._start(request))

    @torch.inference_mode()
    def warm_up(self, request: Request) -> None:
        """Compile what the request will run, many rows at once and one alone, so that its timings are its own."""
        for rows in {min(len(request.ids), WARM_UP_ROWS), 1}:
            self.model.forward(torch.tensor([request.ids[:rows]]), last_only=True)
        model, plan = self.model, replace(self.cache, tokens=None)
        pool = plan.pool(model.config, 1, model.dtype, model.device, devices=model.devices)
        decoding = Decoding(model, pool, None)
        if decoding.takes([1]):
            decoding.logits([CacheSequence(pool)], [request.ids[:1]])

    def adapted(self, adapters: AdapterSet) -> Model:
        """The model with these adapters, made once; the weights are in memory once for all of them."""
        if not adapters.parts:
            return self.model
        if adapters.key not in self._adapted:
            self._adapted[adapters.key] = adapters.applied(self.model)
        return self._adapted[adapters.key]

    def run(self, request: Request) -> Completion:
        """The whole answer, with timings."""
        deltas: list[Delta] = []
        start = first = time.perf_counter()
        running, decoding = self._start(request)
        for delta in self._steps(running, decoding):
            if not deltas:
                first = time.perf_counter()
            deltas.append(delta)
        end = time.perf_counter()
        tally = running.tally if self.draft else None
        use = running.sequence.pool.use
        return Completion(
            tuple(deltas), len(request.ids), first - start, end - first, tally, use, decoding.path
        )

    def admit(self, request: Request) -> int:
        """The cache positions that a request gets; everything that can be refused is refused here."""
        capacity = check(request, self.model.config, self.cache, self.draft_tokens)
        request.adapters.check(self.model.config, self.model.architecture, self.tokenizer.folder)
        return capacity

    def drafting(self, capacity: int) -> Drafting | None:
        """The draft of one answer, where there is one."""
        return self.draft.begin(capacity, self.model.config.vocab_size) if self.draft else None

    @property
    def draft_tokens(self) -> int:
        """Tokens guessed at a time at most."""
        return self.draft.count if self.draft else 0

    def _start(self, request: Request) -> tuple[Running, Decoding]:
        capacity = self.admit(request)
        model = self.model
        pool = self.cache.pool(model.config, capacity, model.dtype, model.device, devices=model.devices)
        drafting = self.drafting(len(request.ids) + request.max_new_tokens)
        running = Running(Answer(request, self.tokenizer), CacheSequence(pool, capacity), drafting)
        return running, self.decoding(request.adapters, pool)

    @torch.inference_mode()
    def decoding(self, adapters: AdapterSet, pool: PagePool) -> Decoding:
        """Decode steps over a pool, with these adapters."""
        return Decoding.of(self.adapted(adapters), pool)

    def _steps(self, running: Running, decoding: Decoding) -> Iterator[Delta]:
        model = self.adapted(running.answer.request.adapters)
        while running.answer.finish_reason is None:
            (deltas,) = step(model, running.sequence.pool, [(running, self.cache.piece)], decoding)
            yield from deltas
