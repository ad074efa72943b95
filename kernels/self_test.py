"""Every kernel of a backend against the reference, on the device where it will be used.

    for outcome in self_test(backend, torch.device("cuda")): …

The cases are small: each kernel, each width and dtype it is compiled for, odd shapes. `quantkit doctor --kernels` shows
them, and the tests run the same ones on machines without a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from quantkit.kernels import random_weights
from quantkit.kernels.cuda import CudaBackend
from quantkit.kernels.protocol import WIDTHS, Exl2Weight, GptqWeight
from quantkit.kernels.reference import ReferenceBackend
from quantkit.kernels.steps import PAGE, Pages, ReferenceSteps, write

MIXED = ((8, 32), (6, 64), (5, 32), (4, 96), (3, 32), (2, 64), (2, 16))
LONG = 37 * 32
LONG_MIXED = ((8, 160), (6, 160), (5, 160), (4, 352), (3, 160), (2, 192))
# Rows of x, for each shape of the matmul kernels.
SHAPES = ((1, torch.float16), (7, torch.bfloat16), (16, torch.float16), (40, torch.bfloat16))
# Relative to the largest |y|: y is stored in the dtype of x, and the reference rounds each weight to float16.
BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One comparison. `error` is relative to the largest expected value; a bound of 0 asks for the same bits."""

    kernel: str
    case: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


def self_test(backend: CudaBackend, device: torch.device) -> Iterator[Outcome]:
    """All cases, in the order of `CASES`. Raises BackendError where a kernel cannot be compiled or launched."""
    for kernel, cases in CASES.items():
        for case, error, bound in cases(backend, device):
            yield Outcome(kernel, case, error, bound)


W = TypeVar("W", GptqWeight, Exl2Weight)
Cases = Iterator[tuple[str, float, float]]
_REFERENCE = ReferenceBackend()
_STEPS = ReferenceSteps()
HALVES = (torch.float16, torch.bfloat16)
# Widths of keys and values that pages come in.
FORMATS = ((16, 16), (9, 8), (4, 4), (8, 4))
# One unit in the last place of a half: float32 values that differ in their own last place may round to neighbours.
ROUNDED = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


def _pack(backend: CudaBackend, device: torch.device) -> Cases:
    for bits in WIDTHS:
        for out in (5, 64):
            codes = random_weights.codes(96, out, bits).to(device)
            yield f"{bits} bits, {out} columns", _difference(backend.pack(codes, bits), _REFERENCE.pack(codes, bits)), 0


def _unpack(backend: CudaBackend, device: torch.device) -> Cases:
    for bits in WIDTHS:
        for out in (5, 64):
            codes = random_weights.codes(96, out, bits).to(device)
            words = _REFERENCE.pack(codes, bits)
            yield f"{bits} bits, {out} columns", _difference(backend.unpack(words, bits), codes), 0


def _gptq_dequantize(backend: CudaBackend, device: torch.device) -> Cases:
    for bits in WIDTHS:
        for dtype, out in ((torch.float16, 72), (torch.float32, 7)):
            weight = _on(random_weights.gptq(96, out, bits, 32, act_order=True, dtype=dtype), device)
            error = _difference(backend.gptq_dequantize(weight), _REFERENCE.gptq_dequantize(weight))
            yield f"{bits} bits, {out} columns", error, 0


def _exl2_dequantize(backend: CudaBackend, device: torch.device) -> Cases:
    weight = _on(random_weights.exl2(MIXED, 72), device)
    error = _difference(backend.exl2_dequantize(weight), _REFERENCE.exl2_dequantize(weight))
    yield "all widths", error, 0


def _gptq_matmul(backend: CudaBackend, device: torch.device) -> Cases:
    group_sizes = {2: 32, 3: 64, 4: 128, 5: 96, 6: 512, 8: 48}  # within a warp's runs, as long, longer; no power of two
    for bits, group_size in group_sizes.items():
        weight = _on(random_weights.gptq(512, 200, bits, group_size, act_order=bits == 4), device)
        dense, repacked = _REFERENCE.gptq_dequantize(weight), backend.gptq_repack(weight)
        for rows, dtype in SHAPES if bits in (3, 4) else SHAPES[:2]:
            x = _activations(rows, 512, dtype, device)
            yield f"{bits} bits, {rows} rows", *_product_error(backend.gptq_matmul(x, repacked), x, dense)

    # So many columns that no product is split, and each block goes through several chunks of rows.
    weight = _on(random_weights.gptq(LONG, 256 * backend.processors(device), 4, 128), device)
    dense, repacked = _REFERENCE.gptq_dequantize(weight), backend.gptq_repack(weight)
    for rows, dtype in ((5, torch.float16), (16, torch.float16)):
        x = _activations(rows, LONG, dtype, device)
        yield f"not split, {rows} rows", *_product_error(backend.gptq_matmul(x, repacked), x, dense)


def _exl2_matmul(backend: CudaBackend, device: torch.device) -> Cases:
    weight = _on(random_weights.exl2(MIXED, 160), device)
    dense, repacked = _REFERENCE.exl2_dequantize(weight), backend.exl2_repack(weight)
    for rows, dtype in SHAPES:
        x = _activations(rows, weight.order.numel(), dtype, device)
        yield f"all widths, {rows} rows", *_product_error(backend.exl2_matmul(x, repacked), x, dense)

    weight = _on(random_weights.exl2(LONG_MIXED, 256 * backend.processors(device)), device)
    dense, repacked = _REFERENCE.exl2_dequantize(weight), backend.exl2_repack(weight)
    x = _activations(5, LONG, torch.float16, device)
    yield "not split, 5 rows", *_product_error(backend.exl2_matmul(x, repacked), x, dense)


def _gptq_expand(backend: CudaBackend, device: torch.device) -> Cases:
    for bits in WIDTHS:
        weight = _on(random_weights.gptq(96, 72, bits, 48, act_order=True), device)
        x = torch.eye(96, device=device)  # float32: the weight itself, where rows are one-hot
        product = backend.gptq_matmul(x, backend.gptq_repack(weight)).to(torch.float16)
        yield f"{bits} bits", _difference(product, _REFERENCE.gptq_dequantize(weight)), 0


def _exl2_expand(backend: CudaBackend, device: torch.device) -> Cases:
    weight = _on(random_weights.exl2(MIXED, 72), device)
    x = torch.eye(weight.order.numel(), device=device)
    product = backend.exl2_matmul(x, backend.exl2_repack(weight)).to(torch.float16)
    yield "all widths", _difference(product, _REFERENCE.exl2_dequantize(weight)), 0


def _grid_error(backend: CudaBackend, device: torch.device) -> Cases:
    random = torch.Generator().manual_seed(0)
    for bits in WIDTHS:
        rows, importance = torch.randn(70, 50, generator=random), torch.rand(70, generator=random)
        scales, zeros = _grids(35, 50, bits, random)
        rows, importance, scales, zeros = (value.to(device) for value in (rows, importance, scales, zeros))
        top = (1 << bits) - 1
        found = backend.grid_error(rows, importance, scales, zeros, top)
        error = _difference(found, _REFERENCE.grid_error(rows, importance, scales, zeros, top))
        yield f"{bits} bits", error, 1e-5


def _solve_rows(backend: CudaBackend, device: torch.device) -> Cases:
    """Judged row by row given the kernel's own errors above it: where two codes are equally near, one flip moves all
    the sums that follow, in the reference as in the kernel."""
    random = torch.Generator().manual_seed(0)
    for bits in WIDTHS:
        b, out, top = 150, 40, (1 << bits) - 1
        weight = torch.randn(b, out, generator=random)
        target = weight + torch.randn(b, out, generator=random) * 0.1
        factor = torch.eye(b) + torch.randn(b, b, generator=random).tril(-1) / b
        scales, zeros = _grids(3, out, bits, random)
        group = torch.arange(b) // 50
        w, start, below, grid, s, z = (value.to(device) for value in (weight, target, factor, group, scales, zeros))
        codes, errors = (value.cpu() for value in backend.solve_rows(w, start, below, grid, s, z, top))
        t = target.double() + factor.tril(-1).double() @ errors.double()
        ideal = (t / scales[group].double() + zeros[group]).clamp(0, top)
        yield f"{bits} bits, distance from the nearest code", float((codes - ideal).abs().max()) - 0.5, 1e-4
        yield f"{bits} bits, errors", _difference(errors, weight - (codes.float() - zeros[group]) * scales[group]), 0


def _rms_norm(backend: CudaBackend, device: torch.device) -> Cases:
    for dtype in HALVES:
        hidden, update = _activations(3, 777, torch.float32, device), _activations(3, 777, dtype, device)
        weight = _activations(1, 777, torch.float32, device)[0]
        for added in (None, update):
            own, expected = hidden.clone(), hidden.clone()
            y = backend.steps.rms_norm(own, added, weight, 1e-5, dtype)
            right = _STEPS.rms_norm(expected, added, weight, 1e-5, dtype)
            yield f"{_short(dtype)}, update {added is not None}", _difference(y, right), ROUNDED[dtype]
            yield f"{_short(dtype)}, residual stream", _difference(own, expected), 0


def _silu_mul(backend: CudaBackend, device: torch.device) -> Cases:
    for dtype in HALVES:
        gate, up = (_activations(rows, 1001, dtype, device)[-3:] * 5 for rows in (3, 5))
        error = _difference(backend.steps.silu_mul(gate, up), _STEPS.silu_mul(gate, up))
        yield f"{_short(dtype)}, 3 x 1001", error, ROUNDED[dtype]


def _argmax(backend: CudaBackend, device: torch.device) -> Cases:
    logits = _activations(3, 5000, torch.float32, device)
    logits[0, 4321] = logits[0, 77] = 100
    logits[1, 0] = float("-inf")
    logits[2, 1234] = float("nan")
    chosen = backend.steps.argmax(logits)
    right = torch.tensor([77, int(logits[1].argmax()), 1234], device=device)
    yield "ties, infinity, NaN", float((chosen != right).sum()), 0


def _rope_append(backend: CudaBackend, device: torch.device) -> Cases:
    for dtype in HALVES:
        for key_bits, value_bits in FORMATS:
            for dim, pairs in ((128, 64), (96, 32)):
                q, k, v = (_heads(5, heads, dim, dtype, device) for heads in (6, 2, 2))
                angles = _activations(5, pairs, torch.float32, device)
                slots = torch.tensor([3, PAGE + 7, 0, PAGE - 1, 2 * PAGE - 1], device=device)
                widths = (key_bits, value_bits)
                kept = [[_pages(2, 2, dim, bits, dtype, device) for bits in widths] for _ in range(2)]
                found = backend.steps.rope_append(q, k, v, angles.cos(), angles.sin(), slots, *kept[0])
                right = _STEPS.rope_append(q, k, v, angles.cos(), angles.sin(), slots, *kept[1])
                case = f"{_short(dtype)}, keys {key_bits}, values {value_bits} bits, head of {dim}"
                yield f"{case}, q", _difference(found, right), 0
                for own, expected in zip(*kept, strict=True):
                    read, read_right = (_STEPS.kv_read(pages, slots, torch.float32) for pages in (own, expected))
                    yield f"{case}, pages", _difference(read, read_right), 0


def _turn_heads(backend: CudaBackend, device: torch.device) -> Cases:
    for dtype in HALVES:
        for dim, block in ((128, 128), (96, 32), (64, 2)):
            heads = _heads(3, 5, dim, dtype, device)
            error = _difference(backend.steps.turn_heads(heads, block), _STEPS.turn_heads(heads, block))
            yield f"{_short(dtype)}, head of {dim}, blocks of {block}", error, 0


def _kv_read(backend: CudaBackend, device: torch.device) -> Cases:
    for dtype in HALVES:
        for bits in (16, 9, 8, 4):
            pages, slots = _filled(3, 2, 96, bits, dtype, device), torch.arange(5, 700, 3, device=device)
            found, right = backend.steps.kv_read(pages, slots, dtype), _STEPS.kv_read(pages, slots, dtype)
            yield f"{_short(dtype)}, {bits} bits", _difference(found, right), 0


def _attend(backend: CudaBackend, device: torch.device) -> Cases:
    table = torch.tensor([[2, 0, 1], [1, 3, 0]], dtype=torch.int32, device=device)
    for number, (heads, dim, window, cap) in enumerate(((8, 128, 0, 0.0), (2, 64, 120, 0.0), (14, 96, 0, 30.0))):
        for key_bits, value_bits in FORMATS:
            dtype = HALVES[number % 2]
            keys, values = (_filled(4, 2, dim, bits, dtype, device) for bits in (key_bits, value_bits))
            q = _heads(2, heads, dim, dtype, device)  # scores of about 1: every position weighs enough to be missed
            lengths = torch.tensor([1 + 255 * number, 2 * PAGE + 100], dtype=torch.int32, device=device)
            inputs = (q, keys, values, table, lengths, dim**-0.5)
            found = backend.steps.attend(*inputs, window=window, cap=cap)
            right = _STEPS.attend(*inputs, window=window, cap=cap)
            case = f"keys {key_bits}, values {value_bits} bits, {heads} heads of {dim}"
            yield case, _difference(found, right), ROUNDED[dtype]


CASES: dict[str, Callable[[CudaBackend, torch.device], Cases]] = {
    "pack": _pack,
    "unpack": _unpack,
    "gptq_dequantize": _gptq_dequantize,
    "exl2_dequantize": _exl2_dequantize,
    "gptq_matmul": _gptq_matmul,
    "exl2_matmul": _exl2_matmul,
    "gptq_expand": _gptq_expand,
    "exl2_expand": _exl2_expand,
    "grid_error": _grid_error,
    "solve_rows": _solve_rows,
    "rms_norm": _rms_norm,
    "silu_mul": _silu_mul,
    "argmax": _argmax,
    "rope_append": _rope_append,
    "turn_heads": _turn_heads,
    "kv_read": _kv_read,
    "attend": _attend,
}


def _difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value; infinite where NaN is found."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    wide, right = found.double(), expected.double()
    error = float((wide - right).abs().max() / right.abs().max().clamp(min=1e-300))
    return error if error == error else float("inf")


def _product_error(y: Tensor, x: Tensor, dense: Tensor) -> tuple[float, float]:
    return _difference(y.double(), x.double() @ dense.double()), BOUNDS[x.dtype]


def _activations(rows: int, features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(rows)).to(dtype).to(device)


def _pages(pages: int, kv_heads: int, dim: int, bits: int, dtype: torch.dtype, device: torch.device) -> Pages:
    """Quantized ones are kept turned; in those of long heads all pages of a head lie side by side, as in a pool."""
    made = Pages.empty(pages, kv_heads, dim, bits, dtype, device, 1 if bits == 16 else dim & -dim)
    if dim < 128:
        return made
    scales = None if made.scales is None else _by_head(made.scales)
    return replace(made, codes=_by_head(made.codes), scales=scales)


def _by_head(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1).contiguous().transpose(0, 1)


def _filled(pages: int, kv_heads: int, dim: int, bits: int, dtype: torch.dtype, device: torch.device) -> Pages:
    """Every position written."""
    made = _pages(pages, kv_heads, dim, bits, dtype, device)
    write(made, _heads(pages * PAGE, kv_heads, dim, dtype, device), torch.arange(pages * PAGE, device=device))
    return made


def _heads(tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _activations(tokens, heads * dim, dtype, device).unflatten(1, (heads, dim))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _grids(count: int, out: int, bits: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    scales = (torch.rand(count, out, generator=random) + 0.5) / (1 << bits)
    return scales, torch.randint(0, 1 << bits, (count, out), generator=random, dtype=torch.int32)


def _on(weight: W, device: torch.device) -> W:
    names = (name for name in weight.__slots__ if isinstance(getattr(weight, name), Tensor))
    return replace(weight, **{name: getattr(weight, name).to(device) for name in names})
