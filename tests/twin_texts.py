"""The same texts in two pools: one is read by the plain forward, the other by decode steps, and logits are compared."""

from collections.abc import Callable

import torch

from quantkit.models.transformer import Model
from quantkit.runtime.cache import CacheView
from quantkit.runtime.cache_format import cache_format
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.decoding import Decoding
from quantkit.runtime.page_pool import PagePool


def pool_of(model: Model, kv: str | None = None, pages: int = 6, **options) -> PagePool:
    return PagePool(model.config, pages, cache_format(kv, model.config.head_dim, model.dtype), **options)


class TwinTexts:
    """Texts of these lengths, which are read plainly in both pools; `decode` makes the steps of the second."""

    def __init__(
        self, model: Model, lengths: list[int], kv: str | None, decode: Callable[[Model, PagePool], Decoding], pages: int = 6
    ) -> None:
        self.model = model
        self.pools = [pool_of(model, kv, pages) for _ in range(2)]
        self.texts = [[CacheSequence(pool) for _ in lengths] for pool in self.pools]
        self.decoding = decode(model, self.pools[1])
        random = torch.Generator().manual_seed(0)
        for length, *pair in zip(lengths, *self.texts, strict=True):
            ids = torch.randint(0, 250, (1, length), generator=random)
            for pool, text in zip(self.pools, pair, strict=True):
                model.hidden(ids, cache=CacheView(pool, [text], [length]))

    @torch.inference_mode()
    def read(self, tokens: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of these tokens of each text, plainly and by decode steps."""
        counts = [len(some) for some in tokens]
        assert self.decoding.takes(counts)
        ids = torch.tensor([[token for some in tokens for token in some]])
        plain = self.model(ids, cache=CacheView(self.pools[0], self.texts[0], counts))[0]
        return plain, self.decoding.logits(self.texts[1], tokens)

    def check(self, tokens: list[list[int]], bound: float) -> torch.Tensor:
        """The plain logits; the others are within `bound` of the largest, and agree where the plain ones are sure."""
        plain, found = self.read(tokens)
        assert found.shape == plain.shape and found.dtype == torch.float32
        assert float((found - plain).abs().max()) <= bound * float(plain.abs().max())
        best, second = plain.topk(2).values.unbind(-1)
        sure = best - second > 2 * bound * plain.abs().max()
        assert torch.equal(found.argmax(-1)[sure], plain.argmax(-1)[sure])
        return plain
