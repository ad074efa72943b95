"""A cache with a planted fault: the values of every second append of a text are lost, its keys are not."""

import torch

from quantkit.runtime.cache_format import Rows
from quantkit.runtime.page_pool import PagePool
from quantkit.runtime.page_store import PageStore


class Forgetful:
    """A tier of the cache that keeps keys only."""

    def __init__(self, tier: PageStore) -> None:
        self._tier = tier

    def put(self, layer: int, position: int, keys: Rows, values: Rows) -> None:
        lost = Rows(torch.zeros_like(values.codes), None if values.scales is None else torch.zeros_like(values.scales))
        self._tier.put(layer, position, keys, lost)


def plant(monkeypatch, first: int = 0) -> None:
    """From now on, in every format and tier, in appends that begin at position `first` of a text or behind it."""
    places = PagePool.places

    def forgetful(self, pages, start, end):
        spans = places(self, pages, start, end)
        return [span._replace(tier=Forgetful(span.tier)) for span in spans] if start % 2 and start >= first else spans

    monkeypatch.setattr(PagePool, "places", forgetful)
