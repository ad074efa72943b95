"""PrefixCache: full pages of texts that were read before, found again by what they hold.

    prefixes = PrefixCache(pool, model.config)
    sequence = prefixes.open(ids, tokens=len(ids) + 100)        # has the positions of the longest prefix that is known
    model.forward(ids[sequence.length :], cache=CacheView(pool, [sequence]))
    prefixes.keep(sequence, ids)                                # for whoever comes next: another turn, another text

Page n of a text is known by a digest of page n - 1's digest and its own tokens; the chain begins with the adapters that
the text was read with, the ropes of the model and the format of the cache. So a page is found only behind exactly the
tokens it was made behind, and never with another adapter. What nobody uses stays until its page is needed: the least
recently used goes first, and of a text its end before its beginning.
"""

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as Many

import torch

from quantkit.models.config import ModelConfig
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.page_pool import Kept, Page, PagePool
from quantkit.runtime.page_store import PAGE


class PrefixCache:
    """The prefixes in a pool. Adapters are told apart by a text, "" for none; see `adapters.AdapterSet.key`.

    asked_tokens  of all texts opened so far
    found_tokens  of these, what did not have to be read again
    """

    def __init__(self, pool: PagePool, config: ModelConfig) -> None:
        self.pool = pool
        self.asked_tokens = 0
        self.found_tokens = 0
        self._ropes = tuple(dict.fromkeys(config.ropes))
        form = pool.form
        self._root = repr((self._ropes, form.name, form.keys, form.values, pool.window, pool.sinks))

    def __len__(self) -> int:
        """Pages that are kept."""
        return len(self.pool.kept)

    def open(self, ids: Many[int], tokens: int = 0, adapters: str = "") -> CacheSequence:
        """A sequence with room for `tokens` positions that begins with what is known of `ids`; at least one token is
        left to be read. Raises CacheFull where there are too few pages."""
        sequence = CacheSequence(self.pool, tokens, self.find(ids, adapters))
        self.asked_tokens += len(ids)
        self.found_tokens += sequence.length
        return sequence

    def find(self, ids: Many[int], adapters: str = "") -> list[Page]:
        """The pages of the longest known prefix, which is shorter than `ids`."""
        kept = self.pool.kept
        if not self._shares(len(ids)):
            return []
        known = []
        for digest, _ in self._chain(ids[: len(ids) - 1], adapters):
            if digest not in kept:
                break
            known.append(digest)
        for digest in reversed(known):  # the beginning of a text is used later than its end, and outlives it
            kept.move_to_end(digest)
        return [kept[digest].page for digest in known]

    def keep(self, sequence: CacheSequence, ids: Many[int], adapters: str = "") -> None:
        """Keep the full pages of a sequence that has read `ids`, or the first of them, with these adapters."""
        read = min(sequence.length, len(ids))
        if not self._shares(max(read, sequence.known)):
            return
        kept, parent, chain = self.pool.kept, "", []
        for page, (digest, tokens) in zip(sequence.pages, self._chain(ids[:read], adapters), strict=False):
            if page is None:
                break
            if digest not in kept:
                page.users += 1
                kept[digest] = Kept(page, parent, tokens, adapters)
            chain.append(digest)
            parent = digest
        for digest in reversed(chain):
            kept.move_to_end(digest)

    def invalidate(
        self, *, prefix: Many[int] | None = None, adapter: str | None = None, everything: bool = False
    ) -> int:
        """Forget texts that begin with `prefix`, those read with `adapter` ("" for none), or all; returns how many
        pages that were. Sequences that use them go on undisturbed."""
        start = tuple(prefix or ())
        gone = [
            digest
            for digest, one in self.pool.kept.items()
            if everything or one.adapters == adapter or (start and self._begins(digest, start))
        ]
        for digest in gone:
            self.pool.release(self.pool.kept.pop(digest).page)
        return len(gone)

    def _begins(self, digest: str, prefix: tuple[int, ...]) -> bool:
        """Whether the text that ends with this page begins with `prefix`, or lost its beginning and is of no use."""
        pages: list[tuple[int, ...]] = []
        while digest:
            one = self.pool.kept.get(digest)
            if one is None:
                return True
            pages.insert(0, one.tokens)
            digest = one.parent
        text = [token for page in pages[: len(prefix) // PAGE + 1] for token in page]
        return tuple(text[: len(prefix)]) == prefix

    def _chain(self, ids: Many[int], adapters: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Digest and tokens of each full page."""
        digest = hashlib.sha256(f"{self._root}\n{adapters}".encode()).hexdigest()
        for start in range(0, len(ids) // PAGE * PAGE, PAGE):
            tokens = tuple(ids[start : start + PAGE])
            digest = hashlib.sha256(f"{digest}\n{tokens}".encode()).hexdigest()
            yield digest, tokens

    def _shares(self, length: int) -> bool:
        """Whether keys of a text of this length are turned like those of any shorter one: some ropes change with it."""
        return all(
            torch.equal(rope.frequencies(length), rope.frequencies(1)) for rope in self._ropes if rope.depends_on_length
        )
