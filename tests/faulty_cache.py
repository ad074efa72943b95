"""A cache with a planted fault: the values of every second append of a text are lost, its keys are not."""

import torch

from quantkit.runtime.cache_format import Rows
from quantkit.runtime.page_store import PageStore


def plant(monkeypatch) -> None:
    """From now on, in every format and tier."""
    put = PageStore.put

    def forgetful(self, layer, position, keys, values):
        if position % 2:
            values = Rows(torch.zeros_like(values.codes), None if values.scales is None else torch.zeros_like(values.scales))
        put(self, layer, position, keys, values)

    monkeypatch.setattr(PageStore, "put", forgetful)
