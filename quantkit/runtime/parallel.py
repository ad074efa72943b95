"""ParallelPlan: what each of several processes holds of a model that they run together, in numbers alone.

    plan = ParallelPlan.make(config, size=2, quantized=True)
    share = plan.share(rank=1)              # the config of what process 1 holds: its heads, its width of the MLP

Heads go by key-value groups, the width of an MLP in units of rows, vocabulary and states in rows (Shoeybi et al. 2019,
Megatron-LM, section 3). Which inputs of an MLP a process has is free, since no one outside sees them: it takes whole
groups of the rows that `down` stores, of each width of codes alike, so that scattered orders cost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from quantkit.errors import UsageError
from quantkit.formats.slices import UNIT
from quantkit.models.config import ModelConfig

MOST = 1024
"""Processes that a hint counts up to."""


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """`size` processes; weights come apart in units of so many rows or columns: 1 where no weight is quantized."""

    config: ModelConfig
    size: int
    unit: int

    @classmethod
    def make(cls, config: ModelConfig, size: int, quantized: bool) -> "ParallelPlan":
        """Raises UsageError, with the numbers that are possible, where heads or widths cannot be shared out."""
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if not _shares_heads(heads, kv_heads, size):
            possible = ", ".join(str(n) for n in range(1, MOST) if _shares_heads(heads, kv_heads, n))
            raise UsageError(
                f"{heads} attention heads on {kv_heads} key-value heads cannot be shared out to {size} processes",
                hint=f"--nproc-per-node with one of {possible}",
            )
        plan = cls(config, size, UNIT if quantized else 1)
        for width in plan._mlp_widths:
            plan.spans(width, "an MLP")
        plan.spans(config.hidden_size, "the residual stream")
        plan.spans(config.vocab_size, "a vocabulary")
        return plan

    def share(self, rank: int) -> ModelConfig:
        """The config of what one process holds. Vocabulary and residual stream stay whole."""
        config, experts = self.config, self.config.experts
        if experts is not None:
            shared = len(self.spans(experts.shared_width)[rank]) if experts.shared_width else 0
            experts = replace(experts, width=len(self.spans(experts.width)[rank]), shared_width=shared)
        dense = config.intermediate_size
        return replace(
            config,
            num_heads=len(self.heads(rank)),
            num_kv_heads=len(self.kv_heads(rank)),
            intermediate_size=len(self.spans(dense)[rank]) if dense else 0,
            experts=experts,
        )

    def heads(self, rank: int) -> range:
        """The query heads of one process."""
        count = self.config.num_heads // self.size
        return range(rank * count, (rank + 1) * count)

    def kv_heads(self, rank: int) -> range:
        """The key-value heads that these read. With more processes than such heads several hold the same one."""
        heads, group = self.heads(rank), self.config.num_heads // self.config.num_kv_heads
        return range(heads.start // group, (heads.stop - 1) // group + 1)

    def spans(self, count: int, what: str = "a weight") -> list[range]:
        """Consecutive parts, as even as whole units allow, one for each process. Raises UsageError for an empty one."""
        unit = self.unit if count % self.unit == 0 else 1
        units = count // unit
        if units < self.size:
            raise UsageError(
                f"{what} of {count} in units of {unit} cannot be shared out to {self.size} processes",
                hint=f"--nproc-per-node {units}",
            )
        ends = [units * (rank + 1) // self.size * unit for rank in range(self.size)]
        return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def inputs(self, width: int, runs: Sequence[Tensor] | None) -> list[Tensor]:
        """The inputs of a `down` of this width that each process takes, int64, in the order in which it has them.

        runs  see `StoredTensor.runs`
        """
        spans = self.spans(width)
        if runs is None:
            return [torch.arange(span.start, span.stop) for span in spans]
        unit = self.unit if all(len(run) % self.unit == 0 for run in runs) and width % self.unit == 0 else 1
        taken = apportion([len(run) // unit for run in runs], [len(span) // unit for span in spans])
        parts: list[list[Tensor]] = [[] for _ in spans]
        for run, counts in zip(runs, taken, strict=True):
            for part, piece in zip(parts, run.split([count * unit for count in counts]), strict=True):
                part.append(piece)
        return [torch.cat(part) for part in parts]

    @property
    def _mlp_widths(self) -> list[int]:
        experts = self.config.experts
        widths = [self.config.intermediate_size]
        if experts is not None:
            widths += [experts.width, experts.shared_width]
        return [width for width in widths if width]


def apportion(runs: Sequence[int], shares: Sequence[int]) -> list[list[int]]:
    """Units of each run for each share: in all exactly the shares, in every run as near to even as whole units are.

    runs, shares  of the same sum; returns a row for each run, a column for each share
    """
    total, given, rows = sum(runs), [0] * len(shares), []
    assert total == sum(shares)
    for run, so_far in zip(runs, accumulate(runs), strict=True):
        row = [run * share // total for share in shares]
        given = [before + units for before, units in zip(given, row, strict=True)]
        for _ in range(run - sum(row)):
            behind = [share * so_far - got * total for share, got in zip(shares, given, strict=True)]
            last = behind.index(max(behind))
            row[last] += 1
            given[last] += 1
        rows.append(row)
    return rows


def _shares_heads(heads: int, kv_heads: int, size: int) -> bool:
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
