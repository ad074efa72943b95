"""Every backend operation, swept over every backend, against a witness that shares no code with it."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit import kernels
from quantkit.errors import FormatError
from quantkit.kernels import multiply
from quantkit.kernels.pairs import HAS_PAIR_PRODUCTS
from quantkit.kernels.protocol import WIDTHS, Backend, Exl2Weight, GptqWeight

# The CPU kernels are swept a second time as on a processor that cannot multiply bytes.
BACKENDS = ("reference", "cpu", "cpu without byte products")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Error of a float32 sum over its terms, and of a result that is stored in the dtype of x; both in units of y's spread.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch) -> Backend:
    name = request.param.split()[0]
    if request.param.endswith("without byte products"):
        monkeypatch.setattr(multiply, "HAS_BYTE_PRODUCTS", False)
    return kernels.backend("cpu", name)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _codes(rows: int, out: int, bits: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 1 << bits, (rows, out), dtype=torch.uint8, generator=_random(seed))


def _stream(codes: Tensor, bits: int) -> Tensor:
    """The definition of packing, by arbitrary-precision integers: each column is one number."""
    columns = []
    for column in codes.t().tolist():
        number = sum(code << bits * k for k, code in enumerate(column))
        columns.append(np.frombuffer(number.to_bytes(len(column) * bits // 8, "little"), "<i4"))
    return torch.tensor(np.stack(columns, 1))


def _gptq(rows: int, out: int, bits: int, group_size: int, *, dtype=torch.float16, act_order=False, seed=0) -> GptqWeight:
    random = _random(seed)
    group = torch.arange(rows) // group_size
    if act_order:
        group = group[torch.randperm(rows, generator=random)]
    groups = int(group.max()) + 1
    scales = (torch.randn(groups, out, generator=random) * 0.01).to(dtype)
    zeros = torch.randint(0, 1 << bits, (groups, out), dtype=torch.uint8, generator=random)
    return GptqWeight(_stream(_codes(rows, out, bits, seed), bits), scales, zeros, group, bits)


def _gptq_by_hand(weight: GptqWeight, codes: Tensor) -> Tensor:
    """float64, then rounded once to float16: exact, as a product of 8 and 11 bits fits float64."""
    steps = codes.double() - weight.zeros.double()[weight.group]
    return (steps * weight.scales.double()[weight.group]).to(torch.float16)


def _exl2(groups: tuple[tuple[int, int], ...], out: int, seed: int = 0) -> tuple[Exl2Weight, Tensor]:
    """A weight and, by hand, what it stands for."""
    random = _random(seed)
    rows = sum(count for _, count in groups)
    order = torch.randperm(rows, generator=random)
    scale_codes = torch.randint(0, 16, (len(groups), out), generator=random, dtype=torch.uint8)
    scale_max = (torch.rand(len(groups), generator=random) * 0.5).to(torch.float16)
    words, expected, row = [], torch.empty(rows, out, dtype=torch.float16), 0
    for g, (bits, count) in enumerate(groups):
        codes = _codes(count, out, bits, seed + g)
        words.append(_stream(codes, bits))
        unit = (scale_max[g].double() / 256).to(torch.float16).double()
        scale = ((scale_codes[g].double() + 1) ** 2 * unit).to(torch.float16).double()
        expected[order[row : row + count]] = ((codes.double() - 2 ** (bits - 1)) * scale).to(torch.float16)
        row += count
    packed_scales = _stream(scale_codes.t(), 4).t().contiguous()
    return Exl2Weight(torch.cat(words), packed_scales, scale_max, groups, order), expected


def _assert_close(found: Tensor, x: Tensor, weight: Tensor) -> None:
    assert found.dtype == x.dtype
    exact = x.double() @ weight.double()
    spread = float(exact.square().mean().sqrt()) or 1.0
    assert float((found.double() - exact).abs().max()) <= TOLERANCE[x.dtype] * spread


EXL2_GROUPS = {
    "all widths": tuple((bits, 32) for bits in (8, 6, 5, 4, 3, 2)),
    "one width": ((4, 64), (4, 64), (4, 32)),
    "short last": ((6, 32), (3, 64), (3, 64), (2, 32)),
    "tail of 16": ((3, 64), (2, 64), (2, 16)),
}


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("rows", "out"), [(32, 1), (32, 32), (96, 33), (160, 7)])
def test_pack(backend: Backend, bits: int, rows: int, out: int) -> None:
    codes = _codes(rows, out, bits)
    words = backend.pack(codes, bits)
    assert words.dtype == torch.int32
    assert torch.equal(words, _stream(codes, bits))


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("rows", "out"), [(32, 1), (32, 32), (96, 33), (160, 7)])
def test_unpack(backend: Backend, bits: int, rows: int, out: int) -> None:
    codes = _codes(rows, out, bits)
    unpacked = backend.unpack(_stream(codes, bits), bits)
    assert unpacked.dtype == torch.uint8
    assert torch.equal(unpacked, codes)


@settings(max_examples=30, deadline=None)
@given(bits=st.sampled_from(WIDTHS), units=st.integers(1, 5), out=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_unpack_inverts_pack(bits: int, units: int, out: int, seed: int) -> None:
    for name in ("reference", "cpu"):
        backend = kernels.backend("cpu", name)
        codes = _codes(32 * units, out, bits, seed)
        assert torch.equal(backend.unpack(backend.pack(codes, bits), bits), codes)


def test_pack_takes_sixteen_rows_at_two_bits(backend: Backend) -> None:
    codes = _codes(16, 8, 2)
    assert torch.equal(backend.unpack(backend.pack(codes, 2), 2), codes)


def test_pack_refuses_what_cannot_be_packed(backend: Backend) -> None:
    with pytest.raises(FormatError, match="33 rows at 3 bits fill no whole words: expected a multiple of 32"):
        backend.pack(_codes(33, 4, 3), 3)
    with pytest.raises(FormatError, match="code 8 does not fit 3 bits"):
        backend.pack(torch.full((32, 4), 8, dtype=torch.uint8), 3)
    with pytest.raises(FormatError, match="7-bit codes cannot be packed: expected one of 2, 3, 4, 5, 6, 8 bits"):
        backend.pack(_codes(32, 4, 7), 7)


def test_unpack_refuses_half_a_unit(backend: Backend) -> None:
    with pytest.raises(FormatError, match="4 words at 3 bits end inside a code: expected a multiple of 3"):
        backend.unpack(torch.zeros(4, 2, dtype=torch.int32), 3)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", [20, 32, 64, 160])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_dequantize(backend: Backend, bits: int, dtype: torch.dtype, group_size: int, act_order: bool) -> None:
    weight = _gptq(160, 33, bits, group_size, dtype=dtype, act_order=act_order)
    found = backend.gptq_dequantize(weight)
    assert torch.equal(found, _gptq_by_hand(weight, _codes(160, 33, bits)))


def test_gptq_dequantize_keeps_subnormal_and_zero_scales(backend: Backend) -> None:
    weight = _gptq(32, 32, 8, 32)
    weight.scales.copy_(torch.linspace(0, 3e-6, 32))
    assert torch.equal(backend.gptq_dequantize(weight), _gptq_by_hand(weight, _codes(32, 32, 8)))
    assert not backend.gptq_dequantize(weight)[:, 0].any()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("rows", "out", "group_size"), [(32, 32, 32), (160, 96, 64), (96, 64, 96), (64, 32, 16)])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_repack(backend: Backend, bits: int, rows: int, out: int, group_size: int, act_order: bool) -> None:
    """Repacking is a bijection: `gptq_restore` gives back what was repacked."""
    weight = _gptq(rows, out, bits, group_size, act_order=act_order)
    repacked = backend.gptq_repack(weight)
    assert repacked.size_bytes >= rows * out * bits // 8
    _assert_restored(backend.gptq_restore(repacked), weight, ("words", "scales", "zeros", "group"))


test_gptq_restore = test_gptq_repack


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 16, 17, 33, 65])
@pytest.mark.parametrize(("rows", "out", "group_size"), [(32, 32, 32), (160, 96, 64), (64, 64, 64), (64, 32, 16)])
def test_gptq_matmul(backend: Backend, bits: int, m: int, rows: int, out: int, group_size: int) -> None:
    weight = _gptq(rows, out, bits, group_size, seed=m)
    x = torch.randn(m, rows, generator=_random(m))
    found = backend.gptq_matmul(x, backend.gptq_repack(weight))
    _assert_close(found, x, _gptq_by_hand(weight, _codes(rows, out, bits, m)))


@pytest.mark.parametrize(("dtype", "scale_dtype", "m"), list(itertools.product(FLOATS, FLOATS, (1, 40))))
def test_gptq_matmul_in_every_dtype(backend: Backend, dtype: torch.dtype, scale_dtype: torch.dtype, m: int) -> None:
    weight = _gptq(96, 64, 4, 32, dtype=scale_dtype, act_order=True)
    x = torch.randn(m, 96, generator=_random(1)).to(dtype)
    found = backend.gptq_matmul(x, backend.gptq_repack(weight))
    _assert_close(found, x, _gptq_by_hand(weight, _codes(96, 64, 4)))


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("m", [1, 96])
def test_one_hot_input_reads_each_weight_exactly(backend: Backend, bits: int, act_order: bool, m: int) -> None:
    """Finds any misplaced row, column, group or rounding: weights come out bit for bit."""
    weight = _gptq(96, 64, bits, 32, act_order=act_order)
    repacked = backend.gptq_repack(weight)
    inputs = torch.eye(96).split(m)
    found = torch.cat([backend.gptq_matmul(x, repacked) for x in inputs])
    assert torch.equal(found, _gptq_by_hand(weight, _codes(96, 64, bits)).float())


@pytest.mark.parametrize("size", [6e4, 1e-30])
def test_gptq_matmul_of_extreme_inputs(backend: Backend, size: float) -> None:
    weight = _gptq(128, 32, 4, 128)
    x = torch.randn(3, 128, generator=_random(2)) * size
    _assert_close(backend.gptq_matmul(x, backend.gptq_repack(weight)) / size, x / size, _gptq_by_hand(weight, _codes(128, 32, 4)))


@pytest.mark.parametrize("groups", EXL2_GROUPS.values(), ids=EXL2_GROUPS)
def test_exl2_dequantize(backend: Backend, groups: tuple[tuple[int, int], ...]) -> None:
    weight, expected = _exl2(groups, 64)
    assert torch.equal(backend.exl2_dequantize(weight), expected)


@pytest.mark.parametrize("groups", EXL2_GROUPS.values(), ids=EXL2_GROUPS)
def test_exl2_repack(backend: Backend, groups: tuple[tuple[int, int], ...]) -> None:
    weight, _ = _exl2(groups, 64)
    restored = backend.exl2_restore(backend.exl2_repack(weight))
    assert restored.groups == weight.groups
    _assert_restored(restored, weight, ("words", "scale_codes", "scale_max", "order"))


test_exl2_restore = test_exl2_repack


@pytest.mark.parametrize("m", [1, 2, 5, 17, 33, 64])
@pytest.mark.parametrize("groups", EXL2_GROUPS.values(), ids=EXL2_GROUPS)
def test_exl2_matmul(backend: Backend, groups: tuple[tuple[int, int], ...], m: int) -> None:
    weight, expected = _exl2(groups, 96, seed=m)
    x = torch.randn(m, len(expected), generator=_random(m))
    _assert_close(backend.exl2_matmul(x, backend.exl2_repack(weight)), x, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exl2_matmul_of_more_rows_than_are_taken_one_by_one(backend: Backend, dtype: torch.dtype) -> None:
    weight, expected = _exl2(EXL2_GROUPS["all widths"], 96)
    x = torch.randn(80, len(expected), generator=_random(3)).to(dtype)
    _assert_close(backend.exl2_matmul(x, backend.exl2_repack(weight)), x, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "positions", "dim", "window"),
    [(9, 3, 50, 50, 64, 0), (4, 1, 33, 100, 80, 0), (2, 2, 16, 16, 6, 0), (4, 2, 40, 130, 32, 17), (2, 1, 70, 70, 128, 1)],
)
def test_attend_many(
    backend: Backend, heads: int, kv_heads: int, queries: int, positions: int, dim: int, window: int, dtype: torch.dtype
) -> None:
    random = _random(queries)
    q = torch.randn(queries, heads, dim, generator=random).to(dtype).transpose(0, 1)
    k, v = torch.randn(2, kv_heads, positions, dim, generator=random).to(dtype)
    found = backend.attend_many(q, k, v, scale=0.3, window=window)
    assert found.dtype == dtype
    assert found.shape == (queries, heads, dim)
    for head, query in itertools.product(range(heads), range(0, queries, 7)):
        last = positions - queries + query + 1
        seen = slice(max(0, last - window) if window else 0, last)
        past, values = (side[head // (heads // kv_heads), seen].double() for side in (k, v))
        expected = (past @ q[head, query].double() * 0.3).softmax(0) @ values
        bound = 1e-5 if dtype == torch.float32 else 2e-2  # exponentials and results are rounded to 8 bits
        torch.testing.assert_close(found[query, head].double(), expected, rtol=bound, atol=bound)


def test_attends_many(backend: Backend) -> None:
    """Never what it does not compute: gradients, other dtypes, heads of keys and values that differ."""
    q, k = torch.zeros(4, 40, 64, dtype=torch.bfloat16), torch.zeros(2, 40, 64, dtype=torch.bfloat16)
    assert backend.attends_many(q, k, k) == (backend.name == "cpu" and HAS_PAIR_PRODUCTS)
    assert not backend.attends_many(q.float(), k.float(), k.float())
    assert not backend.attends_many(q.clone().requires_grad_(), k, k)
    assert not backend.attends_many(q, k, k[:, :, :32])
    assert not backend.attends_many(q[:, :3], k, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "angles", "dim", "pairs"), [(1, 1, 64, 32), (3, 1, 40, 12), (2, 2, 18, 9), (2, 2, 96, 40)])
def test_rotate_heads(backend: Backend, rows: int, angles: int, dim: int, pairs: int, dtype: torch.dtype) -> None:
    random = _random(dim)
    wide = torch.randn(rows, 19, 5 * dim, generator=random).to(dtype)
    x = wide[..., dim : 4 * dim].unflatten(-1, (3, dim))  # heads beside others, as a fused linear leaves them
    cos, sin = torch.randn(2, angles, 19, pairs, generator=random)
    found = backend.rotate_heads(x, cos, sin, dtype)
    one, other = x[..., :pairs].double(), x[..., pairs : 2 * pairs].double()
    c, s = cos[:, :, None].double(), sin[:, :, None].double()
    exact = torch.cat((one * c - other * s, other * c + one * s, x[..., 2 * pairs :].double()), -1)
    bound = 2**-8 if dtype == torch.bfloat16 else 2**-22
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=bound, atol=2**-20)
    assert torch.equal(found, kernels.backend("cpu", "reference").rotate_heads(x, cos, sin, dtype))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(found, backend.rotate_heads(x, cos, sin, dtype))
    finally:
        torch.set_num_threads(before)


def test_rotates_heads(backend: Backend) -> None:
    """Never gradients, other dtypes, or elements of a head that lie apart."""
    x = torch.zeros(1, 20, 3, 64, dtype=torch.bfloat16)
    assert backend.rotates_heads(x, torch.bfloat16) == (backend.name == "cpu")
    assert not backend.rotates_heads(x, torch.float32) and not backend.rotates_heads(x.float(), torch.bfloat16)
    assert not backend.rotates_heads(x.clone().requires_grad_(), torch.bfloat16)
    assert not backend.rotates_heads(x[..., ::2], torch.bfloat16) and not backend.rotates_heads(x[:, :3], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "features"), [(1, 1), (7, 33), (200, 64)])
def test_add_gram(backend: Backend, tokens: int, features: int, dtype: torch.dtype) -> None:
    random = _random(tokens)
    rows = torch.randn(tokens, features, generator=random).to(dtype)
    factors, total = torch.rand(tokens, generator=random), torch.ones(features, features)
    backend.add_gram(total, rows, factors)
    scaled = rows.double() * factors.double()[:, None]
    unit = 2**-7 if dtype == torch.bfloat16 else 2**-20  # of two roundings, or of sums in float32
    bound = unit * (1 + scaled.abs().T @ scaled.abs())
    assert bool(((total.double() - 1 - scaled.T @ scaled).triu().abs() <= bound).all())


def test_adds_gram(backend: Backend) -> None:
    """Never float32 rows, nor sums in float64, whose digits it has not."""
    rows, total = torch.zeros(4, 40, dtype=torch.bfloat16), torch.zeros(40, 40)
    assert backend.adds_gram(total, rows) == (backend.name == "cpu" and HAS_PAIR_PRODUCTS)
    assert not backend.adds_gram(total, rows.float()) and not backend.adds_gram(total.double(), rows)


@pytest.mark.parametrize(("bits", "out"), [(2, 1), (3, 33), (4, 64), (8, 70)])
def test_grid_error(backend: Backend, bits: int, out: int) -> None:
    random, top = _random(bits), (1 << bits) - 1
    rows = torch.randn(48, out, generator=random)
    importance = torch.rand(48, generator=random)
    scales = (torch.rand(5, out, generator=random) + 0.1) * torch.tensor([1, -1, 1, -1, 1.0])[:, None] / top
    zeros = torch.randint(0, top + 1, (5, out), dtype=torch.int32, generator=random)
    expected = torch.empty(5, out, dtype=torch.float64)
    levels = torch.arange(top + 1)
    for n in range(5):
        values = (levels[:, None] - zeros[n]).double() * scales[n].double()
        nearest = (rows.double() - values[:, None]).square().amin(0)
        expected[n] = (importance.double()[:, None] * nearest).sum(0)
    found = backend.grid_error(rows, importance, scales, zeros, top)
    assert torch.allclose(found.double(), expected, rtol=1e-4)


@pytest.mark.parametrize(("bits", "rows", "out"), [(2, 1, 1), (3, 32, 33), (4, 64, 70), (8, 40, 130)])
def test_solve_rows(backend: Backend, bits: int, rows: int, out: int) -> None:
    random, top = _random(bits), (1 << bits) - 1
    weight = torch.randn(rows, out, generator=random)
    target = weight + 0.1 * torch.randn(rows, out, generator=random)
    factor = torch.tril(0.1 * torch.randn(rows, rows, generator=random), -1) + torch.eye(rows)
    group = torch.randint(0, 3, (rows,), generator=random)
    scales = (torch.rand(3, out, generator=random) + 0.5) * 4 / top * torch.tensor([1.0, -1.0, 1.0])[:, None]
    zeros = torch.randint(0, top + 1, (3, out), dtype=torch.int32, generator=random)
    codes, errors = backend.solve_rows(weight, target, factor, group, scales, zeros, top)
    assert codes.dtype == torch.uint8
    # The contract, checked backwards: the errors belong to the codes, and each code is nearest to what was fed to it.
    value = (codes.double() - zeros[group]) * scales[group].double()
    assert torch.allclose(errors.double(), weight.double() - value, atol=1e-5)
    fed = target.double() + torch.tril(factor.double(), -1) @ errors.double()
    levels = (torch.arange(top + 1).double()[:, None, None] - zeros[group]) * scales[group].double()
    best = (levels - fed).abs().amin(0)
    assert torch.allclose((value - fed).abs(), best, atol=1e-5)


def test_solve_rows_puts_a_zero_scale_on_its_zero_point(backend: Backend) -> None:
    weight = torch.randn(4, 3, generator=_random(0))
    scales, zeros = torch.zeros(1, 3), torch.full((1, 3), 5, dtype=torch.int32)
    codes, errors = backend.solve_rows(weight, weight, torch.eye(4), torch.zeros(4, dtype=torch.int64), scales, zeros, 15)
    assert bool((codes == 5).all())
    assert torch.equal(errors, weight)


def test_ties_round_to_even(backend: Backend) -> None:
    weight = torch.tensor([[0.5, 1.5, 2.5, -0.5]])
    one, zeros = torch.ones(1, 4), torch.full((1, 4), 4, dtype=torch.int32)
    codes, _ = backend.solve_rows(weight, weight, torch.eye(1), torch.zeros(1, dtype=torch.int64), one, zeros, 15)
    assert codes.tolist() == [[4, 6, 6, 4]]


def test_every_operation_has_a_sweep() -> None:
    operations = {name for name in vars(Backend) if not name.startswith("_") and callable(getattr(Backend, name))}
    assert operations >= {"pack", "solve_rows"}
    missing = {name for name in operations if f"test_{name}" not in globals()}
    assert not missing


def _assert_restored(found: object, expected: object, fields: tuple[str, ...]) -> None:
    for field in fields:
        assert torch.equal(getattr(found, field), getattr(expected, field)), field
