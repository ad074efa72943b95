"""`--kv-window` and `--kv-sink`: what a query sees, and that pages which no query sees any more are given back."""

import pytest
import tiny
import torch

import quantkit
from quantkit.models.attention import attend
from quantkit.runtime.cache import CacheView
from quantkit.runtime.cache_format import cache_format
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.page_pool import PagePool


def written_out(q, k, v, scale, window, sinks):
    """Every query by itself, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    for index in range(q.shape[2]):
        last = k.shape[2] - q.shape[2] + index
        seen = [key for key in range(last + 1) if key > last - window or key < sinks]
        for head in range(q.shape[1]):
            weights = (k[0, head // 2, seen] @ q[0, head, index] * scale).softmax(0)
            out[0, head, index] = weights @ v[0, head // 2, seen]
    return out


@pytest.mark.parametrize("sinks", [0, 1, 4, 30])
@pytest.mark.parametrize("window", [1, 5, 17, 40])
@pytest.mark.parametrize(("queries", "positions"), [(1, 30), (7, 30), (30, 30)])
def test_sinks_are_seen_beside_the_window(queries, positions, window, sinks):
    random = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, queries, 8, generator=random)
    k, v = torch.randn(2, 1, 2, positions, 8, generator=random)
    found = attend(q, k, v, scale=0.4, window=window, sinks=sinks)
    torch.testing.assert_close(found.double(), written_out(q, k, v, 0.4, window, sinks), rtol=1e-5, atol=1e-5)


class Masked:
    """A cache that holds everything and looks at what a window with sinks lets through."""

    def __init__(self, window, sinks):
        self.window, self.sinks, self.layers, self.length = window, sinks, {}, 0

    def begin(self, count):
        self.count = count
        positions = torch.arange(self.length, self.length + count)[None]
        return positions, positions + 1

    def attend(self, layer, q, k, v, *, scale, window, cap):
        if layer in self.layers:
            k, v = (torch.cat([old, new], 2) for old, new in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = (k, v)
        own = window is None or window >= self.window
        width, sinks = (self.window, self.sinks) if own else (window, 0)
        return attend(q, k, v, scale=scale, window=width, cap=cap, sinks=sinks)

    def advance(self):
        self.length += self.count


@pytest.mark.parametrize("resident", [0, 40])
@pytest.mark.parametrize(("window", "sinks"), [(20, 0), (300, 0), (300, 4), (100, 300)])
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_a_window_over_pages_is_a_mask_over_everything(family, window, sinks, resident, tmp_path):
    """Read in pieces as generation reads it, then token by token; Gemma's own windows of 16 stay what they are."""
    model = quantkit.load(tiny.write_model(tmp_path, family, tokenizer=False))
    plan = CachePlan(window=window, sinks=sinks, resident=resident)
    ids = torch.randint(5, 320, (1, 1500), generator=torch.Generator().manual_seed(1))
    pool = plan.pool(model.config, plan.held(1500), model.dtype, "cpu")
    view, mask = CacheView(pool, [CacheSequence(pool, plan.held(1500))]), Masked(window, sinks)
    with torch.inference_mode():
        for part in (*ids[:, :1495].split(plan.piece, dim=1), *ids[:, 1495:].split(1, dim=1)):
            ours, theirs = (model.forward(part, cache=cache) for cache in (view, mask))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert pool.capacity < 1500
    assert (pool.use.pages_streamed > 0) == bool(resident)


def test_what_was_dropped_cannot_be_gone_back_to():
    config = quantkit.models.config.ModelConfig.read(tiny.make_config("LlamaForCausalLM"))
    pool = PagePool(config, 6, cache_format(None, config.head_dim, torch.float32), window=100)
    sequence = CacheSequence(pool)
    for _ in range(10):
        sequence.prepare(100)
        sequence.length += 100
    assert pool.free_pages == 5, "the page of positions 768 to 1023 is all that is left"
    sequence.truncate(900)
    with pytest.raises(ValueError, match="positions before 800 that its window sees were dropped"):
        sequence.truncate(800)
    sequence.truncate(0)
    sequence.prepare(10)
    sequence.close()
    assert pool.free_pages == 6
    pool = PagePool(config, 6, cache_format(None, config.head_dim, torch.float32), window=16)
    sequence = CacheSequence(pool)
    for end in (783, 784):
        sequence.prepare(end - sequence.length)
        sequence.length = end
    assert sequence.can_cut(783) and not sequence.can_cut(768) and not sequence.can_cut(767)
    with pytest.raises(ValueError, match="positions before 767 that its window sees were dropped"):
        sequence.truncate(767)
