"""What a decode step needs besides products of quantized weights: norms, rotation, the cache in pages, attention.

`Steps` says what each operation does, `ReferenceSteps` is its definition in plain torch; `cuda_steps.py` is faster.
Halves are float16 or bfloat16, the dtype of the multiplications. Sums are float32 and rounded once.

Keys and values are kept in pages of 256 positions, in 16 bits or in groups of 32 values along a head with one scale:

    half = (2^bits - 1) / 2   scale = f16(max |x| / half)   code = round(x / scale + half)   x̂ = (code - half) · scale

so that both ends of the range are used and no code is wasted on a second zero. Rows may be kept turned by a Hadamard
matrix, which spreads outliers over a group: queries are turned like keys, and what is mixed of values is turned back.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

PAGE = 256
GROUP = 32


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Keys, or values, of one layer. Position p of a sequence is row p % 256 of page `table[p // 256]`.

    codes   bits 9, 8, 4: uint8 [pages, kv_heads, 256, head_dim·bits/8] as `encode` writes them;
            bits 16: the halves themselves [pages, kv_heads, 256, head_dim]
    scales  float16 [pages, kv_heads, 256, head_dim/32]; None at 16 bits
    block   each so many neighbours of a row are kept times a Hadamard matrix, see `turn`; 1 for rows as they are

    The rows of one page and head lie together; pages and heads may lie in either order, in codes and scales alike.
    """

    codes: Tensor
    scales: Tensor | None
    bits: int
    block: int = 1

    @classmethod
    def empty(
        cls,
        pages: int,
        kv_heads: int,
        head_dim: int,
        bits: int,
        dtype: torch.dtype,
        device: torch.device,
        block: int = 1,
    ) -> "Pages":
        """head_dim is a multiple of 32; `dtype` is that of 16-bit pages."""
        shape = (pages, kv_heads, PAGE)
        if bits == 16:
            return cls(torch.empty(*shape, head_dim, dtype=dtype, device=device), None, bits, block)
        codes = torch.empty(*shape, head_dim * bits // 8, dtype=torch.uint8, device=device)
        scales = torch.empty(*shape, head_dim // GROUP, dtype=torch.float16, device=device)
        return cls(codes, scales, bits, block)

    @property
    def head_dim(self) -> int:
        return self.codes.shape[3] * 8 // self.bits if self.bits < 16 else self.codes.shape[3]


class Steps(Protocol):
    """Rows are tokens: `n` of them, of any sequences. `slots` int64 [n] is `page · 256 + row` of each."""

    def rms_norm(
        self, hidden: Tensor, update: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
    ) -> Tensor:
        """Adds `update` [n, width], halves, to `hidden` float32 [n, width] in place, and returns
        `hidden / sqrt(mean hidden² + epsilon) · weight` in halves; weight float32 [width]. (Zhang and Sennrich 2019)"""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """`gate · sigmoid(gate) · up`, halves [n, width]. (Shazeer 2020, GLU variants)"""

    def rope_append(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Pages, values: Pages
    ) -> Tensor:
        """Rotates q [n, heads, head_dim] and k [n, kv_heads, head_dim], rounds them to halves, stores k and v in pages
        and returns the rotated q. Pair i of a head is (element i, element i + pairs); cos and sin float32 [n, pairs].
        Elements from 2·pairs on are left alone. (Su et al. 2021, RoFormer, section 3.4.2) Where pages are kept turned,
        k and v are turned before they are stored, and q as k is."""

    def turn_heads(self, heads: Tensor, block: int) -> Tensor:
        """`turn`, for halves [n, heads, head_dim]."""

    def kv_read(self, pages: Pages, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, kv_heads, head_dim] in `dtype`, turned where the pages are."""

    def attend(
        self,
        q: Tensor,
        keys: Pages,
        values: Pages,
        table: Tensor,
        lengths: Tensor,
        scale: float,
        *,
        window: int = 0,
        cap: float = 0.0,
    ) -> Tensor:
        """One new token for each sequence over its whole past, itself included: q halves [b, heads, head_dim], turned
        as keys are, → [b, heads, head_dim] as the model has it. Head h reads key-value head h // (heads / kv_heads).

        table    int32 [b, most pages]: the pages of each sequence
        lengths  int32 [b]: positions of each sequence, at least 1
        window   positions a query sees, its own included; 0 for all
        cap      scores become `cap · tanh(score / cap)` unless 0 (Gemma 2 report, section 2)
        """

    def argmax(self, logits: Tensor) -> Tensor:
        """float32 [n, vocab] → int64 [n]: the lowest index of the largest value; the first NaN where there is one."""


class ReferenceSteps:
    """Plain torch."""

    def rms_norm(
        self, hidden: Tensor, update: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
    ) -> Tensor:
        if update is not None:
            hidden += update
        mean = hidden.square().mean(dim=-1, keepdim=True)
        return (hidden * torch.rsqrt(mean + epsilon) * weight).to(dtype)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        wide = gate.to(torch.float32)
        return (wide / (1 + torch.exp(-wide)) * up.to(torch.float32)).to(gate.dtype)

    def rope_append(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Pages, values: Pages
    ) -> Tensor:
        write(keys, turn(_rotated(k, cos, sin), keys.block), slots)
        write(values, turn(v, values.block), slots)
        return turn(_rotated(q, cos, sin), keys.block)

    def turn_heads(self, heads: Tensor, block: int) -> Tensor:
        return turn(heads, block)

    def kv_read(self, pages: Pages, slots: Tensor, dtype: torch.dtype) -> Tensor:
        page, row = slots // PAGE, slots % PAGE
        codes = pages.codes[page, :, row]
        return codes.to(dtype) if pages.scales is None else decode(codes, pages.scales[page, :, row], pages.bits, dtype)

    def attend(
        self,
        q: Tensor,
        keys: Pages,
        values: Pages,
        table: Tensor,
        lengths: Tensor,
        scale: float,
        *,
        window: int = 0,
        cap: float = 0.0,
    ) -> Tensor:
        mixed = []
        for row, pages, length in zip(q, table, lengths.tolist(), strict=True):
            positions = torch.arange(max(0, length - window) if window else 0, length, device=q.device)
            slots = pages.to(torch.int64)[positions // PAGE] * PAGE + positions % PAGE
            k, v = (self.kv_read(kept, slots, torch.float32).transpose(0, 1) for kept in (keys, values))
            grouped = row.to(torch.float32).unflatten(0, (k.shape[0], -1))
            scores = grouped @ k.transpose(1, 2) * scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            mixed.append((scores.softmax(dim=-1) @ v).flatten(0, 1))
        return turn(torch.stack(mixed).to(q.dtype), values.block)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)


def turn(heads: Tensor, block: int) -> Tensor:
    """Each `block` neighbours of a row, a power of two, times the Hadamard matrix of norm one, in float32 and rounded
    to the dtype that they had: sums and differences of elements 1, 2, 4, … apart. It is its own inverse."""
    if block == 1:
        return heads
    wide, step = heads.to(torch.float32), 1
    while step < block:
        first, second = wide.unflatten(-1, (-1, 2, step)).unbind(-2)
        wide = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return (wide * block**-0.5).to(heads.dtype)


def write(pages: Pages, heads: Tensor, slots: Tensor) -> None:
    """Store [n, kv_heads, head_dim], turned already where the pages are, by the rule of this module."""
    page, row = slots // PAGE, slots % PAGE
    if pages.scales is None:
        pages.codes[page, :, row] = heads.to(pages.codes.dtype)
        return
    pages.codes[page, :, row], pages.scales[page, :, row] = encode(heads, pages.bits)


def encode(heads: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rows `[..., head_dim]` in 9, 8 or 4 bits: codes uint8 `[..., row_width(head_dim, bits)]`, scales float16
    `[..., groups]`.

    The last group of a row is short where 32 does not divide head_dim. At 4 bits head_dim is even. At 9 bits the low
    eight of each code come first, then the ninth of all, that of number i in bit i % 8 of byte i // 8.
    """
    half, width = _half(bits), heads.shape[-1]
    short = -width % GROUP
    groups = F.pad(heads.to(torch.float32), (0, short)).unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(dim=-1) / half).to(torch.float16)
    step = scales.to(torch.float32)[..., None]
    codes = torch.round(torch.where(step == 0, 0.0, groups / step) + half).clamp(0, 2 * half)
    if bits == 9:
        return _split(codes.nan_to_num(0).to(torch.int16).flatten(-2), width), scales
    codes = codes.to(torch.uint8).flatten(-2)[..., :width]
    return (codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4), scales


def decode(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """What `encode` stored: `[..., head_dim]` in `dtype`, rounded once."""
    width = codes.shape[-1] - -(-codes.shape[-1] // 9) if bits == 9 else codes.shape[-1] * 8 // bits
    numbers = torch.empty(*codes.shape[:-1], width, dtype=torch.float32, device=codes.device)
    if bits == 4:
        numbers[..., 0::2], numbers[..., 1::2] = codes & 15, codes >> 4
    else:
        numbers.copy_(codes[..., :width])
    if bits == 9:
        places = torch.arange(8, dtype=torch.uint8, device=codes.device)
        ninths = (codes[..., width:, None] >> places & 1).flatten(-2)[..., :width]
        numbers.add_(ninths, alpha=256)
    numbers -= _half(bits)
    whole = width - width % GROUP
    wide = scales.to(torch.float32)
    numbers[..., :whole].unflatten(-1, (-1, GROUP)).mul_(wide[..., : whole // GROUP, None])
    if whole != width:
        numbers[..., whole:] *= wide[..., -1:]
    return numbers.to(dtype)


def row_width(head_dim: int, bits: int) -> int:
    """Bytes of the codes of a row."""
    return -(-head_dim * bits // 8)


def _split(codes: Tensor, width: int) -> Tensor:
    """int16 `[..., groups · 32]` of 9 bits → uint8 `[..., row_width(width, 9)]`."""
    places = 1 << torch.arange(8, device=codes.device, dtype=torch.int16)
    ninths = ((codes >> 8).unflatten(-1, (-1, 8)) * places).sum(-1, dtype=torch.int16)[..., : -(-width // 8)]
    return torch.cat([(codes & 255)[..., :width], ninths], dim=-1).to(torch.uint8)


def _half(bits: int) -> float:
    return ((1 << bits) - 1) / 2


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[n, heads, head_dim], pair i is (i, i + pairs)."""
    pairs = cos.shape[1]
    wide = heads.to(torch.float32)
    first, second, rest = wide[..., :pairs], wide[..., pairs : 2 * pairs], heads[..., 2 * pairs :]
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(heads.dtype), rest], dim=-1)
