"""A real model: the same tokens as transformers, and the texts that are known of it."""

import pytest
import smollm2
import torch

from quantkit.commands.generate import run
from quantkit.progress import Silent
from quantkit.runtime.generator import Generator
from quantkit.runtime.load import load
from quantkit.runtime.request import Request
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
