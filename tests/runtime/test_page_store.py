import pytest
import torch

from quantkit.errors import RequestError
from quantkit.runtime.cache_format import cache_format
from quantkit.runtime.page_store import PAGE, PageStore


def make_store(pages: int = 8, name: str | None = "k8v4") -> PageStore:
    return PageStore(3, pages, cache_format(name, 64, torch.float32), [torch.device("cpu")] * 2)


def test_pages_are_neighbours_where_there_is_room():
    store = make_store()
    first, second = store.take(2), store.take(2)
    assert (first, second) == ([0, 1], [2, 3])
    assert store.take(1, after=3) == [4]
    assert store.take(1, after=1) == [5], "the page beside it is taken"
    for page in first:
        store.give(page)
    assert store.take(2) == [0, 1] and store.free == 2


def test_scattered_pages_are_taken_where_there_is_no_run():
    store = make_store(pages=5)
    store.take(5)
    for page in (0, 2, 4):
        store.give(page)
    assert sorted(store.take(3)) == [0, 2, 4]
    assert store.free == 0 and store.take(0) == []


def test_the_shortest_run_beside_the_last_page_goes_on_elsewhere():
    store = make_store(pages=6)
    store.take(6)
    for page in (1, 3, 4, 5):
        store.give(page)
    assert store.take(3, after=0) == [1, 3, 4]


@pytest.mark.parametrize("name", [None, "fp16", "int8", "q4_0", "k8v4"])
def test_a_page_is_copied_whole_from_tier_to_tier(name):
    here, there = make_store(name=name), make_store(name=name)
    form = cache_format(name, 64, torch.float32)
    heads = torch.randn(3, PAGE, 64, generator=torch.Generator().manual_seed(0))
    rows = form.keys.encode(heads), form.values.encode(-heads)
    for layer in range(2):
        there.put(layer, 5 * PAGE, *rows)
    here.copy(2, there, 5)
    for layer in range(2):
        for kept, stored in zip(here.get(layer, 2 * PAGE, PAGE), rows, strict=True):
            assert torch.equal(kept.codes, stored.codes)
            assert kept.scales is stored.scales or torch.equal(kept.scales, stored.scales)


def test_no_memory():
    with pytest.raises(RequestError, match="GiB, which are not to be had"):
        make_store(pages=2**40)
