import faulty_cache
import pytest
import tiny
import torch

from quantkit.errors import RequestError
from quantkit.evaluators.cached import CachedModel
from quantkit.evaluators.divergence import compare
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.load import load

WINDOWS = torch.randint(0, 300, (2, 150), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tiny.write_model(tmp_path_factory.mktemp("model")))


def test_formats_cost_what_they_lose(model):
    found = {name: compare(model, CachedModel.of(model, CachePlan(name)), WINDOWS).kl_mean for name in (None, "fp16", "int8", "q4_0")}
    assert abs(found[None]) < 1e-6 and found["fp16"] < 1e-4 < found["q4_0"]
    assert found["fp16"] < found["int8"] < found["q4_0"] < 0.5


def test_a_fault_of_the_cache_shows(model, monkeypatch):
    faulty_cache.plant(monkeypatch)
    ids = torch.cat([WINDOWS[:, :1], WINDOWS], dim=1)
    whole = compare(model, CachedModel.of(model, CachePlan("fp16")), WINDOWS).kl_mean
    monkeypatch.setattr("quantkit.evaluators.cached.STEP", 1)
    assert compare(model, CachedModel.of(model, CachePlan("fp16")), ids[:, :60]).kl_mean > 0.01 > whole


def test_a_window_that_streams_nothing_is_refused(model):
    with pytest.raises(RequestError, match="windows of 150 tokens stay resident"):
        compare(model, CachedModel.of(model, CachePlan("fp16", resident=256)), WINDOWS)
    long = torch.randint(0, 300, (1, 1100), generator=torch.Generator().manual_seed(1))
    streamed = compare(model, CachedModel.of(model, CachePlan("fp16", resident=256)), long)
    assert streamed.kl_mean == pytest.approx(compare(model, CachedModel.of(model, CachePlan("fp16")), long).kl_mean, rel=1e-6)
