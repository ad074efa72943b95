"""Caches of two tiers: what is streamed from the host is what would have stayed on the device, token for token."""

import pytest
import tiny
import torch
from talks import forward, talk

import quantkit
from quantkit.runtime.cache import CacheView
from quantkit.runtime.cache_format import Rows, cache_format
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.page_pool import PagePool, Span

FORMATS = [None, "fp16", "int8", "q4_0", "k8v4"]
WAYS = ["single", "batched", "verified"]
MODELS = {  # name → family and what is changed: grouped heads everywhere, heads of 16, 32 and 48, windows, soft caps
    "llama": ("LlamaForCausalLM", {}),
    "wide heads": ("Qwen3ForCausalLM", {"head_dim": 48}),
    "one key head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "window": ("MistralForCausalLM", {"sliding_window": 400}),
    "gemma 2": ("Gemma2ForCausalLM", {"sliding_window": 300}),
    "gemma 3": ("Gemma3ForCausalLM", {"sliding_window": 300}),
}
LENGTHS = (700, 255, 960)
"""Of prompts: a few dozen tokens more fill a page of the first and of the last."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        name: quantkit.load(tiny.write_model(folder / name.replace(" ", "-"), family, tokenizer=False, **changes))
        for name, (family, changes) in MODELS.items()
    }


def texts(way: str) -> list[list[int]]:
    random = torch.Generator().manual_seed(7)
    prompts = [torch.randint(5, 320, (length,), generator=random).tolist() for length in LENGTHS]
    return prompts if way == "batched" else prompts[:1]


def guess(text: int, ids: list[int]) -> list[int]:
    """Three tokens of the text's own past, of which few will be right."""
    return [ids[(7 * len(ids) + index) % len(ids)] for index in range(3)]


def pools(model, form: str | None, resident: int, sequences: int) -> tuple[PagePool, PagePool]:
    kind = cache_format(form, model.config.head_dim, model.dtype)
    plain = PagePool(model.config, 12, kind)
    return plain, PagePool(model.config, 12, kind, resident=resident, sequences=sequences)


def compare(model, form: str | None, way: str, count: int, resident: int = 32) -> int:
    """Runs both and holds them to each other; returns how many pages were streamed."""
    prompts, guesses = texts(way), guess if way == "verified" else None
    plain, tiered = pools(model, form, resident, len(prompts))
    whole, streamed = (talk(model, pool, prompts, count, guesses) for pool in (plain, tiered))
    assert streamed[0] == whole[0]
    assert torch.equal(streamed[1], whole[1]), "logits are the same bit for bit"
    assert plain.use.pages_streamed == plain.use.host_bytes == 0
    assert tiered.free_pages == 12, "every page came back"
    return tiered.use.pages_streamed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_streamed_is_resident(models, name, form, way):
    assert compare(models[name], form, way, count=24) > 0


@pytest.mark.parametrize("resident", [1, 2, 255, 256, 257, 300])
def test_any_resident_window(models, resident):
    assert compare(models["llama"], "k8v4", "batched", count=4, resident=resident) > 0


def test_a_resident_window_that_holds_everything_streams_nothing(models):
    assert compare(models["llama"], "int8", "batched", count=4, resident=1200) == 0


@pytest.mark.parametrize("way", ["batched", "verified"])
@pytest.mark.parametrize("faulty", ["fp16", "int8", "q4_0", "k8v4"])
def test_a_host_copy_that_is_skipped_is_noticed(models, monkeypatch, faulty, way):
    """Only writes of several tokens or texts at once after the prompt, in one format alone: what went unnoticed once.
    The page that they fill has to leave the device before anything can show."""
    begin, write = CacheView.begin, PagePool.write
    batched = False

    def watch(self: CacheView, count: int):
        nonlocal batched
        batched = count > 1 and all(sequence.length for sequence in self.sequences)
        return begin(self, count)

    def forgetful(self: PagePool, layer: int, keys: Rows, values: Rows, spans: list[Span]) -> None:
        if self.form.name == faulty and batched:
            spans = [span for span in spans if span.tier is not self._host]
        write(self, layer, keys, values, spans)

    monkeypatch.setattr(CacheView, "begin", watch)
    monkeypatch.setattr(PagePool, "write", forgetful)
    with pytest.raises(AssertionError):
        compare(models["llama"], faulty, way, count=80, resident=1)


@pytest.mark.parametrize("way", ["batched", "verified"])
def test_the_same_runs_pass_where_nothing_is_forgotten(models, way):
    assert compare(models["llama"], "k8v4", way, count=80, resident=1) > 0


@pytest.mark.parametrize("form", FORMATS)
def test_cut_back_behind_what_left_the_device(models, form):
    """A text is cut in a page that is in host memory alone, and written on from there."""
    model = models["llama"]
    plain, tiered = pools(model, form, 16, 1)
    (prompt,) = texts("single")
    results = []
    for pool in (plain, tiered):
        sequence = CacheSequence(pool)
        logits = forward(model, pool, [sequence], [prompt], last=99)
        for length in (300, 256, 40):
            sequence.truncate(length)
            for _ in range(9):
                logits += forward(model, pool, [sequence], [prompt[:40]], last=99)
        results.append(torch.cat(logits))
    assert torch.equal(*results)


def test_cut_to_more_than_there_is(models):
    pool, _ = pools(models["llama"], None, 0, 1)
    with pytest.raises(ValueError, match="0 positions cannot be cut to 1"):
        CacheSequence(pool).truncate(1)
