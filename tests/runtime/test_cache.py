from types import SimpleNamespace

import pytest
import torch

from quantkit.errors import RequestError
from quantkit.runtime.cache import KVCache, admit

SHAPE = SimpleNamespace(num_layers=2, num_kv_heads=3, head_dim=4)


def pair(positions, batch=2):
    return torch.randn(batch, 3, positions, 4), torch.randn(batch, 3, positions, 4)


@pytest.mark.parametrize("steps", [[1], [5, 1, 1], [1, 2, 3, 5], [17]])
def test_what_was_appended_comes_back_in_order(steps):
    cache = KVCache(SHAPE, batch=2, capacity=sum(steps), dtype=torch.float32)
    expected = [([], []), ([], [])]
    for step in steps:
        for layer in range(2):
            keys, values = pair(step)
            expected[layer][0].append(keys)
            expected[layer][1].append(values)
            all_keys, all_values = cache.append(layer, keys, values)
            assert torch.equal(all_keys, torch.cat(expected[layer][0], 2))
            assert torch.equal(all_values, torch.cat(expected[layer][1], 2))
        cache.advance(step)
    assert cache.length == cache.capacity == sum(steps)


def test_overflow_is_an_error_and_changes_nothing():
    cache = KVCache(SHAPE, batch=1, capacity=4, dtype=torch.float32)
    keys, values = pair(3, batch=1)
    cache.append(0, keys, values)
    cache.advance(3)
    with pytest.raises(RequestError, match="holds 4 positions, 3 are filled and 2 more do not fit"):
        cache.append(0, *pair(2, batch=1))
    assert torch.equal(cache.append(0, keys[:, :, :1], values[:, :, :1])[0][:, :, :3], keys)


def test_size_in_bytes_counts_keys_and_values_of_all_layers():
    assert KVCache(SHAPE, 1, 10, torch.float16).size_bytes == 2 * 2 * 3 * 10 * 4 * 2


@pytest.mark.parametrize("context", [1, 17, 255, 257, 2047])
def test_any_length_is_admitted_to_the_last_position(context):
    if context > 1:
        assert admit(context - 1, 1, context) == context
    with pytest.raises(RequestError):
        admit(context, 1, context)


def test_default_size_is_what_is_needed():
    assert admit(100, 64, context=2048) == 164
    assert admit(100, 64, context=2048, capacity=512) == 512


def test_shortfall_is_told_with_all_numbers_and_the_smallest_change():
    with pytest.raises(RequestError) as caught:
        admit(100, 64, context=2048, capacity=128)
    assert caught.value.message == (
        "100 prompt tokens and 64 new ones need 164 positions, the cache has 128: 36 too few"
    )
    assert caught.value.hint == "`--max-new-tokens 28`, or shorten the prompt by 36 tokens"
    assert admit(100, 28, 2048, 128) and admit(64, 64, 2048, 128), "both remedies work"


def test_prompt_that_fills_the_context_alone():
    with pytest.raises(RequestError, match="the model's context has 2048: 1976 too few") as caught:
        admit(3000, 1024, context=2048)
    assert caught.value.hint == "shorten the prompt by 1976 tokens: the prompt alone does not fit"


@pytest.mark.parametrize(("prompt", "new"), [(800, 1024), (1800, 1024), (2200, 1024), (3000, 1024)])
@pytest.mark.parametrize("capacity", [2048, 8192])
def test_matrix_of_prompts_and_caches(prompt, new, capacity):
    if prompt + new <= capacity:
        assert admit(prompt, new, 8192, capacity) == capacity
    else:
        with pytest.raises(RequestError, match=f"{prompt} prompt tokens and {new} new ones"):
            admit(prompt, new, 8192, capacity)


def test_nothing_to_continue_and_nothing_asked_for():
    with pytest.raises(RequestError, match="the prompt is empty"):
        admit(0, 1, 10)
    with pytest.raises(RequestError, match="0 new tokens are asked for"):
        admit(1, 0, 10)


@pytest.mark.parametrize("capacity", [2**43, 2**62, 10**25])
def test_a_cache_beyond_all_memory_is_refused_with_its_size(capacity):
    with pytest.raises(RequestError, match=f"a cache of {capacity} positions needs .* GiB, which are not to be had") as caught:
        KVCache(SHAPE, batch=1, capacity=capacity, dtype=torch.float32)
    assert "--max-new-tokens" in caught.value.hint
