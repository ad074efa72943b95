"""Slices of packed weights: some of their outputs, or some of their inputs, with codes and scales as they are.

Nothing is dequantized and no grid changes: a slice holds the very weights of the whole, and multiplies by the same
kernels. Outputs can be chosen one by one. Inputs share scales in groups, and kernels read rows in units of 32: a slice
takes a multiple of 32 rows of a group, or all of it.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quantkit import kernels
from quantkit.errors import FormatError
from quantkit.kernels.protocol import Exl2Weight, GptqWeight

UNIT = 32
"""Rows that cannot be taken apart."""
Kept = dict[str, Tensor]
"""What is on disk beside the codes, by suffix."""


def gptq_outputs(weight: GptqWeight, kept: Kept, columns: Tensor) -> tuple[GptqWeight, Kept]:
    """These columns, int64 [n]. Raises FormatError where their zero points do not fill whole words."""
    if len(columns) * weight.bits % 32:
        raise FormatError(
            f"{len(columns)} outputs of {weight.bits} bits do not fill whole words of zero points",
            hint="split the model over fewer processes",
        )
    backend = kernels.backend(weight.words.device.type)
    zeros = backend.unpack(kept["qzeros"].t().contiguous(), weight.bits)[columns]
    scales, values = (part[:, columns].contiguous() for part in (weight.scales, weight.zeros))
    own = {**kept, "scales": scales, "qzeros": backend.pack(zeros, weight.bits).t().contiguous()}
    if "bias" in kept:
        own["bias"] = kept["bias"][columns]
    words = weight.words[:, columns].contiguous()
    return replace(weight, words=words, scales=scales, zeros=values), own


def gptq_inputs(weight: GptqWeight, kept: Kept, rows: Tensor) -> tuple[GptqWeight, Kept]:
    """These rows, int64 [n], numbered anew from 0, with the groups that they are in. Raises FormatError where they
    break a group."""
    _require(gptq_divides(weight.group, rows), len(rows))
    group = weight.group[rows]
    used = torch.bincount(group, minlength=len(weight.scales)) > 0
    group = (used.cumsum(0) - 1)[group]
    backend = kernels.backend(weight.words.device.type)
    words = backend.pack(backend.unpack(weight.words, weight.bits)[rows], weight.bits)
    scales, zeros = weight.scales[used], weight.zeros[used]
    own = {"qzeros": kept["qzeros"][used], "scales": scales, "g_idx": group.to(torch.int32)}
    return GptqWeight(words, scales, zeros, group, weight.bits), own


def gptq_divides(group: Tensor, rows: Tensor) -> bool:
    """Whether `gptq_inputs` can take these rows."""
    whole = torch.bincount(group)
    return len(rows) % UNIT == 0 and _in_units(torch.bincount(group[rows], minlength=len(whole)), whole)


def gptq_runs(group: Tensor) -> tuple[Tensor, ...] | None:
    """See `StoredTensor.runs`."""
    if bool((torch.bincount(group) % UNIT).any()):
        return None
    return (group.argsort(stable=True),)


def exl2_outputs(weight: Exl2Weight, kept: Kept, columns: Tensor) -> tuple[Exl2Weight, Kept]:
    """These columns, int64 [n], padded to a multiple of 32 with copies of the last one, which nobody reads."""
    columns = torch.cat([columns, columns[-1:].expand(-len(columns) % UNIT)])
    backend = kernels.backend(weight.words.device.type)
    codes = backend.unpack(weight.scale_codes.t().contiguous(), 4)[columns]
    scale_codes = backend.pack(codes, 4).t().contiguous()
    own = {**kept, "q_scale": scale_codes}
    if "bias" in kept:
        own["bias"] = kept["bias"][columns]
    return replace(weight, words=weight.words[:, columns].contiguous(), scale_codes=scale_codes), own


def exl2_inputs(weight: Exl2Weight, rows: Tensor) -> tuple[Exl2Weight, Kept]:
    """These input features, int64 [n], numbered anew from 0. Raises FormatError where they break a group."""
    order, parts = _numbered(weight, rows)
    taken = torch.tensor([int((part >= 0).sum()) for part in parts])
    _require(_exl2_in_units(weight, taken), len(rows))
    backend = kernels.backend(weight.words.device.type)
    words, kinds, start = [], [], 0
    for (bits, count), part in zip(weight.groups, parts, strict=True):
        end = start + count * bits // 32
        if bool((part >= 0).any()):
            words.append(backend.pack(backend.unpack(weight.words[start:end], bits)[part >= 0], bits))
            kinds.append((bits, int((part >= 0).sum())))
        start = end
    used = taken > 0
    order, scale_codes, scale_max = order[order >= 0], weight.scale_codes[used], weight.scale_max[used]
    firsts = torch.tensor([len(part) for part in words]).cumsum(0) - torch.tensor([len(part) for part in words])
    pairs = torch.stack([torch.tensor([bits for bits, _ in kinds]), firsts], 1)
    own = {
        "q_scale": scale_codes,
        "q_scale_max": scale_max,
        "q_groups": pairs.flatten().to(torch.int16),
        "q_invperm": order.argsort().to(torch.int32),
    }
    return Exl2Weight(torch.cat(words), scale_codes, scale_max, tuple(kinds), order), own


def exl2_divides(weight: Exl2Weight, rows: Tensor) -> bool:
    """Whether `exl2_inputs` can take these features."""
    _, parts = _numbered(weight, rows)
    return _exl2_in_units(weight, torch.tensor([int((part >= 0).sum()) for part in parts]))


def exl2_runs(weight: Exl2Weight) -> tuple[Tensor, ...] | None:
    """See `StoredTensor.runs`: one for each width."""
    if any(count % UNIT for _, count in weight.groups):
        return None
    widths: dict[int, int] = {}
    for bits, count in weight.groups:
        widths[bits] = widths.get(bits, 0) + count
    return weight.order.split(list(widths.values()))


def _numbered(weight: Exl2Weight, rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Of each stored row its place in `rows`, -1 where it is not there; all of them, and by group."""
    number = torch.full_like(weight.order, -1)
    number[rows] = torch.arange(len(rows), device=number.device)
    order = number[weight.order]
    return order, order.split([count for _, count in weight.groups])


def _exl2_in_units(weight: Exl2Weight, taken: Tensor) -> bool:
    return _in_units(taken, torch.tensor([count for _, count in weight.groups]))


def _require(divides: bool, count: int) -> None:
    if not divides:
        raise FormatError(
            f"{count} inputs break a group into other pieces than units of {UNIT} rows",
            hint="split the model over fewer processes",
        )


def _in_units(taken: Tensor, whole: Tensor) -> bool:
    return not bool(((taken % UNIT != 0) & (taken != whole)).any())
