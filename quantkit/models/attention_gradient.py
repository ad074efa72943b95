"""The way back through causal attention in bfloat16 on a CPU, as products of whole matrices.

torch's fused kernel takes half as long again there, and one with gradients to come three times as long on the way
forward, which was an eighth of a backward pass. The scores of a piece of queries are made anew in float32; the heads
that read one key-value head stand below each other, so that each product is one for all of them and their gradients are
summed by it. (Dao et al. 2022, FlashAttention, appendix B.2)
"""

from typing import Any

import torch
from torch import Tensor

PIECE = 128
"""Queries at a time: of the keys behind them, which they do not see, half a piece is computed in vain."""


def applies(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether gradients are asked for that this module finds: of as many queries as keys, in bfloat16 on a CPU."""
    wanted = torch.is_grad_enabled() and any(part.requires_grad for part in (q, k, v))
    fits = q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] == k.shape[2]
    return wanted and fits and q.shape[-1] == v.shape[-1]


def with_gradient(q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, scale: float) -> Tensor:
    """`mixed`, what causal attention makes of q `[b, heads, s, d]` and k, v `[b, kv_heads, s, d]`, as part of their
    graph."""
    out: Tensor = _Attended.apply(q, k, v, mixed, scale)
    return out


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, mixed)
        ctx.scale = scale
        return mixed.view_as(mixed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, mixed = ctx.saved_tensors
        rows = [_gradients(*row, ctx.scale) for row in zip(q, k, v, mixed, gradients[0], strict=True)]
        of_q, of_k, of_v = (torch.stack(parts).to(q.dtype) for parts in zip(*rows, strict=True))
        return of_q, of_k, of_v, None, None


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, gradient: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one text: those of q `[heads, s, d]`, and of k and v `[kv_heads, s, d]`, float32."""
    (heads, length, width), groups = q.shape, k.shape[0]
    lost = (gradient.to(torch.float32) * mixed).sum(-1, keepdim=True)
    exact, turned = (k.to(torch.float32) * scale).transpose(1, 2), v.transpose(1, 2).contiguous()
    keys = k.contiguous()
    of_q = torch.empty(q.shape, dtype=torch.float32)
    of_k, of_v = (torch.zeros(groups, length, width) for _ in "kv")
    for start in range(0, length, PIECE):
        end = min(length, start + PIECE)
        own, back, share = (part[:, start:end].reshape(groups, -1, part.shape[-1]) for part in (q, gradient, lost))
        scores = torch.bmm(own.to(torch.float32), exact[:, :, :end])
        behind = torch.ones(end - start, end - start, dtype=torch.bool).triu_(1)
        scores.view(heads, end - start, end)[..., start:].masked_fill_(behind, float("-inf"))
        chances = scores.softmax(-1)
        of_v[:, :end] += torch.bmm(chances.to(q.dtype).transpose(1, 2), back)
        slopes = chances.mul_(torch.bmm(back, turned[:, :, :end]) - share).to(q.dtype)
        of_q[:, start:end] = torch.bmm(slopes, keys[:, :end]).view(heads, end - start, width)
        of_k[:, :end] += torch.bmm(slopes.transpose(1, 2), own)
    return of_q.mul_(scale), of_k.mul_(scale), of_v
