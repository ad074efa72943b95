"""Integer products as operations, against the weights that they stand for."""

import pytest
import torch
from torch import Tensor

from quantkit import kernels
from quantkit.kernels import multiply
from quantkit.kernels.integers import Rounded, padded, product
from quantkit.kernels.planes import Planes
from quantkit.kernels.program import Program
from quantkit.kernels.protocol import WIDTHS, Exl2Weight, GptqWeight

cpu = kernels.backend("cpu", "cpu")
pytestmark = pytest.mark.skipif(not multiply.HAS_BYTE_PRODUCTS, reason="this processor multiplies no bytes")


def _gptq(bits: int, rows: int = 128, out: int = 80, *, scattered: bool, dtype: torch.dtype, alike: bool) -> GptqWeight:
    random = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (rows, out), dtype=torch.uint8, generator=random)
    group = torch.arange(rows) // 32
    group = group[torch.randperm(rows, generator=random)] if scattered else group
    scales = (torch.randn(4, out, generator=random) * 0.01).to(dtype)
    zeros = torch.randint(0, 1 << bits, (4, out), dtype=torch.uint8, generator=random)
    return GptqWeight(cpu.pack(codes, bits), scales, torch.full_like(zeros, 2) if alike else zeros, group, bits)


def _check(found: Tensor, x: Tensor, weight: Tensor) -> None:
    exact = x.double() @ weight.double()
    assert float((found - exact).square().mean().sqrt()) < 4e-4 * float(exact.square().mean().sqrt())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize(
    ("scattered", "dtype", "alike"), [(False, torch.float16, True), (True, torch.float16, False), (False, torch.float32, False)]
)
def test_gptq(bits: int, rows: int, scattered: bool, dtype: torch.dtype, alike: bool) -> None:
    weight = _gptq(bits, scattered=scattered, dtype=dtype, alike=alike)
    planes = cpu.gptq_repack(weight)
    assert isinstance(planes, Planes)
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1))
    found = product(x, planes, 1)
    _check(found, x, cpu.gptq_dequantize(weight))
    assert torch.equal(product(x, planes, 3), found)
    restored = cpu.gptq_restore(planes)
    for name in ("words", "scales", "zeros"):
        assert torch.equal(getattr(restored, name), getattr(weight, name))


@pytest.mark.parametrize("rows", [1, 5])
def test_exl2_of_all_widths(rows: int) -> None:
    random = torch.Generator().manual_seed(0)
    groups = ((8, 32), (6, 64), (5, 32), (4, 96), (3, 32), (2, 64))
    words = [
        cpu.pack(torch.randint(0, 1 << bits, (n, 64), dtype=torch.uint8, generator=random), bits) for bits, n in groups
    ]
    scale_codes = torch.randint(0, 2**31 - 1, (len(groups), 8), generator=random).to(torch.int32)
    scale_max = torch.rand(len(groups), generator=random).to(torch.float16)
    weight = Exl2Weight(torch.cat(words), scale_codes, scale_max, groups, torch.randperm(320, generator=random))
    planes = cpu.exl2_repack(weight)
    assert isinstance(planes, Planes)
    x = torch.randn(rows, 320, generator=random)
    _check(product(x, planes, 2), x, cpu.exl2_dequantize(weight))


@pytest.mark.parametrize("rows", [1, 4])
def test_products_side_by_side_with_biases(rows: int) -> None:
    weights = [_gptq(bits, out=out, scattered=False, dtype=torch.float16, alike=True) for bits, out in ((4, 48), (3, 16))]
    x, bias = torch.randn(rows, 128), torch.randn(16)
    program, inputs, y = Program(), Rounded(rows, 128), torch.full((rows, 80), 7.0)
    inputs.add_rounding(program, x, None)
    for weight, column, own in zip(weights, (8, 56), (None, bias), strict=True):
        planes = cpu.gptq_repack(weight)
        assert isinstance(planes, Planes)
        inputs.add_product(program, planes, y, column, own)
    for _ in range(2):  # the second run leaves the same behind
        program.run(2)
        assert bool((y[:, :8] == 7).all())
        assert bool((y[:, 72:] == 7).all())
        _check(y[:, 8:56], x, cpu.gptq_dequantize(weights[0]))
        _check(y[:, 56:72] - bias, x, cpu.gptq_dequantize(weights[1]))


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (2, 4), (4, 4), (5, 8), (64, 64)])
def test_rows_in_memory(rows: int, expected: int) -> None:
    assert padded(rows) == expected
