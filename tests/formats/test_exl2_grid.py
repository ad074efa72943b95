"""The choice of scales for an EXL2 group: what a reader computes, what is never clipped, what importances buy, and the
search against the stored one of ExLlamaV2 under its own measure."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from quantkit import kernels
from quantkit.errors import FormatError
from quantkit.formats import exl2_grid
from quantkit.formats.codec import Grid
from quantkit.formats.exl2_grid import LARGEST_UNIT, ROOTS, SMALLEST_UNIT, fit, scales
from quantkit.kernels.protocol import WIDTHS
from quantkit.kernels.reference import ReferenceBackend, exl2_scales

SEARCHES = Path(__file__).parents[1] / "golden" / "exl2" / "scale_search.safetensors"


def some_rows(seed: int = 0, rows: int = 64) -> Tensor:
    """Columns of all kinds: mixed, never negative, never positive, all zero, one outlier, a hundred times smaller."""
    values = torch.randn(rows, 12, generator=torch.Generator().manual_seed(seed)) * 0.02
    values[:, 1], values[:, 2], values[:, 3] = values[:, 1].abs(), -values[:, 2].abs(), 0
    values[5, 4], values[6, 5] = 0.5, -0.5
    values[:, 6] *= 0.01
    return values


def stored_scales(grid: Grid) -> Tensor:
    """The scales that the reference reader computes from what the codec will write, padded to eight columns."""
    codes = torch.nn.functional.pad(grid.stored["q_scale"], (0, -len(grid.scale) % 8))
    words = ReferenceBackend().pack(codes[:, None], 4).t().contiguous()
    return exl2_scales(words, grid.stored["q_scale_max"][None])[0, : len(grid.scale)].to(torch.float32)


def cost(grid: Grid, rows: Tensor, importance: Tensor) -> float:
    return float((importance @ (rows - grid.dequantize(grid.quantize(rows))).square()).double().sum())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6, 1e4])
def test_what_is_fitted_is_what_a_reader_computes(bits: int, size: float) -> None:
    """Down to units of a few float16 steps, which are subnormal."""
    for importance in (None, torch.rand(64, generator=torch.Generator().manual_seed(0)) + 0.1):
        grid = fit(some_rows() * size, bits, importance)
        assert torch.equal(stored_scales(grid), grid.scale)
        assert grid.stored["q_scale"].dtype == torch.uint8 and int(grid.stored["q_scale"].max()) <= 15
        assert grid.stored["q_scale_max"].dtype == torch.float16 and grid.stored["q_scale_max"].shape == ()
        assert bool((grid.scale > 0).all()) and bool((grid.zero == 2 ** (bits - 1)).all())
        assert grid.top == 2**bits - 1


def test_every_unit_is_held_exactly() -> None:
    """`fp16(256 · unit) / 256` is the unit again, for all 23 550 of them."""
    units = torch.arange(1, torch.tensor(LARGEST_UNIT, dtype=torch.float16).view(torch.int16) + 1, dtype=torch.int16)
    units = units.view(torch.float16).to(torch.float32)
    assert float(units[0]) == SMALLEST_UNIT and float(units[-1]) == LARGEST_UNIT
    maxima = (256 * units).to(torch.float16)
    assert torch.equal((maxima.to(torch.float32) / 256).to(torch.float16).to(torch.float32), units)
    assert bool(torch.isfinite(scales(torch.tensor(16.0), units)).all())


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_wider_negative_side_is_used(bits: int) -> None:
    """Weights on one side only: -2^(bits-1) steps reach farther than 2^(bits-1) - 1/2."""
    rows = -torch.rand(64, 1, generator=torch.Generator().manual_seed(0)) - 0.01
    negative, positive = fit(rows, bits, None), fit(-rows, bits, None)
    half = 2 ** (bits - 1)
    assert float(negative.scale) == pytest.approx(float(-rows.min() / half), rel=2e-3)
    assert float(positive.scale) == pytest.approx(float(-rows.min() / (half - 0.5)), rel=2e-3)
    assert int(negative.quantize(rows).min()) == 0


@pytest.mark.parametrize("bits", WIDTHS)
def test_zero_columns_are_exactly_zero(bits: int) -> None:
    for importance in (None, torch.ones(64)):
        grid = fit(some_rows(), bits, importance)
        assert not grid.dequantize(grid.quantize(some_rows()))[:, 3].any()
        nothing = fit(torch.zeros(32, 5), bits, None if importance is None else importance[:32])
        assert torch.equal(stored_scales(nothing), nothing.scale)
        assert not nothing.dequantize(nothing.quantize(torch.zeros(32, 5))).any()


@settings(max_examples=80, deadline=None)
@given(
    bits=st.sampled_from(WIDTHS),
    values=st.lists(st.lists(st.floats(-60000, 60000, width=16), min_size=4, max_size=4), min_size=1, max_size=40),
)
def test_no_weight_is_ever_clipped_without_importances(bits: int, values: list[list[float]]) -> None:
    rows = torch.tensor(values)
    if bits == 2:
        rows = rows / 2  # beyond, the positive side needs more than float16 holds
    grid = fit(rows, bits, None)
    miss = (rows - grid.dequantize(grid.quantize(rows))).abs()
    assert bool((miss <= grid.scale * 0.5001).all())


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(WIDTHS),
    seed=st.integers(0, 2**31),
    spread=st.floats(0, 3),
    size=st.floats(1e-7, 100),
    sharpness=st.floats(0, 8),
)
def test_importances_never_make_it_worse(bits: int, seed: int, spread: float, size: float, sharpness: float) -> None:
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(32, 9, generator=random) * torch.exp(spread * torch.randn(9, generator=random)) * size
    importance = torch.rand(32, generator=random) ** sharpness
    plain, chosen = (cost(fit(rows, bits, weights), rows, importance) for weights in (None, importance))
    assert chosen <= plain * (1 + 1e-5)


@pytest.mark.parametrize("bits", WIDTHS)
def test_no_unit_is_much_better(bits: int) -> None:
    """Against every unit in range with every code. At 8 bits the best unit is a narrow one, and matters least."""
    random = torch.Generator().manual_seed(bits)
    rows = torch.randn(64, 24, generator=random) * torch.exp(0.4 * torch.randn(24, generator=random)) * 0.02
    importance = torch.exp(torch.randn(64, generator=random))
    found = cost(fit(rows, bits, importance), rows, importance)
    widest = float(fit(rows, bits, None).scale.max()) / 256
    first, last = (int(torch.tensor(widest * share, dtype=torch.float16).view(torch.int16)) for share in (0.3, 1.5))
    units = torch.arange(first, last, dtype=torch.int16).view(torch.float16).to(torch.float32)
    candidates = scales(ROOTS[:, None, None], units[:, None]).expand(-1, -1, 24)
    zeros = torch.full((16 * len(units), 24), 2 ** (bits - 1), dtype=torch.int32)
    errors = kernels.backend().grid_error(rows, importance, candidates.flatten(0, 1), zeros, 2**bits - 1)
    best = errors.view(candidates.shape).amin(0).double().sum(-1).min()
    assert found <= (1.03 if bits == 8 else 1.005) * float(best)


@pytest.mark.parametrize("bits", WIDTHS)
def test_one_unimportant_outlier_does_not_coarsen_its_column(bits: int) -> None:
    rows = some_rows(rows=128)[:, 4:5]
    light, heavy = torch.ones(128), torch.ones(128)
    light[5], heavy[5] = 1e-7, 1e7
    assert float(fit(rows, bits, light).scale) < 0.5 * float(fit(rows, bits, heavy).scale)


def test_no_importance_at_all_is_the_same_for_all_rows() -> None:
    rows = some_rows()
    assert torch.equal(fit(rows, 4, torch.zeros(64)).scale, fit(rows, 4, torch.ones(64)).scale)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_the_choice(threads: int) -> None:
    rows = torch.randn(128, 3000, generator=torch.Generator().manual_seed(1))
    importance = torch.rand(128, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        grid = fit(rows, 3, importance)
        again = fit(rows, 3, importance)
    finally:
        torch.set_num_threads(before)
    expected = fit(rows, 3, importance)
    for other in (grid, again):
        assert torch.equal(other.scale, expected.scale)
        assert torch.equal(other.stored["q_scale_max"], expected.stored["q_scale_max"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    rows = some_rows()
    rows[3, 3] = bad
    with pytest.raises(FormatError, match="a group of weights holds NaN or infinity"):
        fit(rows, 4, None)


def test_weights_beyond_any_scale_are_refused() -> None:
    with pytest.raises(FormatError, match="a weight of 1e\\+07 needs a scale beyond float16 at 4 bits"):
        fit(torch.tensor([[-1e7], [1e7]]), 4, None)
    assert float(fit(torch.tensor([[-65504.0], [0.0]]), 2, None).scale) == 32752  # half of the largest float16


@pytest.mark.parametrize("bad", [float("nan"), -1.0])
def test_importances_that_make_no_sense_are_refused(bad: float) -> None:
    importance = torch.ones(64)
    importance[0] = bad
    with pytest.raises(FormatError, match="importances must be finite and not negative"):
        fit(some_rows(), 4, importance)


# --- the scale searches of ExLlamaV2


@pytest.mark.parametrize("bits", WIDTHS)
def test_effective_scales_are_bit_for_bit_those_of_exllamav2(bits: int) -> None:
    stored = load_file(SEARCHES)
    unit = (stored[f"b{bits}.qscale_max"].to(torch.float16).to(torch.float32) / 256).to(torch.float16).to(torch.float32)
    assert torch.equal(scales(stored[f"b{bits}.qscale_plus1"].to(torch.float32), unit), stored[f"b{bits}.scale"])


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_search_is_below_that_of_exllamav2_under_its_own_measure(bits: int) -> None:
    """The measure is the sum of |error|^3.5 over the group. ExLlamaV2's best is taken over scales before they were
    rounded to what a file holds; ours are those of the file."""
    stored = load_file(SEARCHES)
    rows, half = stored[f"b{bits}.x"], 2 ** (bits - 1)

    def measure(candidates: Tensor) -> Tensor:
        codes = torch.round(rows / candidates[:, None]).clamp(-half, half - 1)
        return ((codes * candidates[:, None] - rows).abs() ** 3.5).sum(1)

    theirs = measure(stored[f"b{bits}.scale"][None]).sum()
    least = stored[f"b{bits}.err_curve"].min()
    assert float(theirs) == pytest.approx(float(least), rel=0.02)  # the same measure
    steps = torch.maximum(rows.amin(0) / -half, rows.amax(0) / (half - 0.5))
    unit, roots = exl2_grid.search(measure, steps, exl2_grid.covering(steps))
    ours = measure(scales(roots, unit)[None]).sum()
    assert float(ours) < 0.95 * float(least)
    reference = Grid(stored[f"b{bits}.scale"], torch.full((32,), half, dtype=torch.int32), 2 * half - 1, {})
    same = torch.ones(64)
    assert cost(fit(rows, bits, same), rows, same) < 0.97 * cost(reference, rows, same)  # under ours
