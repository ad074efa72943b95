"""Many queries at once on the CPU: what holds of them beyond the sweep in test_protocol.py."""

import pytest
import torch
from torch import Tensor

from quantkit.kernels import many_queries
from quantkit.kernels.pairs import HAS_PAIR_PRODUCTS

pytestmark = pytest.mark.skipif(
    not HAS_PAIR_PRODUCTS, reason="this processor multiplies no pairs of bfloat16: torch attends"
)


def _heads(queries: int, positions: int, dim: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(positions)
    shapes = (4, queries, dim), (2, positions, dim), (2, positions, dim)
    q, k, v = (torch.randn(*shape, generator=random).to(torch.bfloat16) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("window", [0, 40])
def test_neither_threads_nor_pieces_change_a_bit(window: int) -> None:
    q, k, v = _heads(150, 150)
    whole = many_queries.attend(q, k, v, scale=0.125, window=window, threads=1)
    for threads in (2, 3):
        assert torch.equal(many_queries.attend(q, k, v, scale=0.125, window=window, threads=threads), whole)
    for start, end in ((0, 37), (37, 100), (100, 150)):
        part = many_queries.attend(q[:, start:end], k[:, :end], v[:, :end], scale=0.125, window=window, threads=1)
        assert torch.equal(part, whole[start:end])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_finite_is_seen_by_those_that_see_it(place: int, value: float) -> None:
    q, k, v = parts = _heads(40, 60)
    before = many_queries.attend(*parts, scale=0.125, window=0, threads=1)
    parts[place][0, 30, 5] = value
    found = many_queries.attend(q, k, v, scale=0.125, window=0, threads=1)
    if place == 0:
        assert not found[30, 0].isfinite().any()
        found[30, 0] = before[30, 0]
        assert torch.equal(found, before)
        return
    assert torch.equal(found[:, 2:], before[:, 2:])  # the other key-value head
    same = found[:10] == before[:10]  # they see positions up to 29
    assert (same if place == 1 else same | found[:10].isnan()).all()
    assert not (found[11:, :2] if place == 1 else found[11:, :2, 5]).isfinite().any()


def test_scores_far_from_zero_are_mixed_by_their_differences() -> None:
    q, k, v = _heads(32, 32)
    k = k + torch.tensor(-400.0)
    found = many_queries.attend(q.abs(), k.to(torch.bfloat16), v, scale=1.0, window=0, threads=1)
    assert found.isfinite().all()


def test_a_layout_with_heads_side_by_side_is_read_as_it_lies() -> None:
    q, k, v = _heads(40, 40)
    whole = many_queries.attend(q, k, v, scale=0.125, window=0, threads=1)
    turned = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in (q, k, v)]
    assert torch.equal(many_queries.attend(*turned, scale=0.125, window=0, threads=1), whole)
    spread = [torch.stack([part, part], dim=-1)[..., 0] for part in (q, k, v)]
    assert torch.equal(many_queries.attend(*spread, scale=0.125, window=0, threads=1), whole)
