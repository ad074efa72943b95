"""The fast paths of attention against scores written out in float64."""

import pytest
import torch

from quantkit.models.attention import attend


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, cap: float | None):
    q, k, v = q.double(), k.double(), v.double()
    queries, positions, share = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            for index in range(queries):
                last = positions - queries + index
                first = 0 if window is None else max(0, last - window + 1)
                scores = k[row, head // share, first : last + 1] @ q[row, head, index] * scale
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                out[row, head, index] = scores.softmax(dim=0) @ v[row, head // share, first : last + 1]
    return out


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 7, 20, 21, 40])
@pytest.mark.parametrize(("queries", "positions"), [(1, 1), (1, 21), (21, 21), (5, 21)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_path_is_the_definition(queries: int, positions: int, window: int | None, cap: float | None, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = 2 * torch.randn(2, 4, queries, 8, generator=generator)
    k, v = 2 * torch.randn(2, 2, kv_heads, positions, 8, generator=generator)
    got = attend(q, k, v, scale=0.4, window=window, cap=cap)
    torch.testing.assert_close(got.double(), written_out(q, k, v, 0.4, window, cap), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 600])
def test_long_texts_go_through_in_pieces(window: int | None, cap: float | None) -> None:
    """1100 queries are three pieces; a few of them are checked one at a time."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 1300, 8, generator=generator)
    got = attend(q[:, :, 200:], k, v, scale=0.5, window=window, cap=cap)
    for query in (200, 711, 712, 1223, 1299):
        alone = attend(q[:, :, query : query + 1], k[:, :, : query + 1], v[:, :, : query + 1], scale=0.5, window=window, cap=cap)
        torch.testing.assert_close(got[:, :, query - 200 : query - 199], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_the_dtype_is_kept(cap: float | None) -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    got = attend(q, k, v, scale=0.4, cap=cap)
    assert got.dtype == torch.bfloat16
    expected = written_out(q, k, v, 0.4, None, cap)
    torch.testing.assert_close(got.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("window", [None, 9])
def test_many_queries_of_several_texts_in_halves(window: int | None) -> None:
    q = torch.randn(2, 4, 30, 32, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    k, v = torch.randn(2, 2, 2, 45, 32, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    got = attend(q, k, v, scale=0.2, window=window)
    torch.testing.assert_close(got.double(), written_out(q, k, v, 0.2, window, None), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("queries", "positions"), [(1, 1), (1, 21), (5, 5), (5, 21), (16, 16)])
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_what_is_no_number_comes_out_and_stays_in_its_row(
    place: str, queries: int, positions: int, cap: float | None, dtype: torch.dtype
) -> None:
    """Torch's kernel for CPUs hides a NaN score when there are few queries: damaged weights would talk nonsense."""
    q = torch.randn(2, 4, queries, 8, generator=torch.Generator().manual_seed(3))
    k, v = torch.randn(2, 2, 2, positions, 8, generator=torch.Generator().manual_seed(4))
    {"query": q, "key": k, "value": v}[place][1, :, -1, -1] = float("nan")
    got = attend(q.to(dtype), k.to(dtype), v.to(dtype), scale=0.4, cap=cap)
    assert got[0].isfinite().all()
    assert got[1, :, -1].isnan().any()


@pytest.mark.parametrize("window", [None, 700])
def test_gradients_in_bfloat16_are_those_of_the_definition(window: int | None) -> None:
    """600 queries are four pieces and a part; a window beyond the text is none."""
    generator = torch.Generator().manual_seed(8)
    q, k, v, back = (torch.randn(2, heads, 600, 16, generator=generator) for heads in (6, 2, 2, 6))
    parts = [part.to(torch.bfloat16).requires_grad_() for part in (q, k, v)]
    exact = [part.detach().double().requires_grad_() for part in parts]
    attend(*parts, scale=0.4, window=window).backward(back.to(torch.bfloat16))
    attend(*exact, scale=0.4).backward(back.to(torch.bfloat16).double())
    for found, expected in zip(parts, exact, strict=True):
        assert found.grad.dtype == torch.bfloat16
        assert (found.grad.double() - expected.grad).norm() < 0.01 * expected.grad.norm()


def test_a_state_that_is_no_number_leaves_no_finite_gradient_behind() -> None:
    q, k, v = (torch.randn(1, 2, 300, 8).to(torch.bfloat16) for _ in "qkv")
    k[0, 0, 5, 0] = float("nan")
    k.requires_grad_()
    attend(q, k, v, scale=0.4).sum().backward()
    assert not torch.isfinite(k.grad).all()
