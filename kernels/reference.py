"""The definition of every backend operation, in plain torch: written to be read, correct on any device.

Shapes and dtypes stand in `protocol.py`; the methods come in the same order.
"""

from dataclasses import dataclass, fields
from math import gcd

import torch
from torch import Tensor

from quantkit.errors import FormatError
from quantkit.kernels.protocol import WIDTHS, Exl2Weight, GptqWeight, Repacked


@dataclass(frozen=True, slots=True, eq=False)
class AsStored:
    """The reference reads weights as they are on disk: nothing is repacked."""

    weight: GptqWeight | Exl2Weight

    @property
    def size_bytes(self) -> int:
        values = (getattr(self.weight, field.name) for field in fields(self.weight))
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


class ReferenceBackend:
    """Plain torch."""

    name = "reference"

    def __init__(self, reason: str = "asked for by name") -> None:
        self.reason = reason

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        unit_codes, unit_words = check_codes(codes, bits)
        out = codes.shape[1]
        units = codes.to(torch.int64).reshape(-1, unit_codes, out)
        words = torch.zeros(units.shape[0], unit_words, out, dtype=torch.int64, device=codes.device)
        for k in range(unit_codes):
            word, shift = divmod(k * bits, 32)
            words[:, word] |= units[:, k] << shift & 0xFFFFFFFF
            if shift + bits > 32:
                words[:, word + 1] |= units[:, k] >> 32 - shift
        return (words - (words >> 31 << 32)).to(torch.int32).view(-1, out)

    def unpack(self, words: Tensor, bits: int) -> Tensor:
        unit_codes, unit_words = check_words(words, bits)
        out = words.shape[1]
        units = words.to(torch.int64).reshape(-1, unit_words, out) & 0xFFFFFFFF
        codes = torch.empty(units.shape[0], unit_codes, out, dtype=torch.uint8, device=words.device)
        for k in range(unit_codes):
            word, shift = divmod(k * bits, 32)
            code = units[:, word] >> shift
            if shift + bits > 32:
                code = code | units[:, word + 1] << 32 - shift
            codes[:, k] = (code & (1 << bits) - 1).to(torch.uint8)
        return codes.view(-1, out)

    def gptq_dequantize(self, weight: GptqWeight) -> Tensor:
        steps = self.unpack(weight.words, weight.bits).to(torch.int32) - weight.zeros[weight.group].to(torch.int32)
        return (steps.to(torch.float32) * weight.scales[weight.group].to(torch.float32)).to(torch.float16)

    def gptq_repack(self, weight: GptqWeight) -> Repacked:
        return AsStored(weight)

    def gptq_restore(self, repacked: Repacked) -> GptqWeight:
        assert isinstance(repacked, AsStored) and isinstance(repacked.weight, GptqWeight)
        return repacked.weight

    def gptq_matmul(self, x: Tensor, repacked: Repacked) -> Tensor:
        return multiply(x, self.gptq_dequantize(self.gptq_restore(repacked)))

    def exl2_dequantize(self, weight: Exl2Weight) -> Tensor:
        scales = exl2_scales(weight.scale_codes, weight.scale_max).to(torch.float32)
        out = weight.words.shape[1]
        result = torch.empty(weight.order.numel(), out, dtype=torch.float16, device=weight.words.device)
        row = word = 0
        for group, (bits, rows) in enumerate(weight.groups):
            words = rows * bits // 32
            codes = self.unpack(weight.words[word : word + words], bits)
            steps = codes.to(torch.float32) - (1 << bits - 1)
            result[weight.order[row : row + rows]] = (steps * scales[group]).to(torch.float16)
            row, word = row + rows, word + words
        return result

    def exl2_repack(self, weight: Exl2Weight) -> Repacked:
        return AsStored(weight)

    def exl2_restore(self, repacked: Repacked) -> Exl2Weight:
        assert isinstance(repacked, AsStored) and isinstance(repacked.weight, Exl2Weight)
        return repacked.weight

    def exl2_matmul(self, x: Tensor, repacked: Repacked) -> Tensor:
        return multiply(x, self.exl2_dequantize(self.exl2_restore(repacked)))

    def attends_many(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        return False

    def attend_many(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0) -> Tensor:
        (heads, queries, _), (kv_heads, positions, _) = q.shape, k.shape
        grouped = q.to(torch.float32).unflatten(0, (kv_heads, heads // kv_heads))
        scores = grouped @ k.to(torch.float32)[:, None].transpose(-1, -2) * scale
        query = torch.arange(positions - queries, positions, device=q.device)[:, None]
        key = torch.arange(positions, device=q.device)
        unseen = (key > query) | (key <= query - window if window else torch.zeros_like(key, dtype=torch.bool))
        shares = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        return (shares @ v.to(torch.float32)[:, None]).flatten(0, 1).transpose(0, 1).to(q.dtype)

    def rotates_heads(self, x: Tensor, dtype: torch.dtype) -> bool:
        return False

    def rotate_heads(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        cos, sin, pairs = cos[:, :, None], sin[:, :, None], cos.shape[2]
        first, second = x[..., :pairs].to(torch.float32), x[..., pairs : 2 * pairs].to(torch.float32)
        turned = (first * cos).sub_(second * sin), (second * cos).add_(first * sin)
        return torch.cat((*turned, x[..., 2 * pairs :].to(torch.float32)), dim=-1).to(dtype)

    def adds_gram(self, total: Tensor, rows: Tensor) -> bool:
        return False

    def add_gram(self, total: Tensor, rows: Tensor, factors: Tensor) -> None:
        scaled = rows.to(torch.float32) * factors[:, None]
        total.addmm_(scaled.T, scaled)

    def grid_error(self, rows: Tensor, importance: Tensor, scales: Tensor, zeros: Tensor, top: int) -> Tensor:
        errors = torch.empty_like(scales)
        for n, (scale, zero) in enumerate(zip(scales, zeros, strict=True)):
            codes = (torch.round(rows / scale) + zero).clamp(0, top)
            errors[n] = importance @ (rows - (codes - zero) * scale).square()
        return errors

    def solve_rows(
        self, weight: Tensor, target: Tensor, factor: Tensor, group: Tensor, scales: Tensor, zeros: Tensor, top: int
    ) -> tuple[Tensor, Tensor]:
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        errors = torch.zeros_like(weight)
        steps = torch.where(scales == 0, torch.inf, scales)
        for j, g in enumerate(group.tolist()):
            t = target[j] + factor[j, :j] @ errors[:j]
            code = (torch.round(t / steps[g]) + zeros[g]).clamp(0, top)
            codes[j] = code.to(torch.uint8)
            errors[j] = weight[j] - (code - zeros[g]) * scales[g]
        return codes, errors


def pack_unit(bits: int) -> tuple[int, int]:
    """The smallest run that fills whole words: (codes, words), for instance 32 codes in 3 words at 3 bits."""
    if bits not in WIDTHS:
        raise FormatError(f"{bits}-bit codes cannot be packed: expected one of {', '.join(map(str, WIDTHS))} bits")
    return 32 // gcd(bits, 32), bits // gcd(bits, 32)


def check_codes(codes: Tensor, bits: int) -> tuple[int, int]:
    """The pack unit, for codes [in, out] that fill whole words at this width. Raises FormatError for others."""
    unit_codes, unit_words = pack_unit(bits)
    rows = codes.shape[0]
    if rows % unit_codes:
        raise FormatError(f"{rows} rows at {bits} bits fill no whole words: expected a multiple of {unit_codes}")
    if codes.numel() and int(codes.max()) >= 1 << bits:
        raise FormatError(f"code {int(codes.max())} does not fit {bits} bits")
    return unit_codes, unit_words


def check_words(words: Tensor, bits: int) -> tuple[int, int]:
    """The pack unit, for words [rows, out] that hold whole codes at this width. Raises FormatError for others."""
    unit_codes, unit_words = pack_unit(bits)
    rows = words.shape[0]
    if rows % unit_words:
        raise FormatError(f"{rows} words at {bits} bits end inside a code: expected a multiple of {unit_words}")
    return unit_codes, unit_words


def exl2_scales(scale_codes: Tensor, scale_max: Tensor) -> Tensor:
    """int32 [groups, out/8], float16 [groups] → float16 [groups, out], with both roundings of `Exl2Weight`."""
    shifts = torch.arange(0, 32, 4, device=scale_codes.device)
    codes = (scale_codes.to(torch.int64)[:, :, None] >> shifts & 15).flatten(1)
    unit = (scale_max.to(torch.float32) / 256).to(torch.float16)
    return ((codes + 1).square().to(torch.float32) * unit.to(torch.float32)[:, None]).to(torch.float16)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x [m, in] · float16 weight [in, out] → [m, out] in the dtype of x, summed in float32."""
    return (x.to(torch.float32) @ weight.to(torch.float32)).to(x.dtype)
