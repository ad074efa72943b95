"""Random weights in packed form, for self-tests and benchmarks. Seeded: the same arguments give the same weight."""

import torch
from torch import Tensor

from quantkit.kernels.protocol import Exl2Weight, GptqWeight
from quantkit.kernels.reference import ReferenceBackend


def codes(rows: int, out: int, bits: int, seed: int = 0) -> Tensor:
    """uint8 [rows, out], every code of the width about equally often."""
    return torch.randint(0, 1 << bits, (rows, out), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def gptq(
    rows: int,
    out: int,
    bits: int,
    group_size: int,
    *,
    dtype: torch.dtype = torch.float16,
    act_order: bool = False,
    seed: int = 0,
) -> GptqWeight:
    """Scales of both signs and any zero point: more than a quantizer would write, nothing that the format forbids."""
    random = torch.Generator().manual_seed(seed)
    group = torch.arange(rows) // group_size
    if act_order:
        group = group[torch.randperm(rows, generator=random)]
    groups = int(group.max()) + 1
    scales = (torch.randn(groups, out, generator=random) * 0.02).to(dtype)
    zeros = torch.randint(0, 1 << bits, (groups, out), dtype=torch.uint8, generator=random)
    return GptqWeight(ReferenceBackend().pack(codes(rows, out, bits, seed), bits), scales, zeros, group, bits)


def exl2(groups: tuple[tuple[int, int], ...], out: int, *, in_order: bool = False, seed: int = 0) -> Exl2Weight:
    """`groups` as (bits, rows)."""
    random = torch.Generator().manual_seed(seed)
    rows = sum(count for _, count in groups)
    order = torch.arange(rows) if in_order else torch.randperm(rows, generator=random)
    reference = ReferenceBackend()
    words = [reference.pack(codes(count, out, bits, seed + g), bits) for g, (bits, count) in enumerate(groups)]
    scale_codes = reference.pack(codes(out, len(groups), 4, seed + 1000), 4).t().contiguous()
    scale_max = (torch.rand(len(groups), generator=random) * 0.5).to(torch.float16)
    return Exl2Weight(torch.cat(words), scale_codes, scale_max, groups, order)
