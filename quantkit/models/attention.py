"""Attention: grouped heads over the past, with optional window, soft cap, head norms and cache.

Queries are the last `s` of `t` positions. Many of them are left to the backend where it is fast, what torch's fused
kernel computes to that; scores are written out only where a soft cap stands between product and softmax. Windows and
caps go through in pieces of queries, so that no mask or score matrix grows with the square of the text.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit import kernels
from quantkit.models import attention_gradient
from quantkit.models.fan import Fan, Observe
from quantkit.models.norm import Norm
from quantkit.models.rope import Rope, Rotary

PIECE = 512  # queries at a time where a mask is needed


class Cache(Protocol):
    """The past of the texts whose next tokens a forward pass reads; see `runtime.cache`.

    A pass calls `begin` once, `attend` once in each layer, `advance` at its end.
    """

    def begin(self, count: int) -> tuple[Tensor, Tensor]:
        """Makes room for `count` tokens in each row of ids. Returns int64 `[rows, count]` twice: the position of each
        token, and how long the text that it belongs to is known to be."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """Stores k and v `[b, kv_heads, s, d]` of the new tokens, and returns what each query `[b, heads, s, d]` finds
        in its own text up to itself. Words are those of `attend`."""

    def advance(self) -> None:
        """Makes what every layer has stored part of the past."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer. `norms` (`q`, `k`) is empty where heads are not normalised."""

    layer: int
    inputs: Fan
    output: Fan
    norms: Mapping[str, Norm]
    rope: Rope
    head_dim: int
    scale: float
    window: int | None
    cap: float | None

    def __call__(self, x: Tensor, rotary: Rotary, cache: Cache | None, observe: Observe | None) -> Tensor:
        """`[b, s, hidden]` → `[b, s, hidden]`."""
        (out,) = self.output(self.mix(x, rotary, cache, observe), observe)
        return out

    def mix(self, x: Tensor, rotary: Rotary, cache: Cache | None = None, observe: Observe | None = None) -> Tensor:
        """`[b, s, hidden]` → what the output linear reads, `[b, s, heads · head_dim]`."""
        q, k, v = (self._heads(part) for part in self.inputs(x, observe))
        if self.norms:
            q, k = self.norms["q"](q), self.norms["k"](k)
        q, k = (rotary.turn(self.rope, part, v.dtype) for part in (q, k))
        if cache is None:
            mixed = attend(q, k, v, scale=self.scale, window=self.window, cap=self.cap)
        else:
            mixed = cache.attend(self.layer, q, k, v, scale=self.scale, window=self.window, cap=self.cap)
        return mixed.transpose(1, 2).flatten(2)

    def _heads(self, x: Tensor) -> Tensor:
        """`[b, s, heads · head_dim]` → `[b, heads, s, head_dim]`."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: int = 0,
) -> Tensor:
    """Causal attention of the last `s` of `t` positions, `[b, heads, s, d]`.

    q       [b, heads, s, d]
    k, v    [b, kv_heads, t, d]; head h reads key-value head h // (heads / kv_heads)
    window  positions a query sees, its own included; None for all before it
    cap     scores become `cap · tanh(score / cap)` (Gemma 2 report, section 2)
    sinks   first positions that every later query sees beside its window (Xiao et al. 2023, section 3)
    """
    queries, positions = q.shape[2], k.shape[2]
    if window is not None and window + sinks >= positions:
        window = None
    if cap is None and window is None and attention_gradient.applies(q, k, v):
        mixed = attend(q.detach(), k.detach(), v.detach(), scale=scale)
        return attention_gradient.with_gradient(q, k, v, mixed, scale)
    if q.device.type == "cpu" and cap is None and not (window and sinks):
        backend = kernels.backend("cpu")
        if backend.attends_many(q, k, v):
            rows = (backend.attend_many(*row, scale=scale, window=window or 0) for row in zip(q, k, v, strict=True))
            return torch.stack(list(rows)).transpose(1, 2)
    if cap is None and window is None and queries in (1, positions):
        return _fused(q, k, v, scale, is_causal=queries > 1)
    pieces = [
        _attend_piece(q[:, :, start : start + PIECE], k, v, positions - queries + start, scale, window, cap, sinks)
        for start in range(0, queries, PIECE)
    ]
    return torch.cat(pieces, dim=2)


def _attend_piece(
    q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, window: int | None, cap: float | None, sinks: int
) -> Tensor:
    """Queries from position `first` on, against the keys that any of them sees."""
    end = first + q.shape[2]
    start = 0 if window is None or sinks else max(0, first + 1 - window)
    k, v = k[:, :, start:end], v[:, :, start:end]
    query = torch.arange(first, end, device=q.device)[:, None]
    key = torch.arange(start, end, device=q.device)[None, :]
    seen = key <= query
    if window is not None:
        seen &= (key > query - window) | (key < sinks)
    if cap is None:
        return _fused(q, k, v, scale, seen)
    return _capped(q, k, v, scale, cap, seen)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )
    return mixed if q.device.type != "cpu" else _spoil(mixed, q, k[:, :, -q.shape[2] :])


def _spoil(mixed: Tensor, *read: Tensor) -> Tensor:
    """`mixed`, all NaN in those rows of the batch where a tensor that was `read` has a NaN or an infinity.

    With fewer than sixteen queries torch's kernel for CPUs takes a NaN score for a masked one and mixes values as if
    nothing had happened. Keys of the past need no look: they spoiled the output when they were new.
    """
    if math.isfinite(sum(part.sum(dtype=torch.float32).item() for part in read)):
        return mixed
    sums = [part.sum((1, 2, 3), keepdim=True, dtype=torch.float32) for part in read]
    return mixed + (0 * torch.stack(sums)).sum(0).to(mixed.dtype)


def _capped(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, seen: Tensor) -> Tensor:
    """Scores written out in float32."""
    rows, heads, queries, width = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, queries, width)
    scores = (grouped @ k[:, :, None].transpose(-1, -2)).to(torch.float32) * scale
    scores = (cap * torch.tanh(scores / cap)).masked_fill(~seen, float("-inf"))
    return (scores.softmax(dim=-1).to(v.dtype) @ v[:, :, None]).reshape(rows, heads, queries, width)
