"""CacheView: what a forward pass sees of the cache, the new tokens of one text or of several side by side.

    cache = KVCache(config, batch=1, capacity=164, dtype=torch.float32, device="cpu")
    model.forward(ids, cache=cache)          # every layer stores and attends, then the texts are longer

    view = CacheView(pool, [first, second], counts=[1, 30])          # ids [1, 31]: tokens of two texts in one row
    logits = model.forward(ids, cache=view, wanted=view.last)        # [1, 2, vocab]

A cache never wraps or overwrites a position, and drops one only where a window was asked for: what does not fit is an
error before anything is stored.
"""

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.models.attention import attend
from quantkit.runtime.cache_format import cache_format
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.page_pool import CacheShape, PagePool, Span
from quantkit.runtime.page_store import PAGE


class CacheView:
    """The next tokens of `sequences`, as `models.attention.Cache` has it: `counts` of each, side by side in one row of
    ids, or as many of each as there are columns of ids, one row for each sequence, where no counts are given.

    A sequence is read and written by itself, so that its results depend on no other.
    """

    def __init__(self, pool: PagePool, sequences: Many[CacheSequence], counts: Many[int] | None = None) -> None:
        self.pool = pool
        self.sequences = list(sequences)
        self._given = counts
        self._counts: Many[int] = counts or ()
        self._places: list[list[Span]] = []
        self._sources: dict[tuple[int, int | None], list[Span]] = {}

    @property
    def last(self) -> Tensor:
        """int64 [sequences]: the column of the last token of each, where counts are given."""
        return torch.tensor(self._counts).cumsum(0) - 1

    def begin(self, count: int) -> tuple[Tensor, Tensor]:
        """See `models.attention.Cache`. Raises CacheFull, before anything is stored."""
        self._counts = self._given or [count] * len(self.sequences)
        assert self._given is None or sum(self._given) == count
        self._sources.clear()
        self._places.clear()
        starts, lengths = [], []
        for sequence, new in zip(self.sequences, self._counts, strict=True):
            sequence.prepare(new)
        for sequence, new in zip(self.sequences, self._counts, strict=True):
            end = sequence.length + new
            self._places.append(self.pool.places(sequence.pages, sequence.length, end))
            starts.append(torch.arange(sequence.length, end))
            lengths.append(torch.full((new,), max(end, sequence.known)))
        if self._given is None:
            return torch.stack(starts), torch.stack(lengths)
        return torch.cat(starts)[None], torch.cat(lengths)[None]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """See `models.attention.Cache`. What a query finds in its own new tokens is what was stored of them, so that
        results do not depend on how many tokens come at once."""
        form, sinks = self.pool.form, 0
        if self.pool.window is not None and (window is None or window >= self.pool.window):
            window, sinks = self.pool.window, self.pool.sinks
        if form.keys.rotated:
            q, k = form.keys.turn(q), form.keys.turn(k)
        if form.values.rotated:
            v = form.values.turn(v)
        mixed = []
        for index, row in enumerate(self._rows(q, k, v)):
            queries, keys, values = row
            self.pool.write(layer, form.keys.encode(keys[0]), form.values.encode(values[0]), self._places[index])
            keys, values = self.pool.read(layer, self._read_from(index, window, sinks), q.dtype)
            found = attend(queries, keys[None], values[None], scale=scale, window=window, cap=cap, sinks=sinks)
            mixed.append(found)
        whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=0 if self._given is None else 2)
        return form.values.turn(whole) if form.values.rotated else whole

    def advance(self) -> None:
        """See `models.attention.Cache`."""
        for sequence, new in zip(self.sequences, self._counts, strict=True):
            sequence.length += new

    def _rows(self, *parts: Tensor) -> list[tuple[Tensor, ...]]:
        """`[1, heads, new, d]` of each sequence."""
        if len(self.sequences) == 1:
            return [parts]
        if self._given is None:
            return list(zip(*(part.split(1, dim=0) for part in parts), strict=True))
        return list(zip(*(part.split(list(self._counts), dim=2) for part in parts), strict=True))

    def _read_from(self, index: int, window: int | None, sinks: int) -> list[Span]:
        """Where all is that a sequence's new tokens see, themselves included; the same for all layers of a window."""
        spans = self._sources.get((index, window))
        if spans is None:
            sequence = self.sequences[index]
            *older, (start, end) = sequence.visible(window, sinks)
            intervals = [*older, (start, end + self._counts[index])]
            spans = [span for one in intervals for span in self.pool.sources(sequence.pages, *one)]
            self._sources[index, window] = spans
        return spans


class KVCache(CacheView):
    """A cache of its own for `batch` rows of ids that grow together, `capacity` positions each, stored in `dtype`."""

    def __init__(
        self, config: CacheShape, batch: int, capacity: int, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> None:
        """Raises RequestError where there is no memory for it."""
        pages = -(-capacity // PAGE)
        pool = PagePool(config, batch * pages, cache_format(None, config.head_dim, dtype), device)
        super().__init__(pool, [CacheSequence(pool, capacity) for _ in range(batch)])
        self.capacity = capacity

    @property
    def length(self) -> int:
        """Positions that are filled."""
        return self.sequences[0].length

    @property
    def size_bytes(self) -> int:
        return self.pool.use.cache_bytes

    def begin(self, count: int) -> tuple[Tensor, Tensor]:
        """See `CacheView`. Raises RequestError when they do not fit."""
        end = self.length + count
        if end > self.capacity:
            raise RequestError(
                f"the cache holds {self.capacity} positions, {self.length} are filled and {count} more do not fit",
                hint=f"make the cache {end} positions long",
            )
        return super().begin(count)

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on."""
        for sequence in self.sequences:
            sequence.truncate(length)

    def clear(self) -> None:
        """Forget all positions."""
        self.truncate(0)
