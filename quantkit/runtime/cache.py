"""KVCache: the keys and values of past positions, contiguous, and the check that they fit before any work is done.

    capacity = admit(prompt_tokens=12, max_new_tokens=100, context=2048)
    cache = KVCache(config, batch=1, capacity=capacity, dtype=torch.float32, device="cpu")
    model.forward(ids, cache=cache)          # appends to every layer, then advances once

A cache never wraps, drops or overwrites a position: what does not fit is an error.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from quantkit.errors import RequestError


class CacheShape(Protocol):
    """What a cache needs to know of a model; `models.config.ModelConfig` is one."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class KVCache:
    """Keys and values `[batch, kv_heads, capacity, head_dim]` for each layer; `length` positions are filled."""

    def __init__(
        self, config: CacheShape, batch: int, capacity: int, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> None:
        """Raises RequestError where there is no memory for it."""
        self.capacity = capacity
        self.length = 0
        shape = (config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim)
        try:
            self._keys = torch.empty(shape, dtype=dtype, device=device)
            self._values = torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, TypeError) as error:  # TypeError: a number beyond 64 bits
            raise RequestError(
                f"a cache of {capacity} positions needs {2 * math.prod(shape) * dtype.itemsize / 2**30:,.1f} GiB, "
                "which are not to be had",
                hint="use a smaller `--max-new-tokens`",
            ) from error

    @property
    def size_bytes(self) -> int:
        return 2 * self._keys.numel() * self._keys.element_size()

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store `s` new positions of one layer, `[batch, kv_heads, s, head_dim]`; returns all positions so far.

        The result includes the new ones; it is a view and holds until the next append. Raises RequestError when they
        do not fit.
        """
        end = self.length + keys.shape[2]
        if end > self.capacity:
            raise RequestError(
                f"the cache holds {self.capacity} positions, {self.length} are filled and "
                f"{keys.shape[2]} more do not fit",
                hint=f"make the cache {end} positions long",
            )
        self._keys[layer, :, :, self.length : end] = keys
        self._values[layer, :, :, self.length : end] = values
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]

    def clear(self) -> None:
        """Forget all positions."""
        self.length = 0

    def advance(self, positions: int) -> None:
        """Make the positions that every layer has appended part of the past."""
        self.length += positions


def admit(prompt_tokens: int, max_new_tokens: int, context: int, capacity: int | None = None) -> int:
    """The cache positions a request gets, checked before any work: `capacity`, or exactly what is needed.

    context   positions the model can tell apart
    capacity  positions of a cache of a given size, or None

    Raises RequestError with all the numbers and the smallest change that helps. Nothing is ever cut silently.
    """
    if prompt_tokens < 1:
        raise RequestError("the prompt is empty: there is nothing to continue", hint="pass at least one word")
    if max_new_tokens < 1:
        raise RequestError(f"{max_new_tokens} new tokens are asked for, expected at least 1", hint="--max-new-tokens 1")
    needed = prompt_tokens + max_new_tokens
    for limit, owner in ((context, "the model's context"), (capacity, "the cache")):
        if limit is None or needed <= limit:
            continue
        room = limit - prompt_tokens
        shorter = f"shorten the prompt by {needed - limit} tokens"
        raise RequestError(
            f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones need {needed} positions, "
            f"{owner} has {limit}: {needed - limit} too few",
            hint=f"`--max-new-tokens {room}`, or {shorter}"
            if room > 0
            else f"{shorter}: the prompt alone does not fit",
        )
    return needed if capacity is None else capacity
