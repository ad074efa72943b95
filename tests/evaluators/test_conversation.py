import pytest
import tiny
import torch
from contiguous import ContiguousCache

from quantkit.evaluators import conversation
from quantkit.evaluators.conversation import (
    MOST_ANSWERS,
    Conversation,
    Frame,
    Prompt,
    bundled_prompts,
    converse,
    most_positions,
    read_again,
    read_whole,
)
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.tokenizer import Tokenizer

FOLLOW_UPS = ("and then?", "why?")


@pytest.fixture(scope="module")
def frame(folder):
    return Frame(Tokenizer.open(folder), FOLLOW_UPS)


def prompt(ask, **facts):
    return Prompt("test", "chat", ask, alone=True, least_tokens=1, **facts)


def begin(frame, ask, tokens=30, sampling=None, seed=0):
    return Conversation.begin(prompt(ask), frame, sampling or Sampling(), seed, tokens)


def test_conversations_side_by_side_say_what_each_says_alone(model, frame, monkeypatch):
    asks = ["the end", "another thing in the sands of the other", "on"]
    sampled = Sampling(temperature=1.0)
    monkeypatch.setattr(conversation, "SIDE_BY_SIDE", 2)
    together = [begin(frame, ask, 20 + at, sampled, at) for at, ask in enumerate(asks)]
    converse(model, together, frame, CachePlan())
    for at, ask in enumerate(asks):
        alone = begin(frame, ask, 20 + at, sampled, at)
        converse(model, [alone], frame, CachePlan())
        assert alone.seen == together[at].seen and alone.answered == together[at].answered
        assert sum(len(answer.ids) for answer in alone.answers) == 20 + at


def test_an_answer_that_ends_is_followed_by_the_user(model, frame):
    """What the user says stands between the turns as the chat template has it, and is not counted as an answer."""
    one = begin(frame, "the end")
    one.hear(20, 1.0, frame)
    one.hear(4, 1.0, frame)
    one.hear(21, 1.0, frame)
    said = [answer.ids for answer in one.answers]
    assert said == [(20,)] and one.answers[0].stopped
    text = "<|im_end|>\n<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n"
    between = frame.tokenizer.encode(text)
    assert one.seen == [*frame.begin(one.prompt), 20, *between, 21]
    assert [index for index, answered in zip(one.seen, one.answered, strict=True) if answered] == [20, 21]
    assert one.pending == [21] and one.left == 28


def test_a_model_that_only_stops_is_heard_out(frame):
    one = begin(frame, "the end")
    for _ in range(MOST_ANSWERS):
        assert one.left > 0
        one.hear(2, 0.0, frame)
    assert one.left == 0 and len(one.answers) == MOST_ANSWERS
    assert len(one.seen) + one.left <= most_positions(one.prompt, frame, 30)


def test_without_a_chat_template_it_is_plain_text(folder, tmp_path, model):
    import json

    bare = tiny.write_model(tmp_path / "bare")
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    frame = Frame(Tokenizer.open(bare), FOLLOW_UPS)
    assert frame.tokenizer.decode(frame.begin(prompt("the end"))) == "the end\n"
    assert frame.tokenizer.decode(frame.go_on(1)) == "\n\nwhy?\n"


@pytest.mark.parametrize("cache", [CachePlan(), CachePlan("fp16"), CachePlan("int8")], ids=str)
def test_read_again_in_small_appends_gives_the_logits_of_one_pass(cache, model, frame):
    one = begin(frame, "the end of the other", tokens=40)
    one.hear(20, 0.0, frame)
    one.hear(4, 0.0, frame)
    for token in range(30, 50):
        one.hear(token, 0.0, frame)
    whole, again = read_whole(model, one), read_again(model, one, cache)
    assert whole.shape == again.shape == (21, 320)
    near = {None: 1e-4, "fp16": 2e-2, "int8": 0.3}[cache.kv]
    assert float((whole - again).abs().max()) < near


def test_entropies_are_those_of_the_distribution_before_each_token(model, frame):
    one = begin(frame, "the sands", tokens=5)
    converse(model, [one], frame, CachePlan())
    answer = one.answers[0]
    cache = ContiguousCache()
    with torch.inference_mode():
        logits = model.forward(torch.tensor([frame.begin(one.prompt)]), cache=cache, last_only=True)[0, -1]
    likely = logits.double().log_softmax(0)
    assert answer.entropies[0] == pytest.approx(float(-(likely.exp() * likely).sum()), abs=1e-4)


def test_bundled_prompts_are_of_every_kind_and_have_what_they_look_for():
    prompts, follow_ups = bundled_prompts(quick=False)
    quick, _ = bundled_prompts(quick=True)
    assert {one.kind for one in prompts} == {"counting", "list", "long answer", "retrieval", "chat", "short answer"}
    assert {one.kind for one in quick} == {one.kind for one in prompts} and 2 * len(quick) < len(prompts)
    assert len({one.name for one in prompts}) == len(prompts) and len(follow_ups) >= 4
    for one in prompts:
        if one.needle:
            assert one.found_in(one.needle) and one.text.count(one.needle) == 1
            place = one.text.index(one.needle)
            assert 0.25 < place / len(one.text) < 0.75
    week = next(one for one in prompts if one.name == "week")
    assert week.found_in("There are Seven.") and not week.found_in("six") and prompts[0].found_in("x") is None
