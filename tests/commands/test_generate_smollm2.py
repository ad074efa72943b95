"""A real model: the same tokens as transformers, and the texts that are known of it."""

import pytest
import smollm2
import torch

import quantkit
from quantkit.commands.generate import run
from quantkit.progress import Silent
from quantkit.runtime.drafts import ModelDraft, NgramDraft
from quantkit.runtime.generator import Generator
from quantkit.runtime.load import load
from quantkit.runtime.prefix_cache import PrefixCache
from quantkit.runtime.request import Request
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.scheduler import Limits, Scheduler
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import GenerateSettings

pytestmark = pytest.mark.proof

GRAVITY = (
    "Gravity is a fundamental concept in physics that describes the force of gravity, which is a result of the curvature "
    "of spacetime caused by the presence of mass."
)


@pytest.fixture(scope="module")
def folder():
    return smollm2.for_test()


def test_two_hundred_greedy_tokens_are_those_of_transformers(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    messages = [{"role": "user", "content": "Write a long story about a lighthouse keeper and the sea."}]
    tokenizer = Tokenizer.open(folder)
    ids = tokenizer.chat(messages)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )
    assert ids == list(theirs["input_ids"])
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = peer.generate(
        torch.tensor([ids]), max_new_tokens=200, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    answer = Generator(load(folder), tokenizer).run(Request(ids, max_new_tokens=200))
    assert list(answer.token_ids) == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"prompt": "The capital of France is"}, " Paris.\n\nThe answer is: 2018-01-22 12:12:53."),
        ({"chat": "What is gravity? Answer in two sentences."}, GRAVITY),
    ],
)
def test_known_answers(settings, text, folder):
    report = run(GenerateSettings(str(folder), **settings), Silent())
    assert report.completion.text == text and report.completion.finish_reason == "stop"


@pytest.mark.parametrize("text", ["Weather: 🌦️🌈👩‍👩‍👧‍👦 🇯🇵", "世界の平和と幸福を願います。", "नमस्ते दुनिया"])
def test_no_character_of_a_real_vocabulary_is_split(text, folder):
    tokenizer = Tokenizer.open(folder)
    stream, ids = tokenizer.stream(), tokenizer.encode(text)
    pieces = [*map(stream.push, ids), stream.finish()]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces[:-1], "no character was spread over several tokens"


# Batches, drafts and streams, on a few dozen tokens each: `docs/results/generation.md` has longer runs.

QUESTIONS = (
    "What is gravity?", "Name three colours.", "Write a haiku about snow.", "Why is the sky blue?", "Translate 'water' to French.",
    "List the first ten prime numbers.", "Who wrote Hamlet?", "How do bees make honey?", "Tell a joke.", "What is 12 times 12?",
    "Describe a sunset in one sentence.", "What does a doctor do?", "Give me a recipe for pancakes.", "What is a neuron?",
    "Explain rain to a child.", "What is the capital of Japan?", "Write the alphabet.", "Count from one to twenty in words.",
    "Repeat the word 'echo' ten times.", "Why do we sleep?",
)  # fmt: skip


def questions(tokenizer, count, tokens):
    return [Request(tokenizer.chat([{"role": "user", "content": text}]), tokens) for text in QUESTIONS[:count]]


def test_drafts_of_two_bits_and_of_ngrams_leave_the_answers_as_they_are(folder, tmp_path):
    settings = {"bits": 2, "group_size": 32, "effort": "fast", "samples": 16, "evaluate": False, "progress": Silent()}
    quantkit.quantize(folder, tmp_path / "draft", **settings)
    model, tokenizer = load(folder), Tokenizer.open(folder)
    requests = questions(tokenizer, 20, 24)
    expected = [Generator(model, tokenizer).run(request).token_ids for request in requests]
    for draft in (ModelDraft(load(tmp_path / "draft"), 4), NgramDraft(4)):
        found = [Generator(model, tokenizer, draft=draft).run(request) for request in requests]
        assert [done.token_ids for done in found] == expected
        assert sum(done.tally.passes_saved for done in found) > 0


@pytest.mark.parametrize("share", [False, True])
def test_sixteen_ragged_requests_get_the_answers_they_get_alone(share, folder):
    generator = Generator(load(folder), Tokenizer.open(folder))
    beginning = generator.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 30)
    requests = [
        Request([*beginning[: 280 * (index % 2)], *request.ids], 12 + index)
        for index, request in enumerate(questions(generator.tokenizer, 16, 1))
    ]
    expected = [generator.run(request).token_ids for request in requests]
    pool = generator.cache.pool(generator.model.config, 9 * 256, generator.model.dtype, "cpu")
    prefixes = PrefixCache(pool, generator.model.config) if share else None
    scheduler = Scheduler(generator, pool, Limits(token_budget=200, optimistic=True), prefixes)
    order = [5, 0, 11, 3, 14, 8, 1, 15, 6, 2, 12, 9, 4, 13, 7, 10]
    numbers = {index: scheduler.add(requests[index]) for index in order}
    for _ in scheduler.stream():
        pass
    assert [scheduler.served[numbers[index]].completion.token_ids for index in range(16)] == expected
    assert bool(sum(done.shared_tokens for done in scheduler.served.values())) == share


def test_requests_that_lose_their_pages_get_the_same_answers(folder):
    """Three that each take a second page after a few tokens, in a cache of five."""
    generator = Generator(load(folder), Tokenizer.open(folder))
    text = generator.tokenizer.encode("It was a bright cold day in April, and the clocks were striking thirteen. " * 20)
    requests = [Request(text[start : start + 250], 14) for start in range(3)]
    expected = [generator.run(request).token_ids for request in requests]
    pool = generator.cache.pool(generator.model.config, 5 * 256, generator.model.dtype, "cpu")
    scheduler = Scheduler(generator, pool, Limits(optimistic=True))
    numbers = [scheduler.add(request) for request in requests]
    for _ in scheduler.stream():
        pass
    assert [scheduler.served[number].completion.token_ids for number in numbers] == expected
    assert scheduler.preemptions > 0


@pytest.mark.parametrize("prompt", ["🌦️🌈👩‍👩‍👧‍👦 🇯🇵 🌦️🌈👩‍👩‍👧‍👦", "世界の平和と幸福を願います。世界の平和と", "नमस्ते दुनिया, नमस्ते"])
def test_streams_never_emit_a_broken_character(prompt, folder):
    generator = Generator(load(folder), Tokenizer.open(folder))
    ids = generator.tokenizer.encode(prompt)
    deltas = list(generator.stream(Request(ids, 40, Sampling(temperature=0.7), seed=1)))
    text = "".join(delta.text for delta in deltas)
    assert text == generator.tokenizer.decode([delta.token_id for delta in deltas])
    assert "\ufffd" not in text[:-1]
