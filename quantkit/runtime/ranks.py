"""Ranks: the processes that run one model together, and the few things that they tell each other.

Started by `torchrun`, which gives each process its number; NCCL carries what is on GPUs, gloo what is on CPUs. Every
process runs the same steps on the same tokens, and hands over partial sums and slices in the middle of a block: what
`sum` and `gather` return is the same, bit for bit, in all of them.

All processes are equal here. A choice by topology (NVLink in a machine, a network between machines) would be made in
`join`, which is where the group of processes comes from.
"""

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from quantkit.errors import BackendError


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process is number `rank` of `size`. Alone unless made with `join`."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: str = "auto") -> "Ranks":
        """All processes that `torchrun` started, or those of the group that torch.distributed has already; alone
        where there is neither. Each one gets a GPU of its own, unless `device` is `cpu`.

        Raises BackendError where there are fewer GPUs than processes.
        """
        if _started() == 1 and not (dist.is_available() and dist.is_initialized()):
            return cls()
        if not dist.is_available():
            raise BackendError("this build of torch has no torch.distributed", hint="start without `torchrun`")
        if not dist.is_initialized():
            on_gpu = device != "cpu" and torch.cuda.is_available()
            if on_gpu:
                _take_gpu(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
            atexit.register(_end)
        return cls(dist.get_rank(), dist.get_world_size())

    def sum(self, part: Tensor) -> Tensor:
        """float32: the sum of the parts of all processes, of one shape."""
        total = part.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """`[m, widths[rank]]` of each process → `[m, sum(widths)]`, side by side."""
        widest = max(widths)
        own = torch.nn.functional.pad(part, (0, widest - part.shape[1])).contiguous()
        parts = [torch.empty_like(own) for _ in widths]
        dist.all_gather(parts, own)
        return torch.cat([found[:, :width] for found, width in zip(parts, widths, strict=True)], dim=1)

    def least(self, number: int) -> int:
        """The smallest that any of them has: what all have to agree on and each finds out for itself."""
        if self.size == 1:
            return number
        lowest = torch.tensor([number])
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        return int(lowest)

    def of_first(self, numbers: list[int]) -> list[int]:
        """What the first of them has: what each makes for itself and may come out otherwise, as a date does."""
        if self.size == 1:
            return numbers
        count = torch.tensor([len(numbers)])
        dist.broadcast(count, src=0)
        told = torch.zeros(int(count), dtype=torch.int64)
        if self.rank == 0:
            told = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(told, src=0)
        return [int(number) for number in told]


def is_first() -> bool:
    """Whether this process speaks for all that `torchrun` started."""
    return _started() == 1 or os.environ.get("RANK", "0") == "0"


def _started() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _take_gpu(local: int) -> None:
    count = torch.cuda.device_count()
    if local >= count:
        raise BackendError(
            f"process {local} of this machine has no GPU of its own, there are {count}",
            hint=f"--nproc-per-node {count}, or `--device cpu`",
        )
    torch.cuda.set_device(local)
