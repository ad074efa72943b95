"""CachedModel: a model whose texts go through a cache of some format, so that a format can be judged as models are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.models.attention import Cache
from quantkit.models.transformer import Model
from quantkit.runtime.cache import CacheView
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.capacity import CachePlan

STEP = 128
"""Tokens of each text at once: what a cache streams or stores in pieces is seen too."""


@dataclass(frozen=True, slots=True)
class CachedModel(Model):
    """The same model; `hidden` without a cache of its own reads each row through a new one."""

    plan: CachePlan = CachePlan()  # noqa: RUF009 - frozen

    @classmethod
    def of(cls, model: Model, plan: CachePlan) -> "CachedModel":
        parts = (model.config, model.architecture, model.dtype, model.device, model.embedding, model.blocks, model.head)
        return cls(*parts, plan)

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        length: int | None = None,
    ) -> Tensor:
        """See `Model.hidden`. Raises RequestError where a resident window was asked for and every page fits into it:
        nothing would be shown of streaming."""
        if cache is not None or positions is not None:
            return Model.hidden(self, ids, positions, cache, length)
        rows, width = ids.shape
        pool = self.plan.pool_of(self, [width] * rows)
        sequences = [CacheSequence(pool, width) for _ in range(rows)]
        for sequence in sequences:
            sequence.known = width
        view = CacheView(pool, sequences)
        states = [Model.hidden(self, part, cache=view) for part in ids.split(STEP, dim=1)]
        if self.plan.resident and not pool.pages_streamed:
            raise RequestError(
                f"windows of {width} tokens stay resident as a whole: no page was streamed",
                hint="use a smaller `--kv-resident`, or a greater `--length`",
            )
        return torch.cat(states, dim=1)
