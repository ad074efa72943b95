import pytest
import torch

from quantkit.evaluators.statistics import bootstrap_interval, standard_error


def alike(random):
    """Four texts whose neighbours are alike: each value shared by eight; the mean of all such texts is 1."""
    return torch.rand(4, 64, generator=random, dtype=torch.float64).repeat_interleave(8, dim=1) * 2


def test_interval_covers_the_true_mean_nineteen_times_in_twenty():
    random = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(100):
        low, high = bootstrap_interval(alike(random))
        inside += low <= 1 <= high
    assert 87 <= inside <= 99


def test_standard_error_is_the_spread_of_means():
    random = torch.Generator().manual_seed(0)
    texts = [alike(random) for _ in range(100)]
    spread = float(torch.stack([text.mean() for text in texts]).std())
    stated = sum(standard_error(text) for text in texts) / len(texts)
    assert stated == pytest.approx(spread, rel=0.2)
    naive = float(texts[0].std()) / texts[0].numel() ** 0.5
    assert naive < 0.5 * spread, "as if neighbours told nothing about each other"


def test_rows_may_be_of_unequal_length():
    row = torch.arange(100, dtype=torch.float64)
    assert standard_error([row, row[:40]]) > 0
    low, high = bootstrap_interval([row, row[:40]])
    assert low < float(torch.cat([row, row[:40]]).mean()) < high


def test_few_values():
    assert bootstrap_interval(torch.tensor([[3.0]])) == (3.0, 3.0)
    assert standard_error(torch.tensor([[3.0]])) is None
    low, high = bootstrap_interval(torch.tensor([[0.0, 1.0, 0.0, 1.0]]))
    assert 0 <= low < 0.5 < high <= 1
