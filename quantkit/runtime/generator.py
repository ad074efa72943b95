"""Generator: one prompt in, tokens out: prefill, then one step for each token, with stop rules and streaming text.

    generator = Generator(model, tokenizer)
    for delta in generator.stream(Request(tokenizer.chat(messages), max_new_tokens=100)):
        print(delta.text, end="")

Generation ends with a `finish_reason`: `stop` (a stop id came), `length` (as many tokens as asked for) or `callback`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from quantkit.errors import RequestError
from quantkit.models.config import ModelConfig
from quantkit.models.transformer import Model
from quantkit.runtime.cache import KVCache, admit
from quantkit.runtime.finite import locate
from quantkit.runtime.sampler import Sampling, choose
from quantkit.runtime.tokenizer import Tokenizer

WARM_UP_ROWS = 64
"""More rows than any kernel treats one by one."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to continue and how: token ids, the most new tokens, the choice of each, the ids that end the answer."""

    ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Delta:
    """One new token and the text it completes, often "" inside a character; the last one has a `finish_reason`.

    A stop id comes as a token, but adds no text.
    """

    text: str
    token_id: int
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. `token_ids` ends with the stop id if one came; `text` is the text of all deltas together.

    prefill_seconds   from the start to the first token
    decode_seconds    from the first token to the last
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first by the time they took; None when there is only one."""
        steps = len(self.token_ids) - 1
        return steps / self.decode_seconds if steps else None


def check(request: Request, config: ModelConfig, cache_tokens: int | None = None) -> int:
    """The cache positions that a request gets; needs no weights, so it can be asked before any work.

    Raises RequestError for a request that does not fit into the cache or the model's context, or with unknown ids.
    """
    capacity = admit(len(request.ids), request.max_new_tokens, config.context, cache_tokens)
    if max(request.ids) >= config.vocab_size:
        raise RequestError(
            f"the prompt has token id {max(request.ids)}, the model knows {config.vocab_size} ids: "
            "tokenizer and model do not belong together",
            hint="copy the tokenizer files of the original model into the folder",
        )
    return capacity


class Generator:
    """A model with its tokenizer. Every request gets its own cache, of `cache_tokens` positions or of what it needs."""

    def __init__(self, model: Model, tokenizer: Tokenizer, cache_tokens: int | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.cache_tokens = cache_tokens

    def stream(self, request: Request) -> Iterator[Delta]:
        """New tokens as they come; every check is made before this returns.

        Raises RequestError for a request that does not fit, GateError if the model's logits are no finite numbers.
        """
        capacity = check(request, self.model.config, self.cache_tokens)
        return self._steps(request, KVCache(self.model.config, 1, capacity, self.model.dtype, self.model.device))

    @torch.inference_mode()
    def warm_up(self, request: Request) -> None:
        """Compile what the request will run, many rows at once and one alone, so that its timings are its own."""
        for rows in {min(len(request.ids), WARM_UP_ROWS), 1}:
            self.model.forward(torch.tensor([request.ids[:rows]]), last_only=True)

    def run(self, request: Request, on_delta: Callable[[Delta], bool] = lambda delta: True) -> Completion:
        """The whole answer, with timings. `on_delta` sees each delta and returns whether to go on."""
        pieces: list[str] = []
        ids: list[int] = []
        reason = "callback"
        start = first = time.perf_counter()
        for delta in self.stream(request):
            if not ids:
                first = time.perf_counter()
            pieces.append(delta.text)
            ids.append(delta.token_id)
            go_on = on_delta(delta)
            if delta.finish_reason:
                reason = delta.finish_reason
            if not go_on:
                break
        end = time.perf_counter()
        return Completion("".join(pieces), tuple(ids), reason, len(request.ids), first - start, end - first)

    def _steps(self, request: Request, cache: KVCache) -> Iterator[Delta]:
        text = self.tokenizer.stream()
        random = torch.Generator().manual_seed(request.seed)
        seen = list(request.ids)
        inputs = seen
        for left in reversed(range(request.max_new_tokens)):
            if self.model.must_restart(cache.length, len(seen)):
                cache.clear()
                inputs = seen
            token = self._step(inputs, seen, cache, request.sampling, random)
            seen.append(token)
            inputs = [token]
            if token in request.stop_ids:
                yield Delta(text.finish(), token, "stop")
                return
            piece = text.push(token)
            yield Delta(piece, token) if left else Delta(piece + text.finish(), token, "length")

    @torch.inference_mode()
    def _step(
        self, inputs: list[int], seen: list[int], cache: KVCache, sampling: Sampling, random: torch.Generator
    ) -> int:
        """Feed what the cache does not have yet; the id that follows."""
        logits = self.model.forward(torch.tensor([inputs]), cache=cache, last_only=True)[0, -1]
        text = torch.tensor(seen)
        return locate(self.model, text[None], lambda: choose(logits, text, sampling, random))
