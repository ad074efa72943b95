"""The quantizer's kernels on the CPU executor: grid errors, and the rounding of rows with error feedback."""

import pytest
import torch
from cuda_on_cpu import SCHEDULES, compiler, guarded
from cuda_on_cpu.launcher import ExecutorLauncher
from torch import Tensor

from quantkit.kernels.cuda import CudaBackend
from quantkit.kernels.reference import ReferenceBackend

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")
REFERENCE = ReferenceBackend()


def grids(count: int, out: int, top: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scales of both signs, and zero points."""
    scales = torch.rand(count, out, generator=random) * 0.1 + 0.05
    scales *= torch.randint(0, 2, (count, out), generator=random) * 2 - 1
    return scales, torch.randint(0, top + 1, (count, out), generator=random, dtype=torch.int32)


def check_grid_error(backend: CudaBackend, g: int, out: int, n: int, top: int) -> None:
    random = torch.Generator().manual_seed(g + out + n)
    rows, importance = torch.randn(g, out, generator=random), torch.rand(g, generator=random)
    scales, zeros = grids(n, out, top, random)
    got = backend.grid_error(*map(guarded, (rows, importance, scales, zeros)), top)
    torch.testing.assert_close(got, REFERENCE.grid_error(rows, importance, scales, zeros, top), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("g", "out", "n", "top"), [(1, 1, 1, 3), (37, 70, 35, 15), (128, 33, 3, 255), (64, 32, 32, 7)])
def test_grid_error(g, out, n, top) -> None:
    check_grid_error(CudaBackend(ExecutorLauncher()), g, out, n, top)


def check_solve_rows(backend: CudaBackend, b: int, out: int, groups: int, top: int, *, empty: bool = False) -> None:
    """Each row is checked given the kernel's own errors above it: a code may differ from the reference's only where two
    codes are equally near, but then so do all sums after it."""
    random = torch.Generator().manual_seed(b + out)
    weight = torch.randn(b, out, generator=random)
    target = weight + torch.randn(b, out, generator=random) * 0.1
    factor = torch.eye(b) + torch.randn(b, b, generator=random).tril(-1) / b
    garbage = torch.full((b, b), float("nan")).triu(1)  # only what is below the diagonal is read
    scales, zeros = grids(groups, out, top, random)
    if empty:
        scales[0] = 0
    group = torch.arange(b) * groups // b
    inputs = (weight, target, factor + garbage, group, scales, zeros)
    codes, errors = backend.solve_rows(*map(guarded, inputs), top)
    t = target.double() + factor.tril(-1).double() @ errors.double()
    ideal = torch.where(scales[group] == 0, 0, t / scales[group].double()) + zeros[group]
    assert float((codes - ideal.clamp(0, top)).abs().max()) <= 0.5 + 1e-4
    expected = weight - (codes.float() - zeros[group]) * scales[group]
    assert torch.equal(errors, expected)
    reference, _ = REFERENCE.solve_rows(weight, target, factor, group, scales, zeros, top)
    assert float((codes == reference).float().mean()) > 0.98


@pytest.mark.parametrize(("b", "out", "groups", "top"), [(1, 5, 1, 15), (100, 33, 3, 3), (128, 32, 4, 15), (200, 8, 7, 255)])
def test_solve_rows(b, out, groups, top) -> None:
    check_solve_rows(CudaBackend(ExecutorLauncher()), b, out, groups, top)


def test_a_scale_of_zero_leaves_the_weight_as_the_error() -> None:
    check_solve_rows(CudaBackend(ExecutorLauncher()), 64, 16, 2, 15, empty=True)


@pytest.mark.proof
@pytest.mark.parametrize(("order", "seed"), SCHEDULES)
def test_every_shape_under_every_schedule(order, seed) -> None:
    backend = CudaBackend(ExecutorLauncher(order, seed))
    for top in (3, 7, 15, 31, 63, 255):
        for g, out, n in ((1, 1, 1), (32, 64, 20), (129, 100, 65)):
            check_grid_error(backend, g, out, n, top)
        for b, out, groups in ((1, 1, 1), (7, 40, 2), (33, 31, 33), (128, 64, 1), (128, 96, 128), (300, 40, 5)):
            check_solve_rows(backend, b, out, groups, top, empty=b == 128)
