"""CachePlan: the cache as it is asked for, and the check that a request fits before any work is done.

    plan = CachePlan(kv="int8", tokens=8192)
    needed = plan.admit(prompt_tokens=3000, max_new_tokens=1024, context=8192)     # or RequestError, with all numbers
    pool = plan.pool(config, needed, model.dtype, model.device)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.errors import RequestError, UsageError
from quantkit.memory import PREFILL_TOKENS
from quantkit.models.transformer import Model
from quantkit.runtime.cache_format import cache_format
from quantkit.runtime.page_pool import CacheShape, PagePool, resident_pages
from quantkit.runtime.page_store import PAGE


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What a cache shall be; without anything, what a request needs in the dtype of the multiplications.

    kv              format by name, see `memory.KV_FORMATS`; None for the dtype of the multiplications
    tokens          positions; None for what is needed
    resident        newest positions of each sequence that stay on the device, older ones in host memory; 0 for all
    window          positions that a query sees in any layer, its own included; None for all
    sinks           first positions that it sees beside its window
    beyond_context  let a text outgrow the model's context

    Raises UsageError for a number out of range.
    """

    kv: str | None = None
    tokens: int | None = None
    resident: int = 0
    window: int | None = None
    sinks: int = 0
    beyond_context: bool = False

    def __post_init__(self) -> None:
        least = {"--cache-tokens": (self.tokens, 1), "--kv-resident": (self.resident, 0)}
        least |= {"--kv-window": (self.window, 1), "--kv-sink": (self.sinks, 0)}
        for option, (number, bound) in least.items():
            if number is not None and number < bound:
                raise UsageError(f"`{option}` is {number}, expected {bound} or more", hint=f"{option} {256 * bound}")
        if self.sinks and self.window is None:
            raise UsageError(
                "`--kv-sink` names positions seen beside a window, and there is none",
                hint=f"--kv-window 1024 --kv-sink {self.sinks}",
            )

    @property
    def piece(self) -> int:
        """Tokens of a prompt to read at once. A page where there is a window, which need not hold more then."""
        return PREFILL_TOKENS if self.window is None else PAGE

    def held(self, positions: int) -> int:
        """Of so many positions of a text those that are in the cache at once at most."""
        if self.window is None:
            return positions
        recent = (self.window + self.piece + PAGE - 2) // PAGE + 1
        return min(positions, (-(-self.sinks // PAGE) + recent) * PAGE)

    def admit(self, prompt_tokens: int, max_new_tokens: int, context: int, draft_tokens: int = 0) -> int:
        """The cache positions that a request needs, checked before any work. Nothing is ever cut silently.

        context       positions the model can tell apart, the scaling of its rope counted
        draft_tokens  guessed at a time: they are in the cache while they are checked

        Raises RequestError with all the numbers and the smallest change that helps.
        """
        if prompt_tokens < 1:
            raise RequestError("the prompt is empty: there is nothing to continue", hint="pass at least one word")
        if max_new_tokens < 1:
            raise RequestError(
                f"{max_new_tokens} new tokens are asked for, expected at least 1", hint="--max-new-tokens 1"
            )
        asked = _Asked(prompt_tokens, max_new_tokens, draft_tokens)
        length = prompt_tokens + max_new_tokens
        if length > context and not self.beyond_context:
            raise asked.refused("the model's context", length, context, "`--allow-beyond-context`")
        held = self.held(asked.total)
        if self.tokens is not None and held > self.tokens:
            raise asked.refused("the cache", held, self.tokens, f"`--cache-tokens {_whole(held)}`")
        return held

    def label(self, model: Model) -> str:
        """Format and resident window, in words."""
        form = cache_format(self.kv, model.config.head_dim, model.dtype).name
        return f"{form}, {self.resident} resident" if self.resident else form

    def layer_bytes(self, config: CacheShape, positions: int, dtype: torch.dtype) -> int:
        """What one layer keeps on its device for a text of so many positions."""
        held = _whole(self.tokens or self.held(positions))
        if self.resident:
            held = min(held, PAGE * resident_pages(self.resident))
        return held * config.num_kv_heads * cache_format(self.kv, config.head_dim, dtype).row_bytes

    def pool_of(self, model: Model, lengths: Sequence[int]) -> PagePool:
        """A pool for texts of these lengths, which run at once. Raises as `pool` does."""
        positions = sum(map(_whole, lengths))
        return self.pool(model.config, positions, model.dtype, model.device, len(lengths), model.devices)

    def pool(
        self,
        config: CacheShape,
        positions: int,
        dtype: torch.dtype,
        device: str | torch.device,
        sequences: int = 1,
        devices: Sequence[torch.device] = (),
    ) -> PagePool:
        """A pool of the size that was asked for, or of `positions`; `sequences` run in it at once.

        dtype    that of the multiplications
        devices  where each layer is; `device` for all where none are given

        Raises RequestError where there is no memory for it, UsageError for a format that there is not.
        """
        return PagePool(
            config,
            _whole(self.tokens or positions) // PAGE,
            cache_format(self.kv, config.head_dim, dtype),
            device,
            resident=self.resident,
            sequences=sequences,
            window=self.window,
            sinks=self.sinks,
            devices=devices,
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request is made of."""

    prompt: int
    new: int
    drafted: int

    @property
    def total(self) -> int:
        return self.prompt + self.new + self.drafted

    def refused(self, owner: str, needed: int, limit: int, larger: str) -> RequestError:
        """`larger` is the option that makes the limit larger."""
        parts = f"{self.prompt} prompt tokens and {self.new} new ones"
        if self.drafted and owner == "the cache":
            parts = f"{self.prompt} prompt tokens, {self.new} new and {self.drafted} guessed ones"
        count = _whole(needed) // PAGE
        pages = f" ({count} page{'s' if count > 1 else ''} of {PAGE})" if owner == "the cache" else ""
        lacking = needed - limit
        room = self.new - lacking
        ways = [f"`--max-new-tokens {room}`", larger] if room > 0 else [larger]
        if lacking < self.prompt:
            alone = "" if room > 0 else ": the prompt alone does not fit"
            ways.append(f"shorten the prompt by {lacking} tokens{alone}")
        return RequestError(
            f"{parts} need {needed} positions{pages}, {owner} has {limit}: {lacking} too few", hint=", or ".join(ways)
        )


def _whole(positions: int) -> int:
    """In whole pages."""
    return -(-positions // PAGE) * PAGE
