import re
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from quantkit.errors import GateError, RequestError
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.generator import Generator
from quantkit.runtime.load import load
from quantkit.runtime.request import Request
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.tokenizer import Tokenizer

PROMPT = [5, 40, 17, 200, 33, 101, 6]


def open_generator(path, **options):
    return Generator(load(path), Tokenizer.open(path), **options)


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    return open_generator(tiny.write_model(tmp_path_factory.mktemp("model")))


def greedy_without_cache(model, ids, count):
    """The definition: the whole text through the model again for every token."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return tuple(ids[-count:])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_with_cache_equals_recomputing_everything(family, tmp_path):
    """40 tokens reach beyond the 16 positions of the windows that Gemma's layers have."""
    generator = open_generator(tiny.write_model(tmp_path / "model", family))
    answer = generator.run(Request(PROMPT, max_new_tokens=40))
    assert answer.token_ids == greedy_without_cache(generator.model, PROMPT, 40)
    assert answer.finish_reason == "length" and answer.prompt_tokens == len(PROMPT)


def test_long_rope_that_outgrows_its_short_factors_is_read_again(tmp_path):
    """Phi-3 rebuilds its cache when the text passes `original_max_position_embeddings`, here after 12 positions."""
    width = 8
    scaling = {"type": "longrope", "short_factor": [1.0] * width, "long_factor": [4.0] * width}
    path = tiny.write_model(
        tmp_path / "model",
        "Phi3ForCausalLM",
        rope_scaling=scaling,
        original_max_position_embeddings=12,
        max_position_embeddings=64,
    )
    generator = open_generator(path)
    answer = generator.run(Request(PROMPT, max_new_tokens=20))
    assert answer.token_ids == greedy_without_cache(generator.model, PROMPT, 20)


def test_text_is_that_of_the_tokens_and_of_the_stream(generator):
    deltas = list(generator.stream(Request(PROMPT, max_new_tokens=60)))
    ids = [delta.token_id for delta in deltas]
    text = "".join(delta.text for delta in deltas)
    assert text == generator.tokenizer.decode(ids) == generator.run(Request(PROMPT, max_new_tokens=60)).text
    assert [delta.finish_reason for delta in deltas] == [None] * 59 + ["length"]


def test_stop_id_ends_the_answer_and_adds_no_text(generator):
    free = generator.run(Request(PROMPT, max_new_tokens=30))
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    answer = generator.run(Request(PROMPT, max_new_tokens=30, stop_ids=frozenset({stop, 319})))
    assert answer.finish_reason == "stop"
    assert answer.token_ids == free.token_ids[: first + 1]
    assert answer.text == generator.tokenizer.decode(free.token_ids[:first])


def test_stop_on_the_last_token_is_a_stop(generator):
    token = greedy_without_cache(generator.model, PROMPT, 1)[0]
    assert generator.run(Request(PROMPT, max_new_tokens=1, stop_ids=frozenset({token}))).finish_reason == "stop"


def test_log_probabilities_are_those_of_the_model(generator):
    settings = Sampling(temperature=2.0, top_k=5, repetition_penalty=1.5)
    answer = generator.run(Request(PROMPT, 12, settings, seed=4))
    logits = generator.model(torch.tensor([[*PROMPT, *answer.token_ids]]))[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert answer.log_probabilities == pytest.approx(expected.tolist(), abs=1e-4)


def test_settings_can_change_with_every_token(generator):
    """Greedy but for the third token, which is drawn wildly."""
    seen = []

    def sampling(ids):
        seen.append(len(ids))
        return Sampling(temperature=100.0) if len(ids) == 2 else Sampling()

    free = generator.run(Request(PROMPT, 8)).token_ids
    answer = generator.run(Request(PROMPT, 8, sampling, seed=1)).token_ids
    assert seen == list(range(8)) and answer[:2] == free[:2] and answer[2] != free[2]
    assert answer[3:] == greedy_without_cache(generator.model, [*PROMPT, *answer[:3]], 5)


def test_one_token_has_no_decoding_speed(generator):
    answer = generator.run(Request(PROMPT, max_new_tokens=1))
    assert answer.decode_tokens_per_second is None and answer.prefill_tokens_per_second > 0
    several = generator.run(Request(PROMPT, max_new_tokens=3))
    assert several.decode_tokens_per_second > 0
    assert replace(several, decode_seconds=0.0).decode_tokens_per_second is None, "all in one pass of a batch"


def test_sampling_depends_on_the_seed_alone(generator):
    def run(seed):
        return generator.run(Request(PROMPT, 20, Sampling(temperature=1.0), seed=seed)).token_ids

    assert run(1) == run(1) != run(2)


def test_repetition_penalty_sees_prompt_and_answer(generator):
    answer = generator.run(Request(PROMPT, 40, Sampling(repetition_penalty=100.0)))
    said = [*PROMPT, *answer.token_ids]
    assert len(set(said)) == len(said), "a hundredfold penalty leaves no token worth repeating"


def test_capacity_is_checked_before_the_first_token(tmp_path):
    path = tiny.write_model(tmp_path / "model", max_position_embeddings=64)
    generator = open_generator(path)
    generator.model = replace(generator.model, blocks=None)  # any work would fail
    with pytest.raises(
        RequestError, match="7 prompt tokens and 58 new ones need 65 positions, the model's context has 64"
    ):
        generator.stream(Request(PROMPT, max_new_tokens=58))
    with pytest.raises(RequestError, match="the cache has 32"):
        Generator(generator.model, generator.tokenizer, cache=CachePlan(tokens=32)).stream(Request(PROMPT, max_new_tokens=26))


def test_the_last_position_can_be_used(tmp_path):
    generator = open_generator(tiny.write_model(tmp_path / "model", max_position_embeddings=64))
    assert len(generator.run(Request(PROMPT, max_new_tokens=57)).token_ids) == 57


def test_prompt_of_another_vocabulary_is_refused(generator):
    with pytest.raises(RequestError, match="token id 320, the model knows 320 ids"):
        generator.stream(Request([1, 320], max_new_tokens=1))


def test_logits_that_are_no_numbers_name_the_layer(tmp_path):
    path = tiny.write_model(tmp_path / "model")
    tensors = tiny.make_tensors(tiny.make_config("LlamaForCausalLM"), 0, torch.float32)
    tensors["model.layers.1.mlp.down_proj.weight"].fill_(3e38)
    tiny.write_tensors(path, tensors)
    with pytest.raises(GateError, match="block 1"):
        open_generator(path).run(Request(PROMPT, max_new_tokens=5))


def test_the_python_of_the_guide_runs(tmp_path, monkeypatch, capsys):
    tiny.write_model(tmp_path / "MODEL")
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "generate.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] in {"length", "callback", "stop"}
