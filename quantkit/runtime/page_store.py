"""PageStore: the memory of one tier of the cache, whole pages for all layers, and which of its pages are free.

A page is 256 positions of one sequence in all layers. Pages of a head lie side by side, so that pages which are
neighbours in memory are read as one stretch, without a copy.
"""

from collections.abc import Sequence
from itertools import groupby

import torch

from quantkit.errors import RequestError
from quantkit.kernels.steps import PAGE, Pages
from quantkit.runtime.cache_format import CacheFormat, Rows, Side


class PageStore:
    """`pages` pages, those of each layer on its own of `devices`. Positions are counted through all pages: row r of
    page p is 256 p + r.

    Raises RequestError where there is no memory for it.
    """

    def __init__(
        self,
        kv_heads: int,
        pages: int,
        form: CacheFormat,
        devices: Sequence[torch.device],
        pinned: bool = False,
    ) -> None:
        self.pages = pages
        self._form = form
        self.size_bytes = len(devices) * kv_heads * pages * PAGE * form.row_bytes
        try:
            self._keys, self._values = (
                _empty(side, (kv_heads, pages * PAGE), devices, pinned) for side in (form.keys, form.values)
            )
        except (RuntimeError, TypeError) as error:  # TypeError: a number beyond 64 bits
            raise RequestError(
                f"a cache of {pages * PAGE} positions needs {self.size_bytes / 2**30:,.1f} GiB, "
                "which are not to be had",
                hint="use a smaller `--max-new-tokens`, or `--kv q4_0`",
            ) from error
        self._free = set(range(pages))  # after the memory was had: an absurd number has no place here either

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages, neighbours where there are so many, the first one next to page `after` if that is free."""
        assert count <= len(self._free)
        if not count:
            return []
        first = self._start(count, after)
        run = [page for page in range(first, min(first + count, self.pages)) if page in self._free]
        taken = run + sorted(self._free - set(run))[: count - len(run)]
        self._free.difference_update(taken)
        return taken

    def give(self, page: int) -> None:
        assert page not in self._free
        self._free.add(page)

    def put(self, layer: int, position: int, keys: Rows, values: Rows) -> None:
        """Stores rows from `position` on."""
        count = keys.codes.shape[1]
        for here, rows in ((self._keys[layer], keys), (self._values[layer], values)):
            here.codes.narrow(1, position, count).copy_(rows.codes)
            if here.scales is not None and rows.scales is not None:
                here.scales.narrow(1, position, count).copy_(rows.scales)

    def get(self, layer: int, position: int, count: int) -> tuple[Rows, Rows]:
        """Keys and values of `count` rows from `position` on: views, which hold until something is put there."""
        return self._keys[layer].cut(position, count), self._values[layer].cut(position, count)

    def paged(self, layer: int) -> tuple[Pages, Pages]:
        """Keys and values as the kernels of a decode step see them: the same memory."""
        keys, values = self._keys[layer], self._values[layer]
        return _paged(keys, self._form.keys), _paged(values, self._form.values)

    def copy(self, page: int, source: "PageStore", source_page: int) -> None:
        """A whole page, all layers, from another tier or from this one."""
        here, there = slice(page * PAGE, (page + 1) * PAGE), slice(source_page * PAGE, (source_page + 1) * PAGE)
        for mine, others in ((self._keys, source._keys), (self._values, source._values)):
            for rows, other in zip(mine, others, strict=True):
                rows.codes[:, here] = other.codes[:, there]
                if rows.scales is not None and other.scales is not None:
                    rows.scales[:, here] = other.scales[:, there]

    def _start(self, count: int, after: int | None) -> int:
        """Where to begin: beside `after`, at the lowest run of `count` free pages, or at the lowest free page."""
        if after is not None and after + 1 in self._free:
            return after + 1
        free = sorted(self._free)
        for index in range(len(free) - count + 1):
            if free[index + count - 1] - free[index] == count - 1:
                return free[index]
        return free[0] if free else 0


def _paged(rows: Rows, side: Side) -> Pages:
    codes, scales = (
        None if part is None else part.unflatten(1, (-1, PAGE)).transpose(0, 1) for part in (rows.codes, rows.scales)
    )
    assert codes is not None
    return Pages(codes, scales, side.bits, side.block)


def _empty(side: Side, shape: tuple[int, int], devices: Sequence[torch.device], pinned: bool) -> list[Rows]:
    """Rows of each layer, zeros: one that was never written shows. Layers of one device lie in one piece."""
    rows: list[Rows] = []
    for device, layers in groupby(devices):
        whole = (len(list(layers)), *shape)
        codes = torch.zeros(*whole, side.width, dtype=side.dtype, device=device, pin_memory=pinned)
        if side.groups:
            scales = torch.zeros(*whole, side.groups, dtype=torch.float16, device=device, pin_memory=pinned)
            rows += [Rows(*layer) for layer in zip(codes, scales, strict=True)]
        else:
            rows += [Rows(layer, None) for layer in codes]
    return rows
