"""PagePool: pages of 256 positions shared by many sequences, on the device and, where asked for, in host memory.

    pool = PagePool(config, pages=8, form=cache_format("int8", config.head_dim, model.dtype))
    sequence = CacheSequence(pool, tokens=700)        # three pages, side by side where there is room
    logits = model.forward(ids, cache=CacheView(pool, [sequence]))
    sequence.truncate(5)                              # what came after five positions is forgotten
    sequence.close()

With a resident window the host keeps every page, and the device those that hold the newest `resident` positions of a
sequence, and its first one. All writing is done by `write`, which reaches each tier that has a place for a position;
what the device no longer has is streamed in when a layer attends to it.
"""

from collections import OrderedDict
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.kernels.steps import Pages
from quantkit.runtime.cache_format import CacheFormat, Rows
from quantkit.runtime.page_store import PAGE, PageStore


class CacheShape(Protocol):
    """What a cache needs to know of a model; `models.config.ModelConfig` is one."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(slots=True, eq=False)
class Page:
    """One page and its place in each tier, None where it has none.

    users      sequences and prefixes that have it; it is free when there are none
    residents  sequences that want it on the device; counted only where there is a host tier
    """

    device: int | None = None
    host: int | None = None
    users: int = 1
    residents: int = 0


@dataclass(frozen=True, slots=True)
class Kept:
    """A full page that outlives its sequence, with the tokens it stands for and the digest of the page before it; see
    `prefix_cache`."""

    page: Page
    parent: str
    tokens: tuple[int, ...]
    adapters: str


class Span(NamedTuple):
    """`length` neighbouring positions of one tier from `start` on; the first is number `offset` of those asked for."""

    tier: PageStore
    start: int
    length: int
    offset: int

    def meets(self, other: "Span") -> bool:
        """Whether `other` begins where this one ends."""
        ends = (self.start + self.length, self.offset + self.length)
        return self.tier is other.tier and ends == (other.start, other.offset)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a cache takes and did. Bytes are those of codes and scales, to the byte; pages are counted in each layer."""

    kv_format: str
    cache_tokens: int
    cache_bytes: int
    host_bytes: int
    pages_streamed: int


class CacheFull(RequestError):  # noqa: N818 - it is a state, and waiting may help
    """No page is left. A sequence that took its worst case at once does not meet it, unless it gave pages back since,
    as a window does, or writes into pages that it shares."""


class PagePool:
    """All pages of one cache. `pages` is the capacity, of the host tier where there is one.

    resident   positions of each sequence that stay on the device beside its first page; 0 for all, without a host tier
    sequences  how many run at once, for the size of the device tier of a resident window
    devices    where the pages of each layer are kept, beside its weights; `device` for all where none are given
    window     positions that a query sees in any layer, its own included, beside the first `sinks`; None for all
    """

    def __init__(
        self,
        config: CacheShape,
        pages: int,
        form: CacheFormat,
        device: str | torch.device = "cpu",
        *,
        resident: int = 0,
        sequences: int = 1,
        window: int | None = None,
        sinks: int = 0,
        devices: Many[torch.device] = (),
    ) -> None:
        """Raises RequestError where there is no memory for it."""
        self.form = form
        self.device = torch.device(device)
        self.resident = resident
        self.window = window
        self.sinks = sinks
        self.pages_streamed = 0
        self.kept: OrderedDict[str, Kept] = OrderedDict()
        self.devices = tuple(devices) or (self.device,) * config.num_layers
        held = min(pages, sequences * resident_pages(resident)) if resident else pages
        self._device = PageStore(config.num_kv_heads, held, form, self.devices)
        self._host = None
        if resident:
            host = (torch.device("cpu"),) * config.num_layers
            self._host = PageStore(config.num_kv_heads, pages, form, host, self.device.type == "cuda")

    @property
    def capacity(self) -> int:
        """Positions, free or not."""
        return self._main.pages * PAGE

    @property
    def free_pages(self) -> int:
        """Those that can be taken; what is only kept makes room."""
        return self._main.free + sum(one.page.users == 1 for one in self.kept.values())

    @property
    def use(self) -> CacheUse:
        """What it takes on the device and in host memory, and how often a page came from there so far."""
        host = self._host.size_bytes if self._host else 0
        return CacheUse(self.form.name, self.capacity, self._device.size_bytes, host, self.pages_streamed)

    @property
    def _main(self) -> PageStore:
        """The tier that has every page."""
        return self._host or self._device

    def take(self, count: int, after: Page | None = None) -> list[Page]:
        """New pages, beside `after` where it goes. Raises CacheFull."""
        if count > self.free_pages:
            raise CacheFull(
                f"the cache has {self._main.pages} pages of {PAGE} positions, {self.free_pages} are free and "
                f"{count} more are needed",
                hint=f"--cache-tokens {(self._main.pages + count - self.free_pages) * PAGE}",
            )
        self._evict(count - self._main.free)
        if self._host is not None:
            return [Page(host=place) for place in self._host.take(count, after.host if after else None)]
        return [Page(device=place) for place in self._device.take(count, after.device if after else None)]

    def release(self, page: Page) -> None:
        """One user less."""
        page.users -= 1
        if not page.users:
            for tier, place in ((self._device, page.device), (self._host, page.host)):
                if tier is not None and place is not None:
                    tier.give(place)
            page.device = page.host = None

    def copy(self, page: Page) -> Page:
        """A page of its own for a sequence that is about to write into a shared one. Raises CacheFull."""
        (copy,) = self.take(1)
        source, place = (one.device if self._host is None else one.host for one in (page, copy))
        assert source is not None and place is not None
        self._main.copy(place, self._main, source)
        return copy

    def settle(self, page: Page, written: bool) -> None:
        """One more sequence wants this page on the device. It is loaded if it was `written` and is not there."""
        page.residents += 1
        if self._host is None or page.device is not None:
            return
        if not self._device.free:
            raise CacheFull(
                f"the device holds {self._device.pages} pages, and more sequences run than it was made for",
                hint="run fewer at once, or make `--kv-resident` smaller",
            )
        (page.device,) = self._device.take(1)
        if written:
            assert page.host is not None
            self._device.copy(page.device, self._host, page.host)

    def unsettle(self, page: Page) -> None:
        """One sequence less wants it there. The host has all of it, so nothing is written back."""
        page.residents -= 1
        if self._host is not None and not page.residents and page.device is not None:
            self._device.give(page.device)
            page.device = None

    def places(self, pages: Many[Page | None], start: int, end: int) -> list[Span]:
        """Where to write positions from `start` to before `end` of a sequence with these pages: in every tier."""
        spans = self._spans(pages, start, end, self._device)
        return spans + (self._spans(pages, start, end, self._host) if self._host else [])

    def sources(self, pages: Many[Page | None], start: int, end: int) -> list[Span]:
        """Where to read them: on the device what is there, the rest from the host."""
        return self._spans(pages, start, end, None)

    def write(self, layer: int, keys: Rows, values: Rows, spans: Many[Span]) -> None:
        """The one way into the cache: rows of consecutive positions, to all the `places` that these have."""
        for span in spans:
            part = (span.offset, span.length)
            span.tier.put(layer, span.start, keys.cut(*part), values.cut(*part))

    def read(self, layer: int, spans: Many[Span], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values `[kv_heads, t, head_dim]` of all `spans` in turn, still turned as their format has it.

        A view where there is nothing to be put together or decoded; it holds until the next write.
        """
        assert spans
        parts = []
        for span in spans:
            keys, values = span.tier.get(layer, span.start, span.length)
            if span.tier is self._host:
                keys, values = keys.to(self.devices[layer]), values.to(self.devices[layer])
                self.pages_streamed += -(-(span.start % PAGE + span.length) // PAGE)
            parts.append((keys, values))
        if len(parts) > 1:
            keys, values = (Rows.join(side) for side in zip(*parts, strict=True))
        return self.form.keys.decode(keys, dtype), self.form.values.decode(values, dtype)

    def paged(self, layer: int) -> tuple[Pages, Pages]:
        """Keys and values of a layer as the kernels of a decode step see them, for a pool without a host tier."""
        assert self._host is None
        return self._device.paged(layer)

    def _evict(self, count: int) -> None:
        """Forget so many kept pages that nobody uses, the least recently used first."""
        unused = [digest for digest, one in self.kept.items() if one.page.users == 1] if count > 0 else []
        for digest in unused[: max(0, count)]:
            self.release(self.kept.pop(digest).page)

    def _spans(self, pages: Many[Page | None], start: int, end: int, wanted: PageStore | None) -> list[Span]:
        """The pages that are in tier `wanted`, or each in the first that has it; neighbours make one span."""
        spans: list[Span] = []
        position = start
        while position < end:
            page, row = pages[position // PAGE], position % PAGE
            count = min(PAGE - row, end - position)
            assert page is not None, "these positions were dropped"
            here = page.device is not None if wanted is None else wanted is self._device
            tier, place = (self._device, page.device) if here else (self._host, page.host)
            if tier is not None and place is not None:
                span = Span(tier, place * PAGE + row, count, position - start)
                if spans and spans[-1].meets(span):
                    before = spans.pop()
                    span = before._replace(length=before.length + count)
                spans.append(span)
            position += count
        return spans


def resident_pages(resident: int) -> int:
    """Pages that the newest `resident` positions touch at most, and the first one of a sequence."""
    return 2 + (resident + PAGE - 2) // PAGE
