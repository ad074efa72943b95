"""The fused matmuls on the CPU executor, against the reference in float64 on the same dequantized weights.

Every width runs in `test_every_kernel.py`; here are the shapes, the order of sums, and what is not fused.
"""

from dataclasses import fields, replace

import pytest
import torch
from cuda_on_cpu import SCHEDULES, compiler, guarded
from cuda_on_cpu.launcher import ExecutorLauncher
from torch import Tensor

from quantkit.kernels import random_weights
from quantkit.kernels.cuda import CudaBackend
from quantkit.kernels.protocol import WIDTHS, Repacked
from quantkit.kernels.reference import ReferenceBackend

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")
REFERENCE = ReferenceBackend()
# Of the largest |y|: the rounding of the stored result, and of each weight to float16 in the reference.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 8e-3}


def guard(repacked: Repacked) -> Repacked:
    """The tiles with every tensor ending at an unreadable page."""
    values = {field.name: getattr(repacked, field.name) for field in fields(repacked)}
    return replace(repacked, **{name: guarded(value) for name, value in values.items() if isinstance(value, Tensor)})


def activations(rows: int, features: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(got: Tensor, x: Tensor, weight: Tensor) -> None:
    expected = x.double() @ weight.double()
    assert got.dtype == x.dtype
    assert got.shape == expected.shape
    bound = TOLERANCE[x.dtype] * float(expected.abs().max())
    assert float((got.double() - expected).abs().max()) <= bound


def gptq(backend: CudaBackend, weight, x: Tensor) -> Tensor:
    return backend.gptq_matmul(guarded(x), guard(backend.gptq_repack(weight)))


def exl2(backend: CudaBackend, weight, x: Tensor) -> Tensor:
    return backend.exl2_matmul(guarded(x), guard(backend.exl2_repack(weight)))


MIXED = ((8, 32), (6, 64), (5, 32), (4, 96), (3, 32), (2, 64), (2, 16))
HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("rows", [9, 16, 17, 64])
def test_gptq_with_more_rows(rows) -> None:
    backend = CudaBackend(ExecutorLauncher())
    weight = random_weights.gptq(320, 200, 4, 64, act_order=True)
    x = activations(rows, 320, torch.float16)
    check(gptq(backend, weight, x), x, REFERENCE.gptq_dequantize(weight))


def test_each_weight_is_read_where_it_is() -> None:
    """One-hot rows give the weights back one by one: no permutation can hide."""
    backend = CudaBackend(ExecutorLauncher())
    stored = random_weights.gptq(64, 128, 4, 32, act_order=True)
    mixed = random_weights.exl2(((8, 32), (3, 32)), 64)
    for first in (0, 24, 56):
        x = torch.eye(64, dtype=torch.float16)[first : first + 8]
        assert torch.equal(gptq(backend, stored, x), REFERENCE.gptq_dequantize(stored)[first : first + 8])
        assert torch.equal(exl2(backend, mixed, x), REFERENCE.exl2_dequantize(mixed)[first : first + 8])


@pytest.mark.parametrize("group_size", [16, 48, 1000])
def test_groups_that_are_no_whole_runs(group_size) -> None:
    weight = random_weights.gptq(96, 64, 4, group_size)
    x = activations(2, 96, torch.float16)
    check(gptq(CudaBackend(ExecutorLauncher()), weight, x), x, REFERENCE.gptq_dequantize(weight))


@pytest.mark.parametrize("groups", [MIXED, ((4, 128), (4, 64))], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_exl2_mixes_widths_in_one_launch(groups, dtype) -> None:
    launcher = ExecutorLauncher()
    backend = CudaBackend(launcher)
    weight = random_weights.exl2(groups, 96)
    x = activations(5, sum(rows for _, rows in groups), dtype)
    repacked = guard(backend.exl2_repack(weight))
    launcher.launched.clear()
    check(backend.exl2_matmul(guarded(x), repacked), x, REFERENCE.exl2_dequantize(weight))
    assert [name for name, _ in launcher.launched] == ["exl2_matmul"]


def test_exl2_with_more_rows() -> None:
    weight = random_weights.exl2(MIXED, 96)
    x = activations(30, weight.order.numel(), torch.float16)
    check(exl2(CudaBackend(ExecutorLauncher()), weight, x), x, REFERENCE.exl2_dequantize(weight))


def test_the_same_bits_under_every_schedule_and_any_split() -> None:
    """The order of every sum is fixed: neither threads nor neighbours in the batch change a bit."""
    weight = random_weights.gptq(512, 128, 4, 128)
    x = activations(6, 512, torch.float16)
    results = [gptq(CudaBackend(ExecutorLauncher(order, seed)), weight, x) for order, seed in SCHEDULES]
    alone = torch.cat([gptq(CudaBackend(ExecutorLauncher()), weight, row[None]) for row in x])
    assert all(torch.equal(result, results[0]) for result in (*results, alone))
    for processors in (1, 100):
        launcher = ExecutorLauncher(processors=processors)
        check(gptq(CudaBackend(launcher), weight, x), x, REFERENCE.gptq_dequantize(weight))
        assert launcher.launched[-1][1][2] == {1: 2, 100: 4}[processors], "splits"


@pytest.mark.parametrize(("rows", "dtype", "architecture"), [(65, torch.float16, 80), (2, torch.float32, 80), (2, torch.bfloat16, 75)])
def test_what_the_fused_kernels_do_not_take_is_expanded(rows, dtype, architecture) -> None:
    for weight, dequantized, run in (
        (stored := random_weights.gptq(96, 100, 4, 48, act_order=True), REFERENCE.gptq_dequantize(stored), gptq),
        (mixed := random_weights.exl2(MIXED, 96), REFERENCE.exl2_dequantize(mixed), exl2),
    ):
        launcher = ExecutorLauncher(architecture=architecture)
        x = activations(rows, len(dequantized), dtype)
        got = run(CudaBackend(launcher), weight, x)
        assert torch.equal(got, x @ dequantized.to(dtype))
        assert launcher.launched[-1][0] == f"{run.__name__}_expand"


def test_large_activations_do_not_overflow_inside() -> None:
    """Partial sums are float32: only a result beyond float16 is infinite, as in the reference."""
    weight = random_weights.gptq(64, 64, 8, 64)
    weight = replace(weight, scales=torch.full_like(weight.scales, 1e-4))
    x = torch.full((1, 64), 6e4, dtype=torch.float16)
    check(gptq(CudaBackend(ExecutorLauncher()), weight, x), x, REFERENCE.gptq_dequantize(weight))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_restore_gives_the_words_back(dtype) -> None:
    backend = CudaBackend(ExecutorLauncher())
    stored = random_weights.gptq(96, 40, 3, 32, act_order=True, dtype=dtype)
    back = backend.gptq_restore(backend.gptq_repack(stored))
    assert back.bits == 3
    assert all(torch.equal(getattr(back, name), getattr(stored, name)) for name in ("words", "scales", "zeros", "group"))
    mixed = random_weights.exl2(MIXED, 40)
    back = backend.exl2_restore(backend.exl2_repack(mixed))
    assert back.groups == MIXED
    assert all(torch.equal(getattr(back, name), getattr(mixed, name)) for name in ("words", "scale_codes", "scale_max", "order"))


def test_no_rows() -> None:
    backend = CudaBackend(ExecutorLauncher())
    repacked = backend.gptq_repack(random_weights.gptq(64, 64, 4, 32))
    assert backend.gptq_matmul(torch.empty(0, 64, dtype=torch.float16), repacked).shape == (0, 64)


@pytest.mark.proof
@pytest.mark.parametrize(("order", "seed"), SCHEDULES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_width_and_shape_under_every_schedule(bits, dtype, order, seed) -> None:
    backend = CudaBackend(ExecutorLauncher(order, seed, processors=6))
    for rows in (1, 7, 8, 9, 16, 17, 33, 63, 64):
        for in_features, out, group_size in ((32, 32, 32), (608, 100, 64), (1024, 320, 128)):
            for scales in HALVES if rows == 1 else [torch.float16]:
                weight = random_weights.gptq(in_features, out, bits, group_size, act_order=out == 100, dtype=scales, seed=rows)
                x = activations(rows, in_features, dtype, seed=out)
                check(gptq(backend, weight, x), x, REFERENCE.gptq_dequantize(weight))
        mixed = random_weights.exl2(((8, 32), (bits, 96), (2, 64), (2, 16)), 160, seed=rows)
        x = activations(rows, 208, dtype)
        check(exl2(backend, mixed, x), x, REFERENCE.exl2_dequantize(mixed))
