from types import SimpleNamespace

import faulty_cache
import pytest

from quantkit.evaluators.conversation import Frame, Prompt
from quantkit.evaluators.degeneration import Symptoms
from quantkit.evaluators.probe import FormatResult, Talk, judge_alone, judge_beside, probe, talk_all
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.tokenizer import Tokenizer

PROMPTS = (
    Prompt("one", "chat", "the end of the other", alone=True, least_tokens=1),
    Prompt("two", "counting", "on and on", alone=False, least_tokens=1),
)


@pytest.fixture(scope="module")
def frame(folder):
    return Frame(Tokenizer.open(folder), ("and then?",))


def talk(
    way="sampled", alone=True, loop=0.0, stutter=0.0, entropy=1.0, early=False, missing=None, kl=None, diverges=None
):
    """`missing`: whether a short answer never ended; None is a long answer."""
    symptoms = Symptoms(400, (), loop, stutter, 0.9, entropy, 0.0, early, bool(missing))
    prompt = Prompt("x", "chat", "x", alone=alone, least_tokens=1, short=missing is not None)
    return Talk(prompt, way, SimpleNamespace(), symptoms, None, diverges, kl)


def test_alone_only_what_tells_something_is_judged():
    good = [talk("greedy"), talk()] * 5
    assert judge_alone(good) == () and judge_alone([]) == ()
    assert judge_alone([*good, *[talk(alone=False, loop=1.0)] * 9]) == ()
    assert judge_alone([*good, *[talk("greedy", loop=1.0, entropy=0.0)] * 9]) == (), "healthy small models do that"
    assert "loop" in judge_alone([*good, *[talk(loop=0.9)] * 3])[0]
    assert "stutter" in judge_alone([talk(stutter=0.3)])[0]
    assert "long answers end too early" in judge_alone([talk(early=True)])[0]
    assert "short answers never end" in judge_alone([talk(), talk("greedy", alone=False, missing=True)])[0]
    assert judge_alone([talk(), *[talk(missing=one) for one in (True, False)]]) == ()
    for entropy in (0.01, 7.0):
        assert "entropy" in judge_alone([talk(entropy=entropy)])[0]


def test_beside_a_reference_only_what_is_worse_counts():
    theirs = [talk(loop=0.6), talk(loop=0.5)]
    assert judge_beside([talk(loop=0.6), talk(loop=0.6)], theirs, 0.1) == ()
    assert "loop rate 80% against 55%" in judge_beside([talk(loop=0.8), talk(loop=0.8)], theirs, 0.1)[0]
    assert "stutter rate" in judge_beside([talk(stutter=0.3)], [talk()], 0.1)[0]
    assert "KL 0.60" in judge_beside(theirs, theirs, 0.6)[0]
    assert "end too early" in judge_beside([talk(early=True)] * 2, [talk()] * 2, 0.1)[0]
    assert "never end" in judge_beside([talk(missing=True)], [talk(missing=False)], 0.1)[0]
    assert judge_beside([talk(missing=True)], [talk(missing=True)], 0.1) == ()


def test_verdicts():
    result = FormatResult("int8", (talk(kl=0.1, diverges=30), talk(kl=0.1)), None, ())
    assert result.verdict == "healthy" and result.diverges in (30.0, 400.0)
    assert FormatResult("int8", (talk(),), None, ("x",)).verdict == "degenerate"
    assert FormatResult("int8", (talk(),), 0, ()).verdict == "not run"
    assert FormatResult("int8", (talk(),), 3, ()).verdict == "healthy"
    assert FormatResult("int8", (talk(),), None, ("x",), judged=False).verdict == "degenerate"


def test_prompts_that_tell_nothing_alone_make_no_model_healthy(model, frame):
    found = probe(model, frame, PROMPTS[1:], CachePlan(), tokens=8)
    assert found.findings == () and found.verdict == "not run" and "nothing to judge by" in found.reasons[0]
    theirs, _ = talk_all(model, Mute(frame), PROMPTS, CachePlan(), tokens=8)
    assert probe(model, Mute(frame), PROMPTS, CachePlan(), reference=(model, theirs), tokens=8).verdict == "not run"


def test_a_model_beside_itself_neither_diverges_nor_exceeds(model, frame):
    theirs, streamed = talk_all(model, frame, PROMPTS, CachePlan(), tokens=40)
    assert len(theirs) == 4 and streamed == 0
    found = probe(model, frame, PROMPTS, CachePlan(), reference=(model, theirs), tokens=40)
    assert found.kl < 1e-6 and found.loop_excess == 0 and found.diverges == 40
    assert found.label == "fp32" and found.ran and found.findings == ()


class Mute:
    """A frame of whose tokenizer every token ends an answer."""

    def __init__(self, frame):
        self.tokenizer = SimpleNamespace(eos_ids=range(320), decode=frame.tokenizer.decode)
        self.begin, self.go_on = frame.begin, frame.go_on


def test_a_reference_that_says_nothing_has_no_divergence(model, frame):
    mute, _ = talk_all(model, Mute(frame), PROMPTS, CachePlan(), tokens=8)
    assert not any(any(one.conversation.answered) for one in mute)
    found = probe(model, frame, PROMPTS, CachePlan(), reference=(model, mute), tokens=8)
    assert found.kl is None and all(one.kl is None for one in found.talks)
    said, _ = talk_all(model, frame, PROMPTS, CachePlan(), tokens=8)
    some = probe(model, frame, PROMPTS, CachePlan(), reference=(model, [mute[0], *said[1:]]), tokens=8)
    assert [one.kl is None for one in some.talks] == [True, False, True, True] and some.kl < 1e-6


def test_values_lost_in_every_second_append_are_found_in_every_format(model, frame, monkeypatch):
    """The planted fault shows beside a reference that was read without it, and the healthy formats do not."""
    theirs, _ = talk_all(model, frame, PROMPTS, CachePlan(), tokens=40)
    formats = [CachePlan(name) for name in (None, "fp16", "int8")]
    for cache in formats:
        healthy = probe(model, frame, PROMPTS, cache, reference=(model, theirs), tokens=40)
        assert healthy.kl < 0.01, healthy.label
    faulty_cache.plant(monkeypatch)
    for cache in formats:
        broken = probe(model, frame, PROMPTS, cache, reference=(model, theirs), tokens=40)
        assert broken.kl > 0.05 and broken.diverges < 20, broken.label


def test_a_resident_window_that_never_streams_did_not_run(model, frame):
    short = probe(model, frame, PROMPTS, CachePlan("fp16", resident=1024), tokens=16)
    assert short.streamed == 0 and short.verdict == "not run"
    talks, streamed = talk_all(model, frame, PROMPTS[:1], CachePlan("fp16", resident=256), tokens=1000, ways=("greedy",))
    assert streamed > 0 and talks[0].symptoms.tokens <= 1000
