"""The CPU backend: the reference, with Numba kernels for what profiling justifies. Needs no compiler to be installed.

A weight is repacked once into bit planes (`planes.py`). A few rows are multiplied straight from them, those of bfloat16
in integers where the processor multiplies bytes; for many, panels of columns are dequantized and handed to torch's
matmul, so that no whole weight is ever expanded. Compiled loops do not check bounds: what they trust is asserted here.
"""

import platform
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels import columns, gram, integers, many_queries, multiply, rotation
from quantkit.kernels.integers import BLOCK_ROWS
from quantkit.kernels.jit import LEAST_WORK, spread, targets
from quantkit.kernels.pairs import HAS_PAIR_PRODUCTS
from quantkit.kernels.planes import (
    PLANES,
    STRIP,
    UNIT,
    Planes,
    Section,
    by_group,
    by_strip,
    empty_plane,
    zeros_by_group,
    zeros_by_strip,
)
from quantkit.kernels.program import Program
from quantkit.kernels.protocol import Exl2Weight, GptqWeight, Repacked
from quantkit.kernels.reference import AsStored, ReferenceBackend, check_codes, check_words, exl2_scales, pack_unit

# Up to this many rows are multiplied straight from the planes, a block at a time. Measured on 2048 x 5632: beyond it a
# library product is faster, sooner where codes become floats first.
FEW_ROWS = 32
FEW_ROWS_OF_INTEGERS = 64
# Columns of one dequantized panel: its weights stay in the outer cache. (2048 inputs; twice as many cost 3 % more)
PANEL_COLUMNS = 256
# Fewer weights of one are decoded by one thread sooner than by several, which are awake between two products.
LEAST_PANEL = 250_000
# Fewer are left to torch, or to the steps of a decode.
FEW_QUERIES = 16


def unusable() -> str | None:
    """Why this processor cannot run the kernels, in words; None when it can."""
    if platform.machine().lower() in ("x86_64", "amd64") and not targets("f16c"):
        return "this processor has no float16 instructions (F16C)"
    return None


class CpuBackend(ReferenceBackend):
    """Numba kernels on bit planes."""

    name = "cpu"

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        unit_codes, unit_words = check_codes(codes, bits)
        rows, out = codes.shape
        words = torch.empty(rows * bits // 32, out, dtype=torch.int32)
        spread(columns.pack, out, 64, rows * out, array(codes), bits, unit_codes, unit_words, unsigned(words))
        return words

    def unpack(self, words: Tensor, bits: int) -> Tensor:
        unit_codes, unit_words = check_words(words, bits)
        out = words.shape[1]
        codes = torch.empty(words.shape[0] * 32 // bits, out, dtype=torch.uint8)
        spread(columns.unpack, out, 64, codes.numel(), unsigned(words), bits, unit_codes, unit_words, array(codes))
        return codes

    def gptq_dequantize(self, weight: GptqWeight) -> Tensor:
        check_words(weight.words, weight.bits)
        rows = torch.arange(weight.group.numel())
        result = torch.empty(len(rows), weight.words.shape[1], dtype=torch.float16)
        _dequantize(weight.words, weight.bits, weight.scales, weight.zeros, weight.group, rows, result)
        return result

    def gptq_repack(self, weight: GptqWeight) -> Repacked:
        order = weight.group.argsort(stable=True)
        counts = torch.bincount(weight.group, minlength=weight.scales.shape[0])
        if bool((counts % 32).any()) or weight.words.shape[1] % STRIP:
            return AsStored(weight)  # groups that end inside a unit: rare, and right without being fast
        codes = self.unpack(weight.words, weight.bits)
        in_order = torch.equal(order, torch.arange(len(order)))
        if not in_order:
            codes = codes[order]
        section = _section(codes, weight.bits, weight.scales, weight.zeros, counts.tolist(), 0)
        rest = replace(
            weight,
            words=_no_rows(weight.words),
            scales=_no_rows(weight.scales),
            zeros=_no_rows(weight.zeros),
        )
        return Planes((section,), None if in_order else order, rest)

    def gptq_restore(self, repacked: Repacked) -> GptqWeight:
        if not isinstance(repacked, Planes):
            return super().gptq_restore(repacked)
        assert isinstance(repacked.rest, GptqWeight)
        (section,) = repacked.sections
        codes = _codes(section)
        if repacked.order is not None:
            codes[repacked.order] = codes.clone()
        rest = repacked.rest
        zeros = zeros_by_group(torch.from_numpy(section.zeros), section.scales.shape[1], section.out_features)
        scales = torch.from_numpy(section.scales.view(np.int16 if section.scales.dtype == np.uint16 else np.float32))
        scales = by_group(scales)
        scales = scales.view(torch.float16) if scales.dtype == torch.int16 else scales.to(rest.scales.dtype)
        return replace(rest, words=self.pack(codes, rest.bits), scales=scales, zeros=zeros)

    def gptq_matmul(self, x: Tensor, repacked: Repacked) -> Tensor:
        if not isinstance(repacked, Planes) or _differentiates(x):
            return super().gptq_matmul(x, repacked)
        return _matmul(x.detach(), repacked)

    def exl2_dequantize(self, weight: Exl2Weight) -> Tensor:
        result = torch.empty(weight.order.numel(), weight.words.shape[1], dtype=torch.float16)
        scales = exl2_scales(weight.scale_codes, weight.scale_max)
        row = 0
        for bits, groups, words in _sections(weight):
            rows = torch.tensor([weight.groups[g][1] for g in groups])
            group = torch.repeat_interleave(torch.arange(groups.start, groups.stop), rows)
            zeros = torch.full_like(scales, 1 << bits - 1, dtype=torch.uint8)
            order = weight.order[row : row + len(group)]
            _dequantize(words, bits, scales, zeros, group, order, result)
            row += len(group)
        return result

    def exl2_repack(self, weight: Exl2Weight) -> Repacked:
        if any(rows % UNIT for _, rows in weight.groups) or weight.words.shape[1] % STRIP:
            return AsStored(weight)
        scales = exl2_scales(weight.scale_codes, weight.scale_max)
        sections: list[Section] = []
        unit = 0
        for bits, groups, words in _sections(weight):
            rows = [weight.groups[g][1] for g in groups]
            own = scales[groups.start : groups.stop]
            zeros = torch.full_like(own, 1 << bits - 1, dtype=torch.uint8)
            sections.append(_section(self.unpack(words, bits), bits, own, zeros, rows, unit))
            unit += sum(rows) // UNIT
        in_order = torch.equal(weight.order, torch.arange(weight.order.numel()))
        rest = replace(weight, words=_no_rows(weight.words))
        return Planes(tuple(sections), None if in_order else weight.order, rest)

    def exl2_restore(self, repacked: Repacked) -> Exl2Weight:
        if not isinstance(repacked, Planes):
            return super().exl2_restore(repacked)
        assert isinstance(repacked.rest, Exl2Weight)
        words = [self.pack(_codes(section), section.bits) for section in repacked.sections]
        return replace(repacked.rest, words=torch.cat(words))

    def exl2_matmul(self, x: Tensor, repacked: Repacked) -> Tensor:
        if not isinstance(repacked, Planes) or _differentiates(x):
            return super().exl2_matmul(x, repacked)
        return _matmul(x.detach(), repacked)

    def attends_many(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        fits = q.shape[-2] >= FEW_QUERIES and q.shape[-1] == v.shape[-1] and q.shape[-1] % 2 == 0
        plain = all(part.dtype == torch.bfloat16 and not part.requires_grad for part in (q, k, v))
        return HAS_PAIR_PRODUCTS and fits and plain

    def attend_many(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0) -> Tensor:
        if not self.attends_many(q, k, v):
            return super().attend_many(q, k, v, scale=scale, window=window)
        return many_queries.attend(q, k, v, scale=scale, window=window, threads=torch.get_num_threads())

    def rotates_heads(self, x: Tensor, dtype: torch.dtype) -> bool:
        plain = x.device.type == "cpu" and not x.requires_grad and x.stride(3) == 1
        return plain and x.dtype == dtype == torch.bfloat16 and x.shape[1] >= FEW_QUERIES

    def rotate_heads(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.rotates_heads(x, dtype):
            return super().rotate_heads(x, cos, sin, dtype)
        return rotation.turn(x, cos, sin, threads=torch.get_num_threads())

    def adds_gram(self, total: Tensor, rows: Tensor) -> bool:
        plain = rows.device.type == "cpu" and not rows.requires_grad
        return HAS_PAIR_PRODUCTS and plain and (total.dtype, rows.dtype) == (torch.float32, torch.bfloat16)

    def add_gram(self, total: Tensor, rows: Tensor, factors: Tensor) -> None:
        if not self.adds_gram(total, rows):
            super().add_gram(total, rows, factors)
            return
        gram.add(total, rows, factors, threads=torch.get_num_threads())

    def grid_error(self, rows: Tensor, importance: Tensor, scales: Tensor, zeros: Tensor, top: int) -> Tensor:
        (g, out), n = rows.shape, scales.shape[0]
        assert importance.shape == (g,) and scales.shape == zeros.shape == (n, out)
        errors = torch.empty(n, out)
        arguments = (array(rows), array(importance), array(scales), array(zeros), top, array(errors))
        spread(columns.grid_error, out, columns.PANEL, g * n * out, *arguments)
        return errors

    def solve_rows(
        self, weight: Tensor, target: Tensor, factor: Tensor, group: Tensor, scales: Tensor, zeros: Tensor, top: int
    ) -> tuple[Tensor, Tensor]:
        b, out = weight.shape
        assert target.shape == (b, out) and factor.shape == (b, b) and group.shape == (b,)
        assert scales.shape == zeros.shape == (scales.shape[0], out) and int(group.max()) < scales.shape[0]
        codes, errors = torch.empty(b, out, dtype=torch.uint8), torch.empty(b, out)
        inputs = (array(weight), array(target), array(factor), array(group), array(scales), array(zeros))
        spread(columns.solve_rows, out, columns.PANEL, b * b * out, *inputs, top, array(codes), array(errors))
        return codes, errors


def _differentiates(x: Tensor) -> bool:
    """Whether the gradient of a product with x is wanted, which kernels do not make: it would be lost in silence."""
    return x.requires_grad and torch.is_grad_enabled()


def _matmul(x: Tensor, planes: Planes) -> Tensor:
    assert x.dim() == 2 and x.shape[1] == planes.in_features
    integer = x.dtype == torch.bfloat16 and multiply.HAS_BYTE_PRODUCTS
    if 0 < len(x) <= FEW_ROWS_OF_INTEGERS and integer:
        return integers.product(x, planes, _threads(x, planes)).to(x.dtype)
    if len(x) <= FEW_ROWS:
        return _multiply_few(x if planes.order is None else x[:, planes.order], planes).to(x.dtype)
    return _multiply_many(x, planes)


def _threads(x: Tensor, planes: Planes) -> int:
    """One where there is too little to do for another to be woken."""
    work = len(x) * planes.in_features * planes.out_features
    return torch.get_num_threads() if work >= LEAST_WORK else 1


def _multiply_few(x: Tensor, planes: Planes) -> Tensor:
    """x [m, in] → float32 [m, out] in floats, straight from the planes, in blocks of rows."""
    m, out = x.shape[0], planes.out_features
    block = 1 if m == 1 else BLOCK_ROWS
    x = torch.nn.functional.pad(x.to(torch.float32), (0, 0, 0, -m % block)).contiguous()
    y = torch.zeros(x.shape[0], out)
    inputs, outputs = x.numpy(), y.numpy()
    for start in range(0, m, block):
        rows = slice(start, start + block)
        for section in planes.sections:
            kernel, work = multiply.float_dot(section.bits, block), section.rows * out
            spread(kernel, out // STRIP, 1, work, inputs[rows], *section.arguments, outputs[rows])
    return y[:m]


def _multiply_many(x: Tensor, planes: Planes) -> Tensor:
    """x [m, in] → [m, out], one dequantized panel of columns at a time, its rows in the order of x: to gather the
    columns of x costs a fifth of the product.

    bfloat16 is multiplied as bfloat16, which processors with such instructions do more than twice as fast; everything
    else as float32.
    """
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    (m, rows), out = x.shape, planes.out_features
    inputs, y = x.to(dtype), torch.empty(m, out, dtype=dtype)
    panel = torch.empty(rows * min(out, PANEL_COLUMNS), dtype=dtype)
    order = torch.arange(rows) if planes.order is None else planes.order
    place = np.zeros(2, np.int64)
    decoding = Program()
    for section in planes.sections:
        operands = (*section.operands, order, rows, panel, place)
        decoding.add(multiply.panel(section.bits, 8 * dtype.itemsize, section.scale_bits), operands, waits=False)
    for start in range(0, out, PANEL_COLUMNS):
        columns = min(PANEL_COLUMNS, out - start)
        place[:] = start // STRIP, columns // STRIP
        decoding.run(torch.get_num_threads() if rows * columns >= LEAST_PANEL else 1)
        torch.mm(inputs, panel[: rows * columns].view(-1, columns), out=y[:, start : start + columns])
    return y.to(x.dtype)


def _section(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor, rows: list[int], offset: int) -> Section:
    """Codes uint8 [in, out] of one width, groups in sequence, as planes."""
    starts = np.cumsum([0, *rows]) // UNIT
    planes = []
    below = 0
    for width in PLANES[bits]:
        plane = empty_plane(width, *codes.shape)
        if width:
            spread(columns.split, len(plane), 1, codes.numel(), array(codes), below, plane)
        planes.append(plane)
        below += width
    low, high = planes
    return Section(bits, low, high, float_array(by_strip(scales)), array(zeros_by_strip(zeros)), starts, offset)


def _codes(section: Section) -> Tensor:
    """The inverse of `_section`: uint8 [in, out]."""
    codes = torch.zeros(section.rows, section.out_features, dtype=torch.uint8)
    below = 0
    for plane, width in zip((section.low, section.high), PLANES[section.bits], strict=True):
        if width:
            spread(columns.join, len(plane), 1, codes.numel(), plane, below, array(codes))
        below += width
    return codes


def _sections(weight: Exl2Weight) -> list[tuple[int, range, Tensor]]:
    """Neighbouring groups of one width, as (bits, group numbers, words)."""
    sections = []
    group = word = 0
    while group < len(weight.groups):
        bits, first, start = weight.groups[group][0], group, word
        while group < len(weight.groups) and weight.groups[group][0] == bits:
            word += weight.groups[group][1] * bits // 32
            group += 1
        sections.append((bits, range(first, group), weight.words[start:word]))
    return sections


def _dequantize(
    words: Tensor, bits: int, scales: Tensor, zeros: Tensor, group: Tensor, place: Tensor, result: Tensor
) -> None:
    """Fill the rows `place` of float16 `result` from rows of one width."""
    out = words.shape[1]
    assert words.shape[0] * 32 == group.numel() * bits and place.numel() == group.numel()
    assert scales.shape == zeros.shape == (scales.shape[0], out) and int(group.max()) < scales.shape[0]
    inputs = (unsigned(words), bits, *pack_unit(bits), float_array(scales), array(zeros), array(group), array(place))
    spread(columns.dequantize, out, 64, group.numel() * out, *inputs, float_array(result))


def array(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().numpy()


def unsigned(words: Tensor) -> np.ndarray:
    """int32 words as the bit containers they are."""
    return array(words).view(np.uint32)


def float_array(numbers: Tensor) -> np.ndarray:
    """float16 as its bits (uint16), since Numba has no float16 on a CPU; anything else as float32."""
    if numbers.dtype == torch.float16:
        return array(numbers.view(torch.int16)).view(np.uint16)
    return array(numbers.to(torch.float32))


def _no_rows(values: Tensor) -> Tensor:
    return values.new_empty(0, values.shape[1])
