from types import SimpleNamespace

import pytest
import tiny
import torch
from contiguous import ContiguousCache, greedy

import quantkit
from quantkit.errors import RequestError
from quantkit.models.attention import attend
from quantkit.runtime.cache import CacheView, KVCache
from quantkit.runtime.cache_format import cache_format
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.page_pool import PagePool

SHAPE = SimpleNamespace(num_layers=2, num_kv_heads=3, head_dim=4)


def step(cache, layer, count, batch, generator):
    """Random queries, keys and values through one layer; what came out, and what was stored."""
    q, k, v = torch.randn(3, batch, 3, count, 4, generator=generator)
    return cache.attend(layer, q, k, v, scale=0.5, window=None, cap=None), q, k, v


@pytest.mark.parametrize("steps", [[1], [5, 1, 1], [1, 2, 3, 5], [300, 1], [255, 1, 1, 600]])
@pytest.mark.parametrize("batch", [1, 2])
def test_every_query_finds_all_that_was_stored_before_it(steps, batch):
    random = torch.Generator().manual_seed(0)
    cache = KVCache(SHAPE, batch, capacity=sum(steps), dtype=torch.float32)
    past = [(torch.empty(batch, 3, 0, 4), torch.empty(batch, 3, 0, 4)) for _ in range(2)]
    for count in steps:
        positions, lengths = cache.begin(count)
        assert positions.tolist() == batch * [list(range(cache.length, cache.length + count))]
        assert lengths.tolist() == batch * [count * [cache.length + count]]
        for layer in range(2):
            found, q, k, v = step(cache, layer, count, batch, random)
            past[layer] = tuple(torch.cat([old, new], 2) for old, new in zip(past[layer], (k, v), strict=True))
            assert torch.equal(found, attend(q, *past[layer], scale=0.5))
        cache.advance()
    assert cache.length == cache.capacity == sum(steps)


def test_overflow_is_an_error_and_changes_nothing():
    cache = KVCache(SHAPE, batch=1, capacity=4, dtype=torch.float32)
    cache.begin(3)
    cache.advance()
    with pytest.raises(RequestError, match="holds 4 positions, 3 are filled and 2 more do not fit"):
        cache.begin(2)
    assert cache.length == 3 and cache.begin(1)[0].tolist() == [[3]]


def test_size_in_bytes_counts_keys_and_values_of_all_layers_in_whole_pages():
    assert KVCache(SHAPE, 1, 10, torch.float16).size_bytes == 2 * 2 * 3 * 256 * 4 * 2


FORMATS = {None: 1e-4, "fp16": 1e-3, "int8": 1e-2, "q4_0": 0.05, "k8v4": 0.05}
"""How far logits may be apart where sums in another order round a stored number another way; a wrong key moves them by
tenths."""


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM"])
def test_texts_side_by_side_get_what_each_gets_alone(family, form, tmp_path):
    """Prefill of unequal prompts, then single tokens beside a verify window that is cut back: logits of each text are
    those of a pass that has it alone, in any order of the batch."""
    model = quantkit.load(tiny.write_model(tmp_path, family, tokenizer=False))
    random = torch.Generator().manual_seed(1)
    texts = [torch.randint(5, 320, (length,), generator=random) for length in (1, 40, 300)]
    kind = cache_format(form, model.config.head_dim, model.dtype)

    def open_pool():
        return PagePool(model.config, 8, kind)

    def run(pool, sequences, pieces):
        view = CacheView(pool, sequences, [len(piece) for piece in pieces])
        with torch.inference_mode():
            return model.forward(torch.cat(pieces)[None], cache=view)[0].split([len(piece) for piece in pieces])

    plans = [[text[: len(text) - len(text) // 3], text[len(text) - len(text) // 3 :]] for text in texts]
    alone = []
    for first, second in plans:
        pool = open_pool()
        sequence = CacheSequence(pool)
        alone.append([run(pool, [sequence], [piece])[0] for piece in (first, second) if len(piece)])
    for order in ([0, 1, 2], [2, 0, 1]):
        pool = open_pool()
        sequences = [CacheSequence(pool) for _ in texts]
        together = run(pool, [sequences[index] for index in order], [plans[index][0] for index in order])
        for index, logits in zip(order, together, strict=True):
            torch.testing.assert_close(logits, alone[index][0], rtol=1e-4, atol=FORMATS[form])
        wrong = [torch.randint(5, 320, (4,), generator=random) for _ in order]
        run(pool, [sequences[index] for index in order], wrong)
        for index in order:
            sequences[index].truncate(len(plans[index][0]))
        order = [index for index in order if len(plans[index][1])]
        together = run(pool, [sequences[index] for index in order], [plans[index][1] for index in order])
        for index, logits in zip(order, together, strict=True):
            torch.testing.assert_close(logits, alone[index][1], rtol=1e-4, atol=FORMATS[form])


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Gemma2ForCausalLM", "MistralForCausalLM"])
def test_a_page_more_or_less_changes_no_token(family, tmp_path):
    """Lengths around the edge of a page, against a cache without pages."""
    model = quantkit.load(tiny.write_model(tmp_path, family, tokenizer=False))
    for length in (1, 250, 255, 256, 257):
        ids = torch.randint(5, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        paged = greedy(model, ids, 10, KVCache(model.config, 1, length + 10, torch.float32))
        assert paged == greedy(model, ids, 10, ContiguousCache())


def test_wanted_logits_are_those_of_the_chosen_tokens(tmp_path):
    model = quantkit.load(tiny.write_model(tmp_path, tokenizer=False))
    pool = PagePool(model.config, 2, cache_format(None, model.config.head_dim, model.dtype))
    view = CacheView(pool, [CacheSequence(pool), CacheSequence(pool)], counts=[3, 4])
    assert view.last.tolist() == [2, 6]
    ids = torch.arange(5, 12)[None]
    chosen = model.forward(ids, cache=view, wanted=view.last)
    for sequence in view.sequences:
        sequence.truncate(0)
    torch.testing.assert_close(chosen, model.forward(ids, cache=view)[:, [2, 6]])


@pytest.mark.parametrize("capacity", [2**43, 2**62, 10**25])
def test_a_cache_beyond_all_memory_is_refused_with_its_size(capacity):
    with pytest.raises(RequestError, match=f"a cache of {-(-capacity // 256) * 256} positions needs .* GiB, which are not to be had") as caught:
        KVCache(SHAPE, batch=1, capacity=capacity, dtype=torch.float32)
    assert "--max-new-tokens" in caught.value.hint
