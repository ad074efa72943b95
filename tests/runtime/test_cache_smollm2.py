"""The cache on a real model, SmolLM2-135M-Instruct: what streams, what fits, what a format costs.

Figures and how long each piece takes: docs/results/kv-cache.md. Of everything there is a quick test on tiny models in
`test_cache.py`, `test_capacity.py` and `test_streaming.py`.
"""

import os
from pathlib import Path

import pytest
import smollm2
import torch
from contiguous import ContiguousCache
from talks import talk

import quantkit
from quantkit.errors import RequestError
from quantkit.evaluators.degeneration import find_loops
from quantkit.runtime.cache import CacheView
from quantkit.runtime.cache_format import cache_format
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.page_pool import PagePool
from quantkit.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.proof

TEXTS = Path(__file__).parents[2] / "calibration" / "data"
EXERCISES = "Explain this to a beginner, step by step, with a long worked example and ten different exercises."
ESSAY = "Write a long essay about this passage, with examples from history, science and daily life."
RESIDENT = 32


@pytest.fixture(scope="module")
def folder():
    given = os.environ.get("QUANTKIT_SMOLLM2")
    return Path(given) if given else smollm2.for_test()


@pytest.fixture(scope="module")
def model(folder):
    return quantkit.load(folder)


@pytest.fixture(scope="module")
def prompts(folder):
    """Questions about a passage. On the first two the model goes on for 400 tokens without turning in a circle; with a cache
    that changes what it says, on one of the others."""
    tokenizer = Tokenizer.open(folder)

    def about(file: str, at: int, ask: str) -> list[int]:
        passage = tokenizer.decode(tokenizer.encode((TEXTS / file).read_text()[at : at + 3000])[:270])
        return tokenizer.chat([{"role": "user", "content": f"{ask}\n\n{passage}"}])

    return [
        about("technical.txt", 30000, EXERCISES), about("prose.txt", 120000, ESSAY), about("technical.txt", 60000, ESSAY),
        about("prose.txt", 40000, EXERCISES), about("prose.txt", 80000, ESSAY), about("technical.txt", 90000, EXERCISES),
    ]  # fmt: skip


def runs_in_a_circle(ids: list[int]) -> bool:
    return any(loop.period <= 16 for loop in find_loops(ids))


def guess(text: int, ids: list[int]) -> list[int]:
    """What followed the last token when it was last there: three tokens, right now and then, and the same in every run."""
    earlier = [index for index, token in enumerate(ids[:-3]) if token == ids[-1]]
    return ids[earlier[-1] + 1 : earlier[-1] + 4] if earlier else ids[-3:]


@pytest.mark.parametrize("form", ["k8v4", "int8", "q4_0", "fp16"])
@pytest.mark.parametrize("way", ["verified", "single", "batched"])
def test_streamed_is_resident(model, prompts, form, way):
    """400 greedy tokens, with and without windows of four tokens of which the wrong part is taken back."""
    kind = cache_format(form, 64, model.dtype)
    count = 2 if way == "batched" else 1

    def answers(texts: list[list[int]], resident: int):
        pool = PagePool(model.config, 8, kind, resident=resident, sequences=count)
        return talk(model, pool, texts, 400, guess if way == "verified" else None)[0], pool.use

    for first in range(0, len(prompts), count):  # the first on which the resident model says something to be compared
        texts = prompts[first : first + count]
        whole, _ = answers(texts, 0)
        if not any(runs_in_a_circle(ids) for ids in whole):
            break
    else:
        pytest.fail("the model turns in a circle on every prompt")
    streamed, use = answers(texts, RESIDENT)
    assert streamed == whole
    print(f"{form} {way}: prompt {first}, {use}")
    assert use.pages_streamed > 0


@pytest.fixture(scope="module")
def windows(folder):
    """Held-back text, three windows of 512 tokens."""
    tokenizer = Tokenizer.open(folder)
    ids = tokenizer.encode((TEXTS / "held-back.txt").read_text(), special=True)
    return [ids[start : start + 512] for start in (0, 6000, 12000)]


def log_probabilities(model, windows, form: str | None):
    kind = cache_format(form, 64, model.dtype)
    for ids in windows:
        pool = PagePool(model.config, 2, kind)
        view = CacheView(pool, [CacheSequence(pool, len(ids))])
        with torch.inference_mode():
            yield model.forward(torch.tensor([ids]), cache=view)[0].log_softmax(-1)


def test_what_each_format_costs(model, windows):
    """KL divergence from the cache in the numbers of the arithmetic, teacher-forced, nats per token."""
    loss = {}
    for form in ("fp16", "int8", "k8v4", "q4_0"):
        pairs = zip(log_probabilities(model, windows, None), log_probabilities(model, windows, form), strict=True)
        loss[form] = float(torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in pairs]).mean())
    print({form: f"{value:.2e}" for form, value in loss.items()})
    assert loss["fp16"] < 1e-6
    assert loss["int8"] < 1e-4
    assert loss["k8v4"] <= loss["q4_0"]


def test_bytes_of_each_format_are_as_computed(model):
    """30 layers, 3 key/value heads of 64: a scale of two bytes for each 32 numbers, and a ninth bit of the keys of int8."""
    rows = {"fp16": 128 + 128, "int8": 76 + 68, "k8v4": 68 + 36, "q4_0": 36 + 36}
    for form, row in rows.items():
        use = CachePlan(kv=form).pool(model.config, 1000, model.dtype, "cpu").use
        assert (use.cache_tokens, use.cache_bytes, use.host_bytes) == (1024, 1024 * 30 * 3 * row, 0)
        use = CachePlan(kv=form, resident=RESIDENT).pool(model.config, 1000, model.dtype, "cpu").use
        assert (use.cache_bytes, use.host_bytes) == (3 * 256 * 30 * 3 * row, 1024 * 30 * 3 * row)


def passage(folder: Path, start: int, length: int) -> list[int]:
    ids = Tokenizer.open(folder).encode((TEXTS / "prose.txt").read_text())
    return ids[start : start + length]


@pytest.mark.parametrize("cache", [2048, 8192])
@pytest.mark.parametrize("prompt", [800, 1800, 2200, 3000])
def test_matrix_of_prompts_and_caches(model, folder, prompt, cache):
    """What fits runs to its last token, what does not is refused before the first."""
    plan = CachePlan(tokens=cache)
    if prompt + 1024 > cache:
        with pytest.raises(RequestError, match=f"need {prompt + 1024} positions .* the cache has {cache}"):
            plan.admit(prompt, 1024, model.config.context)
        return
    needed = plan.admit(prompt, 1024, model.config.context)
    pool = plan.pool(model.config, needed, model.dtype, "cpu")
    ((answer,), _) = talk(model, pool, [passage(folder, 0, prompt)], 1024)
    assert len(answer) == 1024 and pool.capacity == cache


class SideBySide:
    """Contiguous caches of several texts, as one pass of the model sees them."""

    def __init__(self, caches: list[ContiguousCache], counts: list[int]):
        self.caches, self.counts = caches, counts

    def begin(self, count: int):
        places = [cache.begin(own) for cache, own in zip(self.caches, self.counts, strict=True)]
        return tuple(torch.cat(part, dim=1) for part in zip(*places, strict=True))

    def attend(self, layer, q, k, v, **options):
        parts = zip(self.caches, *(part.split(self.counts, dim=2) for part in (q, k, v)), strict=True)
        return torch.cat([cache.attend(layer, *own, **options) for cache, *own in parts], dim=2)

    def advance(self):
        for cache in self.caches:
            cache.advance()


@pytest.mark.parametrize("batch", range(5))
def test_fifty_prompts_are_those_of_a_contiguous_cache(model, folder, batch):
    """Ten prompts of 500 to 3000 tokens, 200 new ones each; read one by one, answered side by side."""
    lengths = [500 + 51 * (10 * index + batch) for index in range(5)] + [500 + 51 * (10 * index + 5 + batch) for index in range(5)]
    texts = [passage(folder, 700 * index, length) for index, length in enumerate(lengths)]
    pool = PagePool(model.config, sum(-(-(length + 200) // 256) for length in lengths), cache_format(None, 64, model.dtype))
    sequences = [CacheSequence(pool, length + 200) for length in lengths]
    caches = [ContiguousCache() for _ in lengths]
    answers = []
    for kind in ("pages", "contiguous"):
        def view(index: int | None, kind: str = kind):
            chosen = range(10) if index is None else [index]
            counts = [1] * 10 if index is None else [lengths[index]]
            if kind == "pages":
                return CacheView(pool, [sequences[one] for one in chosen], counts)
            return SideBySide([caches[one] for one in chosen], counts)

        with torch.inference_mode():
            rows = [
                model.forward(torch.tensor([text]), cache=view(index), last_only=True)[0, -1]
                for index, text in enumerate(texts)
            ]
            tokens = [[int(row.argmax())] for row in rows]
            for _ in range(199):
                logits = model.forward(torch.tensor([[answer[-1] for answer in tokens]]), cache=view(None))[0]
                for answer, token in zip(tokens, logits.argmax(-1).tolist(), strict=True):
                    answer.append(token)
        answers.append(tokens)
    assert answers[0] == answers[1]
