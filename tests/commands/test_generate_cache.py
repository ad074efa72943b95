"""The options of `quantkit generate` that say what its cache is like."""

import json

import pytest
import tiny

from quantkit.commands.generate import run
from quantkit.commands.generation import setup
from quantkit.errors import RequestError, UsageError
from quantkit.progress import Silent
from quantkit.settings import GenerateSettings

LONG = "the end of the story and the beginning of another one in the sea " * 24
ROW = {"fp32": 128, "fp16": 64, "int8": 38, "k8v4": 28, "q4_0": 20}  # key and value of a head of 16 numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


class Said(Silent):
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


def answer(folder, said=None, **settings):
    settings = {"prompt": LONG, "max_new_tokens": 8, "ignore_eos": True, **settings}
    return run(GenerateSettings(str(folder), **settings), said or Silent())


@pytest.mark.parametrize("kv", [None, "fp16", "int8", "k8v4", "q4_0"])
def test_report_says_what_the_cache_took_to_the_byte(folder, kv):
    report = answer(folder, kv=kv)
    found = json.loads(json.dumps(report.as_json()))
    tokens = -(-(found["prompt_tokens"] + 8) // 256) * 256
    assert tokens >= 768
    assert found["kv_format"] == (kv or "fp32") and found["cache_tokens"] == tokens
    assert found["cache_bytes"] == tokens * 2 * 2 * ROW[found["kv_format"]], "two layers, two heads"
    assert found["host_bytes"] == found["pages_streamed"] == 0
    assert dict(report.rows())["cache"] == f"{tokens:,} positions in {kv or 'fp32'}, {found['cache_bytes']:,} bytes"


@pytest.mark.parametrize("kv", [None, "fp16", "int8", "k8v4", "q4_0"])
def test_streamed_answers_are_the_same(folder, kv):
    streamed = answer(folder, kv=kv, kv_resident=16)
    found = streamed.as_json()
    assert found["token_ids"] == answer(folder, kv=kv).as_json()["token_ids"]
    assert found["pages_streamed"] > 0
    assert found["host_bytes"] == found["cache_tokens"] * 2 * 2 * ROW[found["kv_format"]]
    assert "pages streamed from there" in dict(streamed.rows())["cache"]


def test_drafts_over_a_streamed_cache(folder):
    plain = answer(folder, kv="k8v4", max_new_tokens=40)
    drafted = answer(folder, kv="k8v4", kv_resident=16, draft="ngram", max_new_tokens=40)
    assert drafted.completion.token_ids == plain.completion.token_ids
    assert drafted.as_json()["pages_streamed"] > 0


def test_a_queue_has_the_cache_that_was_asked_for(folder, tmp_path):
    file = tmp_path / "prompts.jsonl"
    prompts = [LONG, "the sea", LONG + "and so on"]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    queue = answer(folder, prompt=None, prompts_file=file, kv="k8v4", kv_resident=16, batch=3).as_json()
    alone = [answer(folder, prompt=prompt, kv="k8v4").completion for prompt in prompts]
    assert [found["token_ids"] for found in queue["answers"]] == [list(done.token_ids) for done in alone]
    assert queue["kv_format"] == "k8v4" and queue["pages_streamed"] > 0 and queue["host_bytes"] > 0


def test_a_cache_too_small_is_refused_before_weights_are_read(folder, monkeypatch):
    monkeypatch.setattr(setup, "load_model", None)
    prompt = "the end of the sea " * 20
    with pytest.raises(RequestError, match=r"prompt tokens and 200 new ones need \d+ positions .* the cache has 256") as caught:
        answer(folder, prompt=prompt, cache_tokens=256, max_new_tokens=200)
    assert "`--cache-tokens " in caught.value.hint
    with pytest.raises(RequestError, match="200 new and 9 guessed ones"):
        answer(folder, prompt=prompt, cache_tokens=256, max_new_tokens=200, draft="ngram", draft_tokens=9)
    with pytest.raises(RequestError, match="the model's context has 2048"):
        answer(folder, max_new_tokens=2000)
    with pytest.raises(UsageError, match="no cache format `int4`"):
        answer(folder, kv="int4")
    with pytest.raises(UsageError, match="`--kv-sink` names positions seen beside a window"):
        answer(folder, kv_sink=4)


def test_what_the_hint_says_works(folder):
    prompt = "the end of the sea " * 20
    with pytest.raises(RequestError) as caught:
        answer(folder, prompt=prompt, cache_tokens=256, max_new_tokens=300)
    tokens = int(caught.value.hint.split("--cache-tokens ")[1].split("`")[0])
    found = answer(folder, prompt=prompt, cache_tokens=tokens, max_new_tokens=300).as_json()
    assert len(found["token_ids"]) == 300 and found["cache_tokens"] == tokens


def test_beyond_the_context_only_when_asked_and_then_said(tmp_path):
    folder = tiny.write_model(tmp_path / "model", max_position_embeddings=64)
    with pytest.raises(RequestError, match="the model's context has 64"):
        answer(folder, prompt="the end", max_new_tokens=100)
    said = Said()
    report = answer(folder, said, prompt="the end", max_new_tokens=100, allow_beyond_context=True)
    assert len(report.completion.token_ids) == 100
    assert any("beyond the model's context" in line for line in said.lines)


def test_a_window_makes_a_long_text_fit(folder):
    with pytest.raises(RequestError, match="the cache has 1280"):
        answer(folder, max_new_tokens=900, cache_tokens=1280)
    found = answer(folder, max_new_tokens=900, cache_tokens=1280, kv_window=200, kv_sink=4).as_json()
    assert len(found["token_ids"]) == 900 and found["cache_tokens"] == 1280
    assert found["token_ids"] != answer(folder, max_new_tokens=900).as_json()["token_ids"]
