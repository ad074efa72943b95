"""CacheSequence: the pages of one text, in order, and how many positions of them are filled."""

from collections.abc import Sequence as Many

from quantkit.runtime.page_pool import CacheFull, Page, PagePool
from quantkit.runtime.page_store import PAGE


class CacheSequence:
    """One text in a pool. `pages` are its pages in order; a page that no query sees any more is None.

    length  positions that are filled
    known   positions of the text so far as it is known, which may be more: some ropes depend on it, see `models.rope`

    `tokens` positions are set aside at once; it grows beyond them while the pool has pages. It may begin with `shared`
    pages, whose positions it then has. Raises CacheFull.
    """

    def __init__(self, pool: PagePool, tokens: int = 0, shared: Many[Page] = ()) -> None:
        self.pool = pool
        self.pages: list[Page | None] = []
        self.length = PAGE * len(shared)
        self.known = 0
        self._settled: set[int] = set()
        for page in shared:
            page.users += 1
        self.pages += shared
        try:
            self.pages += pool.take(max(0, -(-tokens // PAGE) - len(shared)), shared[-1] if shared else None)
        except CacheFull:
            self.close()
            raise

    def lacking(self, count: int) -> int:
        """Pages that the pool must have free for `count` more positions."""
        return sum(page is None or page.users > 1 for page in self._touched(self.length + count))

    def prepare(self, count: int) -> None:
        """Make room for `count` more positions: drop what no query sees, take pages, own those that will be written,
        and keep the newest on the device. Raises CacheFull, and then nothing is lost."""
        self._drop_unseen()
        end = self.length + count
        for index, page in enumerate(self._touched(end), self.length // PAGE):
            if page is None:
                before = self.pages[index - 1] if index else None
                (own,) = self.pool.take(1, before)
            elif page.users > 1:
                own = self.pool.copy(page)
                self._forget(index)
            else:
                continue
            self.pages[index : index + 1] = [own]
        if self.pool.resident:
            self._settle(end)

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on. Pages stay with the sequence."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a sequence of {self.length} positions cannot be cut to {length}")
        if not self.can_cut(length):
            raise ValueError(f"positions before {length} that its window sees were dropped")
        self.length = length

    def can_cut(self, length: int) -> bool:
        """Whether what a query at `length` sees is still there; at 0 there is nothing to see."""
        seen = self.pages[self._first_seen(length) // PAGE : -(-length // PAGE)]
        return all(page is not None for page in seen)

    def restart(self) -> None:
        """Forget all positions, to read the text again. Pages that it alone has stay with it; of the others, which
        would have to be copied to be written, it takes new ones as far as there are any."""
        self.length = 0
        for index in self._settled:
            page = self.pages[index]
            assert page is not None
            self.pool.unsettle(page)
        self._settled.clear()
        shared = [index for index, page in enumerate(self.pages) if page is not None and page.users > 1]
        for index in shared:
            self._forget(index)
        self.pages = [page for page in self.pages if page is not None]
        self.pages += self.pool.take(min(len(shared), self.pool.free_pages))

    def close(self) -> None:
        """Give all pages back."""
        self.truncate(0)
        for index in range(len(self.pages)):
            self._forget(index)
        self.pages.clear()

    def visible(self, window: int | None, sinks: int) -> tuple[tuple[int, int], ...]:
        """Intervals of positions that a query at `length` or later sees, up to `length`."""
        if window is None or self.length + 1 - window <= sinks:
            return ((0, self.length),)
        recent = (self.length + 1 - window, self.length)
        return ((0, sinks), recent) if sinks else (recent,)

    def _touched(self, end: int) -> list[Page | None]:
        """The pages that positions from `length` to before `end` are in; None for those to be taken."""
        first, last = self.length // PAGE, -(-end // PAGE)
        have = self.pages[first:last]
        return have + [None] * (last - first - len(have))

    def _first_seen(self, length: int) -> int:
        return 0 if self.pool.window is None else max(0, length + 1 - self.pool.window)

    def _drop_unseen(self) -> None:
        first = -(-self.pool.sinks // PAGE)
        for index in range(first, self._first_seen(self.length) // PAGE):
            self._forget(index)

    def _forget(self, index: int) -> None:
        page = self.pages[index]
        if page is None:
            return
        if index in self._settled:
            self._settled.remove(index)
            self.pool.unsettle(page)
        self.pages[index] = None
        self.pool.release(page)

    def _settle(self, end: int) -> None:
        """The first page and those of the newest positions on the device, others not."""
        newest = range(max(0, end - self.pool.resident) // PAGE, -(-end // PAGE))
        wanted = {0, *newest}
        for index in self._settled - wanted:
            page = self.pages[index]
            assert page is not None
            self.pool.unsettle(page)
        self._settled &= wanted
        for index in sorted(wanted - self._settled):
            page = self.pages[index]
            if page is not None:
                self.pool.settle(page, written=index * PAGE < self.length)
                self._settled.add(index)
