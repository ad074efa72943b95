import pytest
import tiny
import torch

from quantkit.errors import RequestError, UsageError
from quantkit.models.config import ModelConfig
from quantkit.runtime.capacity import CachePlan


@pytest.mark.parametrize("context", [1, 17, 255, 257, 2047])
def test_any_length_is_admitted_to_the_last_position(context):
    if context > 1:
        assert CachePlan().admit(context - 1, 1, context) == context
        assert CachePlan(tokens=context).admit(context - 1, 1, 4096) == context
    with pytest.raises(RequestError):
        CachePlan().admit(context, 1, context)
    with pytest.raises(RequestError):
        CachePlan(tokens=context).admit(context, 1, 4096)


def test_default_size_is_what_is_needed_in_whole_pages():
    config = ModelConfig.read(tiny.make_config("LlamaForCausalLM"))
    assert CachePlan().admit(100, 64, context=2048) == 164
    assert CachePlan().pool(config, 164, torch.float32, "cpu").capacity == 256
    assert CachePlan(tokens=1025).pool(config, 164, torch.float32, "cpu").capacity == 1280


def test_shortfall_is_told_with_all_numbers_and_the_smallest_change():
    with pytest.raises(RequestError) as caught:
        CachePlan(tokens=128).admit(100, 64, context=2048)
    assert caught.value.message == (
        "100 prompt tokens and 64 new ones need 164 positions (1 page of 256), the cache has 128: 36 too few"
    )
    assert caught.value.hint == "`--max-new-tokens 28`, or `--cache-tokens 256`, or shorten the prompt by 36 tokens"
    small = CachePlan(tokens=128)
    assert small.admit(100, 28, 2048) and small.admit(64, 64, 2048) and CachePlan(tokens=256).admit(100, 64, 2048)


def test_guessed_tokens_need_room_too():
    with pytest.raises(RequestError) as caught:
        CachePlan(tokens=512).admit(400, 110, context=2048, draft_tokens=4)
    assert caught.value.message == (
        "400 prompt tokens, 110 new and 4 guessed ones need 514 positions (3 pages of 256), the cache has 512: 2 too few"
    )
    assert caught.value.hint == "`--max-new-tokens 108`, or `--cache-tokens 768`, or shorten the prompt by 2 tokens"
    assert CachePlan(tokens=512).admit(400, 108, 2048, 4) == 512


def test_prompt_that_fills_the_context_alone():
    with pytest.raises(RequestError, match="the model's context has 2048: 1976 too few") as caught:
        CachePlan().admit(3000, 1024, context=2048)
    assert caught.value.hint == (
        "`--allow-beyond-context`, or shorten the prompt by 1976 tokens: the prompt alone does not fit"
    )
    assert CachePlan(beyond_context=True).admit(3000, 1024, context=2048) == 4024


def test_no_prompt_can_be_shortened_to_nothing():
    with pytest.raises(RequestError) as caught:
        CachePlan(tokens=10).admit(31, 256, context=2048)
    assert caught.value.hint == "`--cache-tokens 512`"


def test_beyond_the_context_the_cache_still_has_to_be_large_enough():
    with pytest.raises(RequestError, match="the cache has 4000"):
        CachePlan(tokens=4000, beyond_context=True).admit(3000, 1024, context=2048)


@pytest.mark.parametrize(("scaling", "context"), [(None, 100), ({"type": "linear", "factor": 2.5}, 250), ({"type": "yarn", "factor": 4.0}, 400)])
def test_scaling_of_the_rope_counts_for_the_context(scaling, context):
    config = ModelConfig.read(tiny.make_config("LlamaForCausalLM", max_position_embeddings=100, rope_scaling=scaling))
    assert CachePlan().admit(context - 1, 1, config.context) == context
    with pytest.raises(RequestError, match=f"the model's context has {context}: 1 too few"):
        CachePlan().admit(context, 1, config.context)


@pytest.mark.parametrize(("prompt", "new"), [(800, 1024), (1800, 1024), (2200, 1024), (3000, 1024)])
@pytest.mark.parametrize("capacity", [2048, 8192])
def test_matrix_of_prompts_and_caches(prompt, new, capacity):
    plan = CachePlan(tokens=capacity)
    if prompt + new <= capacity:
        assert plan.admit(prompt, new, 8192) == prompt + new
    else:
        with pytest.raises(RequestError, match=f"{prompt} prompt tokens and {new} new ones .* the cache has {capacity}"):
            plan.admit(prompt, new, 8192)


def test_a_window_needs_no_more_than_it_sees_and_what_is_read_at_once():
    plan = CachePlan(window=300, sinks=4)
    assert plan.admit(100, 100, 8192) == 200
    assert plan.admit(5000, 1000, 8192) == plan.admit(3000, 3000, 8192) == 256 * (1 + 4)


def test_nothing_to_continue_and_nothing_asked_for():
    with pytest.raises(RequestError, match="the prompt is empty"):
        CachePlan().admit(0, 1, 10)
    with pytest.raises(RequestError, match="0 new tokens are asked for"):
        CachePlan().admit(1, 0, 10)


@pytest.mark.parametrize("options", [{"tokens": 0}, {"resident": -1}, {"window": 0}, {"sinks": -1, "window": 5}])
def test_numbers_out_of_range(options):
    with pytest.raises(UsageError, match=r"expected . or more"):
        CachePlan(**options)


def test_sinks_without_a_window():
    with pytest.raises(UsageError, match="there is none"):
        CachePlan(sinks=4)


def test_a_format_that_there_is_not():
    config = ModelConfig.read(tiny.make_config("LlamaForCausalLM"))
    with pytest.raises(UsageError, match="no cache format `q8`, expected one of fp16, int8, k8v4, q4_0"):
        CachePlan(kv="q8").pool(config, 10, torch.float32, "cpu")
