"""Tiles: the layout that the CUDA matmul kernels read, made for the fragments of mma.sync m16n8k16.

Columns are padded to strips of 64, rows stand in the order of their groups, each group padded to runs of 32 rows. A
tile is one run of one strip: 2048 codes, 64 of them for each lane of a warp. With the PTX ISA's names for a fragment,

    lane = 4g + t      column 16f + 8v + g of the strip      row 8t + 4s + 2h + i of the run

where f < 4 is the fragment, s < 2 its half in depth, register r = 2h + v, and i the half of the register. The eight
rows of a lane are neighbours, so that it finds its part of the activations in one 16-byte load.

Codes are split into planes whose widths divide 16, low bits first: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2. A plane of width p
holds 16/p pairs (i = 0 in the low half of a word, i = 1 in the high half) of positions 4s + r in a word; its words are

    [positions·p/16, lane, f]      for p >= 2: 16 bytes for each lane and load
    [lane, f/2]                    for p = 1: both fragments of a pair of f in one word

Scales, zero points and scale codes of a strip are `[group, g, 2f + v]`: what a lane needs of a group is one load.
A padding row has order -1 and its zero point as code, a padding column scale 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from quantkit.kernels.protocol import Exl2Weight, GptqWeight

STRIP = 64
RUN = 32
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}


class _Tensors:
    __slots__ = ()

    @property
    def size_bytes(self) -> int:
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


@dataclass(frozen=True, slots=True, eq=False)
class GptqTiles(_Tensors):
    """words int32 [strips, runs·64·bits] · scales float16 or float32 [strips, groups, 8, 8] · zeros uint8, alike ·
    run_group int32 [runs] · group_shift: s where run r is of group r >> s throughout, else None ·
    order int32 [runs·32], None where row r is input feature r · scale_dtype: of the file (bfloat16 is float32 here)."""

    words: Tensor
    scales: Tensor
    zeros: Tensor
    run_group: Tensor
    group_shift: int | None
    order: Tensor | None
    bits: int
    in_features: int
    out_features: int
    scale_dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Exl2Tiles(_Tensors):
    """words int32 [strips, Σ 64·bits of each run] · scale_codes int32 [strips, groups, 8], eight 4-bit codes each ·
    scale_max float16 [groups] · runs int32 [runs, 4]: first word, bits, group, 0 · order as above · groups as on disk.
    """

    words: Tensor
    scale_codes: Tensor
    scale_max: Tensor
    runs: Tensor
    order: Tensor | None
    groups: tuple[tuple[int, int], ...]
    in_features: int
    out_features: int


def tile(codes: Tensor, bits: int) -> Tensor:
    """uint8 [runs·32, strips·64] → int32 [strips, runs·64·bits]."""
    runs, strips = codes.shape[0] // RUN, codes.shape[1] // STRIP
    # [t, s, h, i] of a row and [f, v, g] of a column → [strip, run, position (s, h, v), lane (g, t), f, i]
    split = codes.view(runs, 4, 2, 2, 2, strips, 4, 2, 8)
    positions = split.permute(5, 0, 2, 3, 7, 8, 1, 6, 4).reshape(strips, runs, 8, 32, 4, 2)
    parts, low = [], 0
    for width in PLANES[bits]:
        plane = positions >> low & (1 << width) - 1
        parts.append(_plane_words(plane, width).view(strips, runs, STRIP * width))
        low += width
    return torch.cat(parts, 2).view(strips, -1)


def untile(words: Tensor, bits: int) -> Tensor:
    """The inverse of `tile`."""
    strips, runs = words.shape[0], words.shape[1] // (STRIP * bits)
    parts = words.view(strips, runs, STRIP * bits).split([STRIP * width for width in PLANES[bits]], 2)
    positions, low = torch.zeros(strips, runs, 8, 32, 4, 2, dtype=torch.uint8, device=words.device), 0
    for width, part in zip(PLANES[bits], parts, strict=True):
        positions |= _plane_codes(part.contiguous(), width) << low
        low += width
    split = positions.view(strips, runs, 2, 2, 2, 8, 4, 4, 2)
    return split.permute(1, 6, 2, 3, 8, 0, 7, 4, 5).reshape(runs * RUN, strips * STRIP)


def tile_columns(values: Tensor) -> Tensor:
    """[groups, strips·64] → [strips, groups, 8, 8]: each lane's eight columns together."""
    groups, out = values.shape
    return values.view(groups, out // STRIP, 8, 8).permute(1, 0, 3, 2).contiguous()


def untile_columns(values: Tensor) -> Tensor:
    """The inverse of `tile_columns`."""
    strips, groups = values.shape[:2]
    return values.permute(1, 0, 3, 2).reshape(groups, strips * STRIP)


def pad_columns(values: Tensor) -> Tensor:
    """[rows, out] → [rows, whole strips], with zeros."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % STRIP))


def gptq_tiles(codes: Tensor, weight: GptqWeight) -> GptqTiles:
    """`codes` are the unpacked words of `weight`."""
    sizes = torch.bincount(weight.group, minlength=weight.scales.shape[0])
    order = _padded(weight.group.argsort(stable=True), sizes.tolist())
    run_group = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), -(-sizes // RUN))
    zeros, half = pad_columns(weight.zeros), weight.scales.dtype == torch.float16
    rows = pad_columns(codes)[order.clamp(min=0)]
    rows = torch.where(order[:, None] < 0, zeros[run_group.repeat_interleave(RUN)], rows)
    return GptqTiles(
        words=tile(rows, weight.bits),
        scales=tile_columns(pad_columns(weight.scales if half else weight.scales.to(torch.float32))),
        zeros=tile_columns(zeros),
        run_group=run_group.to(torch.int32),
        group_shift=_shift_of(run_group),
        order=_order_of(order, codes.shape[0]),
        bits=weight.bits,
        in_features=codes.shape[0],
        out_features=codes.shape[1],
        scale_dtype=weight.scales.dtype,
    )


def gptq_codes(tiles: GptqTiles) -> tuple[Tensor, Tensor]:
    """codes uint8 [in, out] and group int64 [in], in the order of the input features."""
    rows = untile(tiles.words, tiles.bits)[:, : tiles.out_features]
    group = tiles.run_group.to(torch.int64).repeat_interleave(RUN)
    return _in_file_order(rows, tiles.order, tiles.in_features), _in_file_order(group, tiles.order, tiles.in_features)


def exl2_tiles(codes: Sequence[Tensor], scale_codes: Tensor, weight: Exl2Weight) -> Exl2Tiles:
    """`codes` uint8 [rows of a group, out] for each group, `scale_codes` uint8 [groups, out]: both unpacked."""
    words, runs, first = [], [], 0
    for group, (bits, rows) in enumerate(weight.groups):
        padded = torch.nn.functional.pad(pad_columns(codes[group]), (0, 0, 0, -rows % RUN), value=1 << bits - 1)
        words.append(tile(padded.contiguous(), bits))
        for _ in range(-(-rows // RUN)):
            runs.append((first, bits, group, 0))
            first += STRIP * bits
    nibbles = tile_columns(pad_columns(scale_codes)).to(torch.int32)
    packed = torch.zeros(nibbles.shape[:3], dtype=torch.int32, device=nibbles.device)
    for position in range(8):
        packed |= nibbles[..., position] << 4 * position
    order = _padded(weight.order, [rows for _, rows in weight.groups])
    return Exl2Tiles(
        words=torch.cat(words, 1),
        scale_codes=packed,
        scale_max=weight.scale_max,
        runs=torch.tensor(runs, dtype=torch.int32, device=packed.device),
        order=_order_of(order, weight.order.numel()),
        groups=weight.groups,
        in_features=weight.order.numel(),
        out_features=codes[0].shape[1],
    )


def exl2_codes(tiles: Exl2Tiles) -> tuple[list[Tensor], Tensor, Tensor]:
    """codes of each group, scale codes uint8 [groups, out], order int64 [in]."""
    lengths = [-(-rows // RUN) * STRIP * bits for bits, rows in tiles.groups]
    parts = tiles.words.split(lengths, 1)
    codes = [
        untile(part.contiguous(), bits)[:rows, : tiles.out_features]
        for part, (bits, rows) in zip(parts, tiles.groups, strict=True)
    ]
    nibbles = torch.stack([tiles.scale_codes >> 4 * position & 15 for position in range(8)], 3).to(torch.uint8)
    scale_codes = untile_columns(nibbles)[:, : tiles.out_features]
    order = torch.arange(tiles.in_features, device=tiles.words.device)
    if tiles.order is not None:
        order = tiles.order[tiles.order >= 0].to(torch.int64)
    return codes, scale_codes, order


def _plane_words(plane: Tensor, width: int) -> Tensor:
    """uint8 [strips, runs, 8, 32, 4, 2] of codes below 2^width → int32 words."""
    strips, runs = plane.shape[:2]
    if width == 1:
        pairs = plane.view(strips, runs, 8, 32, 2, 2, 2).permute(0, 1, 3, 4, 5, 2, 6)
        pairs = pairs.reshape(strips, runs, 32, 2, 16, 2)
    else:
        pairs = plane.view(strips, runs, width // 2, 16 // width, 32, 4, 2).permute(0, 1, 2, 4, 5, 3, 6)
    words = torch.zeros(pairs.shape[:-2], dtype=torch.int32, device=plane.device)
    for place in range(pairs.shape[-2]):
        for half in range(2):
            words |= pairs[..., place, half].to(torch.int32) << width * place + 16 * half
    return words


def _plane_codes(words: Tensor, width: int) -> Tensor:
    """The inverse of `_plane_words`, for words [strips, runs, 64·width]."""
    strips, runs = words.shape[:2]
    words = words.view(strips, runs, 32, 2) if width == 1 else words.view(strips, runs, width // 2, 32, 4)
    mask, places = (1 << width) - 1, 16 // width
    pairs = torch.stack(
        [
            torch.stack([(words >> width * place + 16 * half & mask).to(torch.uint8) for half in range(2)], -1)
            for place in range(places)
        ],
        -2,
    )
    if width == 1:
        plane = pairs.view(strips, runs, 32, 2, 2, 8, 2).permute(0, 1, 5, 2, 3, 4, 6)
    else:
        plane = pairs.permute(0, 1, 2, 5, 3, 4, 6)
    return plane.reshape(strips, runs, 8, 32, 4, 2)


def _padded(order: Tensor, sizes: Sequence[int]) -> Tensor:
    """Rows of each group followed by as many -1 as fill its last run."""
    parts = order.split(list(sizes))
    return torch.cat([torch.nn.functional.pad(part, (0, -len(part) % RUN), value=-1) for part in parts])


def _shift_of(run_group: Tensor) -> int | None:
    """Of groups that all have the same power of two of runs, but for a shorter last one."""
    runs = torch.arange(len(run_group), device=run_group.device)
    shift = (int((run_group == run_group[0]).sum()) - 1).bit_length()
    return shift if torch.equal(runs >> shift, run_group) else None


def _order_of(order: Tensor, rows: int) -> Tensor | None:
    """None where row r is feature r and there is no padding."""
    if order.numel() == rows and torch.equal(order, torch.arange(rows, device=order.device)):
        return None
    return order.to(torch.int32)


def _in_file_order(values: Tensor, order: Tensor | None, rows: int) -> Tensor:
    """Row `order[r]` of the result is row r of `values`; padding is left out."""
    if order is None:
        return values
    kept = order >= 0
    result = torch.empty(rows, *values.shape[1:], dtype=values.dtype, device=values.device)
    result[order[kept].to(torch.int64)] = values[kept]
    return result
