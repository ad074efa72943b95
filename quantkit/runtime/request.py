"""Requests and what comes back of them: the prompt with its settings, deltas as they come, the finished completion.

    Request(ids, max_new_tokens=100, sampling=Sampling(temperature=0.7), stops=("\\n\\n",), banned=("sorry",))

A generation ends with a `finish_reason`: `stop` (a stop id or stop string came), `length` (as many tokens as asked
for), `callback` (a callback ended it, or whatever reason it gave), `banned` (no token avoids the banned strings).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from quantkit.errors import RequestError
from quantkit.models.config import ModelConfig
from quantkit.runtime.adapters import AdapterSet
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.decode_path import DecodePath
from quantkit.runtime.page_pool import CacheUse
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.stops import require_text


@dataclass(frozen=True, slots=True)
class Delta:
    """One new token and the text it completes, often "" inside a character or where a stop string may have begun.

    A stop id comes as a token, but adds no text; the text ends where a stop string begins.

    log_probability  of the token as the model said it, before penalties, temperature and the rest; natural logarithm
    finish_reason    of the last one, else None
    stop             the stop string that ended the text, if one did
    """

    text: str
    token_id: int
    finish_reason: str | None = None
    log_probability: float = 0.0
    stop: str | None = None

    def ending(self, reason: str = "callback") -> "Delta":
        """The same as the last one of its answer: what a callback returns to stop."""
        return replace(self, finish_reason=reason)


Callback = Callable[[Delta], Delta | None]
"""Sees each delta before anyone else: returns it, another in its place, None to drop it, or one with a `finish_reason`
to end the answer there. What the model has read stays as it is; only what comes out changes."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to continue and how.

    ids             the prompt
    max_new_tokens  the most new tokens
    sampling        how to choose each, or a function of the ids of the answer so far that says how to choose the next
    seed            the same seed draws the same answer
    stop_ids        ids that end the answer
    stops           texts that end the answer before them, however they are cut into tokens
    banned          texts that the answer must not contain: it goes back to where one began and takes another way
    callbacks       each sees what the one before it returned
    adapters        applied while the model runs, for this request alone

    Raises RequestError for an empty stop or banned string.
    """

    ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling | Callable[[Sequence[int]], Sampling] = field(default_factory=Sampling)
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    banned: tuple[str, ...] = ()
    callbacks: tuple[Callback, ...] = ()
    adapters: AdapterSet = field(default_factory=AdapterSet)

    def __post_init__(self) -> None:
        require_text("--stop", self.stops)
        require_text("--ban", self.banned)


@dataclass(slots=True)
class Tally:
    """What guesses were worth.

    passes    of the model that gave at least one token
    tokens    that they gave
    checked   passes with guesses among them
    guessed   tokens that were guessed
    accepted  of these
    """

    passes: int = 0
    tokens: int = 0
    checked: int = 0
    guessed: int = 0
    accepted: int = 0

    @property
    def accepted_length(self) -> float:
        """Guesses accepted in a pass that had some."""
        return self.accepted / self.checked if self.checked else 0.0

    @property
    def passes_saved(self) -> int:
        """Passes that the same tokens would have taken one by one, less those it took."""
        return self.tokens - self.passes

    def as_json(self) -> dict[str, int | float]:
        return {
            "passes": self.passes,
            "passes_saved": self.passes_saved,
            "guessed_tokens": self.guessed,
            "accepted_tokens": self.accepted,
            "accepted_length": self.accepted_length,
        }


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer, as the callbacks let it through. `token_ids` ends with the stop id if one came.

    prefill_seconds   from the start to the first token
    decode_seconds    from the first token to the last
    tally             what guesses were worth, where there was a draft
    cache             what its cache took, where it had one to itself
    decode_path       which way the steps after the prompt took
    """

    deltas: tuple[Delta, ...]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    tally: Tally | None = None
    cache: CacheUse | None = None
    decode_path: DecodePath | None = None

    @property
    def text(self) -> str:
        """The text of all deltas together."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(delta.token_id for delta in self.deltas)

    @property
    def log_probabilities(self) -> tuple[float, ...]:
        """Of each token, as the model said it."""
        return tuple(delta.log_probability for delta in self.deltas)

    @property
    def finish_reason(self) -> str:
        return self.deltas[-1].finish_reason or "callback"

    @property
    def stop(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self.deltas[-1].stop

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first by the time they took; None when there is only one, or all came at once."""
        steps = len(self.deltas) - 1
        return steps / self.decode_seconds if steps and self.decode_seconds else None


def check(request: Request, config: ModelConfig, plan: CachePlan | None = None, draft_tokens: int = 0) -> int:
    """The cache positions that a request needs; no weights are needed, so it can be asked before any work.

    Raises RequestError for a request that does not fit into the cache or the model's context, or with unknown ids.
    """
    needed = (plan or CachePlan()).admit(len(request.ids), request.max_new_tokens, config.context, draft_tokens)
    if max(request.ids) >= config.vocab_size:
        raise RequestError(
            f"the prompt has token id {max(request.ids)}, the model knows {config.vocab_size} ids: "
            "tokenizer and model do not belong together",
            hint="copy the tokenizer files of the original model into the folder",
        )
    return needed
