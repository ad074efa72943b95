"""Prefixes that are read once: answers stay the same, work is saved, and nothing is found where it does not belong."""

import pytest
import tiny
import torch

import quantkit
from quantkit.models.config import ModelConfig
from quantkit.runtime.cache import CacheView
from quantkit.runtime.cache_format import cache_format
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.page_pool import CacheFull, PagePool
from quantkit.runtime.prefix_cache import PrefixCache

APART = {None: 1e-4, "fp16": 1e-3, "int8": 1e-2, "q4_0": 0.05, "k8v4": 0.05}
"""How far logits may be apart where sums in another order round a stored number another way."""
CONFIG = ModelConfig.read(tiny.make_config("LlamaForCausalLM"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return quantkit.load(tiny.write_model(tmp_path_factory.mktemp("model"), tokenizer=False))


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(5, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_pool(pages: int = 8, form: str | None = None, **options) -> PagePool:
    return PagePool(CONFIG, pages, cache_format(form, CONFIG.head_dim, torch.float32), **options)


def read(model, pool: PagePool, sequence: CacheSequence, ids: list[int]) -> torch.Tensor:
    """The logits of the last token of a text, of which what the sequence lacks is read."""
    with torch.inference_mode():
        new = ids[sequence.length :]
        return model.forward(torch.tensor([new]), cache=CacheView(pool, [sequence], [len(new)]), last_only=True)[0, -1]


def pretend(prefixes: PrefixCache, ids: list[int], adapters: str = "") -> list:
    """As if the ids had been read: pages are full, whatever is in them."""
    sequence = prefixes.open(ids, adapters=adapters)
    sequence.prepare(len(ids) - sequence.length)
    sequence.length = len(ids)
    prefixes.keep(sequence, ids, adapters)
    pages = list(sequence.pages)
    sequence.close()
    return pages


@pytest.mark.parametrize("resident", [0, 32])
@pytest.mark.parametrize("form", [None, "fp16", "int8", "q4_0", "k8v4"])
def test_turns_of_a_conversation_read_only_what_is_new(model, form, resident):
    pool = make_pool(form=form, resident=resident, sequences=2)
    prefixes = PrefixCache(pool, model.config)
    ids = random_ids(600, 0)
    read_tokens = []
    for turn in range(3):
        fresh = make_pool(form=form)
        expected = read(model, fresh, CacheSequence(fresh), ids)
        sequence = prefixes.open(ids, tokens=len(ids))
        read_tokens.append(len(ids) - sequence.length)
        torch.testing.assert_close(read(model, pool, sequence, ids), expected, rtol=1e-4, atol=APART[form])
        prefixes.keep(sequence, ids)
        sequence.close()
        ids = ids + random_ids(100, turn + 1)
    assert read_tokens == [600, 700 - 512, 800 - 512]
    assert (prefixes.asked_tokens, prefixes.found_tokens) == (2100, 1024)


def test_texts_that_part_share_what_they_have_in_common():
    prefixes = PrefixCache(make_pool(), CONFIG)
    common = random_ids(512, 0)
    first = pretend(prefixes, common + random_ids(300, 1))
    second = pretend(prefixes, common + random_ids(300, 2))
    assert first[:2] == second[:2] and first[2] is not second[2]
    assert len(prefixes) == 4
    assert prefixes.find([*common, 5]) == first[:2]
    assert prefixes.find(common) == first[:1], "a token is left to be read"
    assert prefixes.find([*common[:300], *random_ids(300, 3)]) == first[:1]
    assert prefixes.find([common[0] + 1, *common[1:], 5]) == []
    assert prefixes.find([*random_ids(256, 5), *common[256:], 5]) == [], "the same page behind another text"


def test_two_adapters_with_the_same_prefix_do_not_share():
    prefixes = PrefixCache(make_pool(), CONFIG)
    ids = random_ids(700, 0)
    pages = {name: pretend(prefixes, ids, name) for name in ("", "one", "two")}
    assert prefixes.found_tokens == 0 and len(prefixes) == 6
    for name, own in pages.items():
        assert prefixes.find(ids, name) == own[:2]
    assert prefixes.find(ids, "three") == []


def test_another_format_or_rope_has_other_digests():
    ids = random_ids(256, 0)
    other = ModelConfig.read(tiny.make_config("LlamaForCausalLM", rope_theta=5000.0))
    caches = [PrefixCache(make_pool(form=form), CONFIG) for form in (None, "fp16", "int8", "q4_0", "k8v4")]
    caches += [PrefixCache(make_pool(), other), PrefixCache(make_pool(window=64), CONFIG)]
    digests = {next(iter(cache._chain(ids, "")))[0] for cache in caches}
    assert len(digests) == len(caches)


def test_a_rope_that_changes_with_the_text_shares_only_while_it_has_not():
    config = ModelConfig.read(
        tiny.make_config(
            "LlamaForCausalLM", max_position_embeddings=600, rope_scaling={"type": "dynamic", "factor": 4.0}
        )
    )
    prefixes = PrefixCache(make_pool(), config)
    short, long = random_ids(600, 0), random_ids(601, 1)
    assert pretend(prefixes, long) and len(prefixes) == 0
    assert pretend(prefixes, short) and len(prefixes) == 2
    assert len(prefixes.find(short)) == 2
    assert prefixes.find([*short, 5]) == []


def test_the_least_recently_used_goes_first_and_ends_before_beginnings():
    pool = make_pool(pages=6)
    prefixes = PrefixCache(pool, CONFIG)
    old, new = random_ids(600, 0), random_ids(600, 1)
    pretend(prefixes, old)
    pretend(prefixes, new)
    assert prefixes.find(old), "and so the other one is the older now"
    assert pool.free_pages == 6
    running = CacheSequence(pool, tokens=3 * 256)
    assert len(prefixes.find(old)) == 2 and len(prefixes.find(new)) == 1
    more = CacheSequence(pool, tokens=2 * 256)
    assert len(prefixes.find(old)) == 0 and len(prefixes.find(new)) == 1, "looking for it was a use of the new one"
    running.close()
    more.close()


def test_pages_in_use_are_not_evicted():
    pool = make_pool(pages=4)
    prefixes = PrefixCache(pool, CONFIG)
    ids = random_ids(600, 0)
    pages = pretend(prefixes, ids)
    reader = prefixes.open(ids, tokens=700)
    assert reader.pages[:2] == pages[:2] and reader.length == 512
    with pytest.raises(CacheFull, match="4 pages of 256 positions, 1 are free and 2 more are needed"):
        CacheSequence(pool, tokens=300)
    assert prefixes.find(ids) == pages[:2] and pool.free_pages == 1
    reader.close()
    assert pool.free_pages == 4


def test_a_sequence_that_does_not_fit_gives_back_what_it_had_found():
    pool = make_pool(pages=3)
    prefixes = PrefixCache(pool, CONFIG)
    ids = random_ids(600, 0)
    pretend(prefixes, ids)
    with pytest.raises(CacheFull):
        prefixes.open(ids, tokens=4 * 256)
    assert pool.free_pages == 3 and all(one.page.users == 1 for one in pool.kept.values())


@pytest.mark.parametrize("resident", [0, 16])
def test_writing_into_a_shared_page_leaves_the_other_text_as_it_is(model, resident):
    pool = make_pool(resident=resident, sequences=2)
    prefixes = PrefixCache(pool, model.config)
    ids = random_ids(520, 0)
    writer = prefixes.open(ids, tokens=600)
    read(model, pool, writer, ids)
    prefixes.keep(writer, ids)
    before = [page.users for page in writer.pages]
    other = random_ids(60, 1)
    writer.truncate(490)
    ours = read(model, pool, writer, [*ids[:490], *other])
    assert before == [2, 2, 1] and [page.users for page in writer.pages] == [2, 1, 1]
    fresh = make_pool()
    assert torch.allclose(ours, read(model, fresh, CacheSequence(fresh), [*ids[:490], *other]), atol=1e-4)
    reader = prefixes.open(ids)
    assert reader.length == 512
    assert torch.allclose(read(model, pool, reader, ids), read(model, fresh, CacheSequence(fresh), ids), atol=1e-4)


def test_invalidate_a_prefix_an_adapter_or_everything():
    prefixes = PrefixCache(make_pool(pages=16), CONFIG)
    common = random_ids(300, 0)
    texts = [common + random_ids(300, 1), common + random_ids(300, 2), random_ids(600, 3)]
    for ids in texts:
        pretend(prefixes, ids)
    pretend(prefixes, texts[0], "one")
    assert len(prefixes) == 7
    assert prefixes.invalidate(prefix=texts[1][:400]) == 1, "of what the texts have in common, only as far as it is told"
    assert prefixes.find(texts[0]) and len(prefixes.find(texts[1])) == 1
    assert prefixes.invalidate(adapter="one") == 2
    assert prefixes.find(texts[0], "one") == [] and len(prefixes.find(texts[0])) == 2
    assert prefixes.invalidate(prefix=common[:10]) == 2
    assert prefixes.find(texts[0]) == [] and len(prefixes.find(texts[2])) == 2
    assert prefixes.invalidate(everything=True) == 2 and len(prefixes) == 0
    assert prefixes.pool.free_pages == 16


def test_forgetting_does_not_disturb_who_is_reading(model):
    pool = make_pool()
    prefixes = PrefixCache(pool, model.config)
    ids = random_ids(600, 0)
    first = prefixes.open(ids, tokens=600)
    expected = read(model, pool, first, ids)
    prefixes.keep(first, ids)
    first.close()
    second = prefixes.open(ids, tokens=600)
    prefixes.invalidate(everything=True)
    third = CacheSequence(pool, tokens=5 * 256)
    read(model, pool, third, random_ids(1200, 9))
    assert torch.allclose(read(model, pool, second, ids), expected, atol=1e-4)
