"""The CPU kernels: what holds of them beyond the sweep in test_protocol.py."""

import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit import kernels
from quantkit.kernels import integers, jit, multiply, rounding
from quantkit.kernels.cpu import FEW_ROWS, FEW_ROWS_OF_INTEGERS, _multiply_few
from quantkit.kernels.planes import HUGE_PAGE, UNIT, Planes, empty_plane
from quantkit.kernels.program import Program
from quantkit.kernels.protocol import WIDTHS, GptqWeight, Repacked

cpu = kernels.backend("cpu", "cpu")


def _repacked(rows: int, out: int, bits: int, group_size: int = 32) -> Repacked:
    random = torch.Generator().manual_seed(bits)
    groups = -(-rows // group_size)
    codes = torch.randint(0, 1 << bits, (rows, out), dtype=torch.uint8, generator=random)
    scales = (torch.randn(groups, out, generator=random) * 0.01).to(torch.float16)
    zeros = torch.randint(0, 1 << bits, (groups, out), dtype=torch.uint8, generator=random)
    return cpu.gptq_repack(GptqWeight(cpu.pack(codes, bits), scales, zeros, torch.arange(rows) // group_size, bits))


def _inputs(m: int, rows: int) -> Tensor:
    return torch.randn(m, rows, generator=torch.Generator().manual_seed(7))


needs_byte_products = pytest.mark.skipif(
    not multiply.HAS_BYTE_PRODUCTS, reason="this processor multiplies no bytes: no integer products to look at"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", WIDTHS)
def test_a_row_gets_the_same_bits_in_every_small_batch(bits: int, dtype: torch.dtype) -> None:
    most = FEW_ROWS_OF_INTEGERS if dtype == torch.bfloat16 and multiply.HAS_BYTE_PRODUCTS else FEW_ROWS
    repacked, x = _repacked(160, 96, bits), _inputs(most, 160).to(dtype)
    alone = torch.cat([cpu.gptq_matmul(row, repacked) for row in x.split(1)])
    for m in (2, 3, 4, 5, most):
        assert torch.equal(cpu.gptq_matmul(x[:m], repacked), alone[:m])


def _rounded(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """X int32, scales and sums of `round_rows`, X put together from its bytes."""
    m, units = x.shape[0], x.shape[1] // UNIT
    codes, scales = np.empty((m, units, 2 * UNIT), np.int8), np.empty((m, units), np.float32)
    sums = np.empty((m, units), np.int32)
    program = Program()
    program.add(rounding.round_rows(), (x, None, m, x.shape[1], units, codes, scales, sums))
    program.run(2)
    upper, lower = torch.from_numpy(codes).to(torch.int32).split(UNIT, 2)
    return 256 * upper + lower, torch.from_numpy(scales), torch.from_numpy(sums)


def test_rows_are_rounded_to_sixteen_bits_of_the_largest_of_each_unit() -> None:
    x = torch.cat([_inputs(3, 96), torch.tensor([[6e4, -6e4, 1e-38, 0.0] * 24]), torch.zeros(1, 96)])
    found, scales, sums = _rounded(x)
    units = x.view(5, 3, UNIT)
    assert torch.equal(found.sum(2), sums)
    assert torch.equal(found.abs().amax(2)[:4], torch.full((4, 3), rounding.LARGEST))
    off = (found * scales[:, :, None] - units).abs().amax(2)
    assert bool((off <= units.abs().amax(2) / (2 * rounding.LARGEST) * 1.005).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("m", [1, 3])
def test_what_is_not_finite_in_a_row_spoils_that_row_alone(value: float, m: int) -> None:
    repacked, x = _repacked(96, 64, 4), _inputs(m, 96).to(torch.bfloat16)
    expected = cpu.gptq_matmul(x, repacked)
    x[0, 40] = value
    found = cpu.gptq_matmul(x, repacked)
    assert not bool(torch.isfinite(found[0]).any())
    assert torch.equal(found[1:], expected[1:])


@needs_byte_products
@pytest.mark.parametrize("bits", WIDTHS)
def test_integer_products_are_nearer_than_bfloat16_is(bits: int) -> None:
    """Both forms for the same x, before the result is rounded to bfloat16."""
    repacked, x = _repacked(512, 96, bits), _inputs(4, 512).to(torch.bfloat16)
    assert isinstance(repacked, Planes)
    integer, float_ = integers.product(x, repacked, 1), _multiply_few(x, repacked)
    off = (integer - float_).square().mean().sqrt() / float_.square().mean().sqrt()
    assert 0 < float(off) < 4e-4  # rounding of weights to float16, which integer products leave out; bfloat16: 2e-3


@pytest.mark.parametrize("m", [1, 3, FEW_ROWS + 1])
def test_threads_change_no_bit(monkeypatch, m: int) -> None:
    monkeypatch.setattr(jit, "LEAST_WORK", 1)
    repacked, x = _repacked(96, 224, 3), _inputs(m, 96)
    found = []
    for threads in (1, 2, 3, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(cpu.gptq_matmul(x, repacked))
    assert all(torch.equal(result, found[0]) for result in found)


def test_spread_covers_each_part_once_on_at_most_the_threads_of_torch(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    calls: list[tuple[int, int, str]] = []

    def kernel(first: int, last: int, extra: str) -> None:
        calls.append((first, last, extra))

    jit.spread(kernel, 100, 8, 10**9, "extra")
    assert sorted(calls) == [(0, 32, "extra"), (32, 64, "extra"), (64, 100, "extra")]
    calls.clear()
    jit.spread(kernel, 100, 8, 1, "extra")
    assert calls == [(0, 100, "extra")]
    calls.clear()
    jit.spread(kernel, 0, 8, 0, "extra")
    assert not calls


def test_spread_passes_on_what_a_thread_raised(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def kernel(first: int, last: int) -> None:
        if first:
            raise ValueError("in a thread")

    with pytest.raises(ValueError, match="in a thread"):
        jit.spread(kernel, 16, 8, 10**9)


def test_many_callers_at_once(monkeypatch) -> None:
    monkeypatch.setattr(jit, "LEAST_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    repacked, x = _repacked(64, 64, 4), _inputs(4, 64)
    expected, found = cpu.gptq_matmul(x, repacked), []
    callers = [threading.Thread(target=lambda: found.append(cpu.gptq_matmul(x, repacked))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 8
    assert all(torch.equal(result, expected) for result in found)


@pytest.mark.parametrize("bits", WIDTHS)
def test_planes_take_no_more_than_the_codes(bits: int) -> None:
    repacked = _repacked(96, 64, bits, group_size=96)
    assert isinstance(repacked, Planes)
    (section,) = repacked.sections
    assert section.low.nbytes + section.high.nbytes == 96 * 64 * bits // 8
    assert repacked.rest.words.numel() == 0


def test_large_planes_begin_at_a_huge_page() -> None:
    plane = empty_plane(8, 2048, 2048)
    assert plane.nbytes >= HUGE_PAGE
    plane[...] = 1
    assert plane.ctypes.data % HUGE_PAGE == 0
    assert int(plane.sum(dtype=np.int64)) == plane.size


def test_non_contiguous_inputs() -> None:
    repacked, x = _repacked(64, 64, 4), _inputs(64, 4).t()
    assert torch.equal(cpu.gptq_matmul(x, repacked), cpu.gptq_matmul(x.contiguous(), repacked))


def test_no_rows() -> None:
    assert cpu.gptq_matmul(torch.empty(0, 64), _repacked(64, 96, 4)).shape == (0, 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 40, 100])
def test_a_product_has_the_gradient_of_the_dequantized_weight(m: int, dtype: torch.dtype) -> None:
    repacked = _repacked(64, 96, 4)
    x = _inputs(m, 64).to(dtype).requires_grad_()
    (found,) = torch.autograd.grad(cpu.gptq_matmul(x, repacked).sum(), x)
    expected = cpu.gptq_dequantize(cpu.gptq_restore(repacked)).to(torch.float32).sum(1)
    torch.testing.assert_close(found.to(torch.float32), expected.expand(m, -1), rtol=1e-2, atol=1e-3)
    with torch.no_grad():
        assert torch.equal(cpu.gptq_matmul(x, repacked), cpu.gptq_matmul(x.detach(), repacked))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [0x7E00, 0x7FFF, 0x7C00])  # NaN, NaN whose bits are all ones, infinity
@pytest.mark.parametrize("m", [1, 100])
def test_a_scale_that_is_not_finite_is_in_its_column_alone(m: int, bits: int, dtype: torch.dtype) -> None:
    codes = torch.randint(1, 16, (64, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = torch.full((2, 32), 0.01, dtype=torch.float16)
    scales.view(torch.int16)[1, 5] = bits
    weight = GptqWeight(cpu.pack(codes, 4), scales, torch.zeros(2, 32, dtype=torch.uint8), torch.arange(64) // 32, 4)
    found = cpu.gptq_matmul(_inputs(m, 64).to(dtype), cpu.gptq_repack(weight))
    finite = torch.isfinite(found)
    assert not bool(finite[:, 5].any())
    assert bool(finite[:, [n for n in range(32) if n != 5]].all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 100])
@pytest.mark.parametrize("out", [16, 32])
@pytest.mark.parametrize("groups", [1, 3])
def test_zero_points_of_every_group_are_read_whatever_the_width(groups: int, out: int, m: int, dtype: torch.dtype) -> None:
    """A weight of one strip too, whose zero points differ from group to group alone."""
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (32 * groups, out), dtype=torch.uint8, generator=random)
    zeros = torch.randint(0, 16, (groups, out), dtype=torch.uint8, generator=random)
    scales = torch.full((groups, out), 0.01, dtype=torch.float16)
    weight = GptqWeight(cpu.pack(codes, 4), scales, zeros, torch.arange(32 * groups) // 32, 4)
    repacked, x = cpu.gptq_repack(weight), _inputs(m, 32 * groups).to(dtype)
    assert isinstance(repacked, Planes)
    assert torch.equal(cpu.gptq_restore(repacked).zeros, zeros)
    exact = x.double() @ cpu.gptq_dequantize(weight).double()
    off = (cpu.gptq_matmul(x, repacked).double() - exact).abs().max() / exact.std()
    assert float(off) < (1e-5 if dtype == torch.float32 else 3e-2)
