"""Kernels over weights as they are on disk: bit for bit what the reference gives."""

from dataclasses import replace

import pytest
import torch
from cuda_on_cpu import SCHEDULES, compiler, guarded
from cuda_on_cpu.launcher import ExecutorLauncher

from quantkit.errors import FormatError
from quantkit.kernels import random_weights
from quantkit.kernels.cuda import CudaBackend
from quantkit.kernels.protocol import WIDTHS
from quantkit.kernels.reference import ReferenceBackend

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")
REFERENCE = ReferenceBackend()
MIXED = ((8, 32), (6, 64), (5, 32), (4, 96), (3, 32), (2, 64), (2, 16))


def guard(weight):
    """The weight with every tensor ending at an unreadable page."""
    tensors = {name: guarded(getattr(weight, name)) for name in weight.__slots__ if isinstance(getattr(weight, name), torch.Tensor)}
    return replace(weight, **tensors)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("out", [12, 7], ids=["four columns a thread", "one column a thread"])
def test_pack_and_unpack(bits, out) -> None:
    backend = CudaBackend(ExecutorLauncher())
    for rows in (32, 32 * 37):
        codes = random_weights.codes(rows, out, bits)
        words = REFERENCE.pack(codes, bits)
        assert torch.equal(backend.pack(guarded(codes), bits), words)
        assert torch.equal(backend.unpack(guarded(words), bits), codes)


def test_pack_refuses_what_the_reference_refuses() -> None:
    backend = CudaBackend(ExecutorLauncher())
    with pytest.raises(FormatError, match="does not fit 2 bits"):
        backend.pack(torch.full((16, 4), 4, dtype=torch.uint8), 2)
    with pytest.raises(FormatError, match="fill no whole words"):
        backend.pack(torch.zeros(12, 4, dtype=torch.uint8), 4)
    with pytest.raises(FormatError, match="end inside a code"):
        backend.unpack(torch.zeros(4, 4, dtype=torch.int32), 3)


def test_empty_and_transposed_tensors() -> None:
    backend = CudaBackend(ExecutorLauncher())
    assert backend.pack(torch.zeros(0, 8, dtype=torch.uint8), 4).shape == (0, 8)
    codes = random_weights.codes(8, 16, 4)
    assert torch.equal(backend.pack(codes.t(), 4), REFERENCE.pack(codes.t(), 4))


@pytest.mark.parametrize("bits", WIDTHS)
def test_gptq_dequantize(bits) -> None:
    backend = CudaBackend(ExecutorLauncher())
    for act_order in (False, True):
        weight = random_weights.gptq(96, 20, bits, 32, act_order=act_order)
        assert torch.equal(backend.gptq_dequantize(guard(weight)), REFERENCE.gptq_dequantize(weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gptq_dequantize_with_other_scales(dtype) -> None:
    weight = random_weights.gptq(64, 10, 4, 16, dtype=dtype)
    expected = REFERENCE.gptq_dequantize(weight)
    assert torch.equal(CudaBackend(ExecutorLauncher()).gptq_dequantize(guard(weight)), expected)


@pytest.mark.parametrize("groups", [*(((bits, 64),) for bits in WIDTHS), MIXED], ids=str)
def test_exl2_dequantize(groups) -> None:
    weight = random_weights.exl2(groups, 40)
    assert torch.equal(CudaBackend(ExecutorLauncher()).exl2_dequantize(guard(weight)), REFERENCE.exl2_dequantize(weight))


def test_exl2_scales_that_are_subnormal() -> None:
    weight = random_weights.exl2(((8, 32), (4, 32)), 32)
    weight = replace(weight, scale_max=torch.tensor([8e-4, 3e-6], dtype=torch.float16))
    assert torch.equal(CudaBackend(ExecutorLauncher()).exl2_dequantize(guard(weight)), REFERENCE.exl2_dequantize(weight))


@pytest.mark.proof
@pytest.mark.parametrize(("order", "seed"), SCHEDULES)
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_variant_under_every_schedule(bits, order, seed) -> None:
    backend = CudaBackend(ExecutorLauncher(order, seed))
    for out in (1, 4, 31, 64, 264):
        codes = random_weights.codes(32 * 5, out, bits, seed=out)
        words = REFERENCE.pack(codes, bits)
        assert torch.equal(backend.pack(guarded(codes), bits), words)
        assert torch.equal(backend.unpack(guarded(words), bits), codes)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for group_size in (16, 32, 160):
                weight = random_weights.gptq(160, out, bits, group_size, dtype=dtype, act_order=group_size == 32, seed=out)
                assert torch.equal(backend.gptq_dequantize(guard(weight)), REFERENCE.gptq_dequantize(weight))
        if out % 8 == 0:
            weight = random_weights.exl2(((bits, 96), (bits, 64)), out, seed=out)
            assert torch.equal(backend.exl2_dequantize(guard(weight)), REFERENCE.exl2_dequantize(weight))


