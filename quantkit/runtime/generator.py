"""Generator: one prompt in, tokens out: prefill, then one step for each token, with stop rules and streaming text.

    generator = Generator(model, tokenizer)
    for delta in generator.stream(Request(tokenizer.chat(messages), max_new_tokens=100)):
        print(delta.text, end="")
"""

import time
from collections.abc import Iterator

import torch

from quantkit.models.transformer import Model
from quantkit.runtime.adapters import AdapterSet
from quantkit.runtime.answer import Answer
from quantkit.runtime.cache import KVCache
from quantkit.runtime.finite import locate
from quantkit.runtime.request import Completion, Delta, Request, check
from quantkit.runtime.tokenizer import Tokenizer

WARM_UP_ROWS = 64
"""More rows than any kernel treats one by one."""


class Generator:
    """A model with its tokenizer. Every request gets its own cache, of `cache_tokens` positions or of what it needs."""

    def __init__(self, model: Model, tokenizer: Tokenizer, cache_tokens: int | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.cache_tokens = cache_tokens
        self._adapted: dict[str, Model] = {}

    def stream(self, request: Request) -> Iterator[Delta]:
        """New tokens as they come; every check is made before this returns.

        Raises RequestError for a request that does not fit, CheckpointError for adapters that do not, GateError if the
        model's logits are no finite numbers.
        """
        capacity = check(request, self.model.config, self.cache_tokens)
        request.adapters.check(self.model.config, self.model.architecture, self.tokenizer.folder)
        return self._steps(request, KVCache(self.model.config, 1, capacity, self.model.dtype, self.model.device))

    @torch.inference_mode()
    def warm_up(self, request: Request) -> None:
        """Compile what the request will run, many rows at once and one alone, so that its timings are its own."""
        for rows in {min(len(request.ids), WARM_UP_ROWS), 1}:
            self.model.forward(torch.tensor([request.ids[:rows]]), last_only=True)

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
        for delta in self.stream(request):
            if not deltas:
                first = time.perf_counter()
            deltas.append(delta)
        end = time.perf_counter()
        return Completion(tuple(deltas), len(request.ids), first - start, end - first)

    def _steps(self, request: Request, cache: KVCache) -> Iterator[Delta]:
        answer, model = Answer(request, self.tokenizer), self.adapted(request.adapters)
        while answer.finish_reason is None:
            yield from self._step(model, answer, cache)

    @torch.inference_mode()
    def _step(self, model: Model, answer: Answer, cache: KVCache) -> list[Delta]:
        """Feed what the cache does not have yet; the deltas that follow."""
        known = min(cache.length, len(answer.ids) - 1)
        if model.must_restart(cache.length, len(answer.ids)):
            known = 0
        cache.truncate(known)
        logits = model.forward(torch.tensor([answer.ids[known:]]), cache=cache, last_only=True)[0, -1]
        return locate(model, torch.tensor([answer.ids]), lambda: answer.advance(logits))
