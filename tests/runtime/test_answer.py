"""Answers on logits made by hand: what comes out is decided by the test, token by token."""

from dataclasses import replace

import pytest
import tiny
import torch

from quantkit.errors import RequestError
from quantkit.runtime import answer as answer_module
from quantkit.runtime.answer import Answer
from quantkit.runtime.request import Delta, Request
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.tokenizer import REPLACEMENT, Tokenizer

EMOJI = "Weather 👩‍👩‍👧‍👦 in 東京: 🌦️, नमस्ते 🇯🇵!"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return Tokenizer.open(folder)


def logits_for(*ids):
    """Logits that prefer the first of `ids`, then the second, and so on."""
    logits = torch.zeros(320)
    for rank, index in enumerate(ids):
        logits[index] = 200.0 - rank
    return logits


def play(tokenizer, wanted, max_new_tokens=100, second=(), **settings):
    """Feed the ids `wanted`, position by position, with what is likeliest after them; all deltas that come."""
    answer = Answer(Request([7], max_new_tokens, **settings), tokenizer)
    deltas = []
    while answer.finish_reason is None and len(answer.ids) - 1 < len(wanted):
        position = len(answer.ids) - 1
        before = len(answer.ids)
        deltas += answer.advance(logits_for(wanted[position], *second))
        assert len(answer.ids) <= before + 1
    return answer, deltas


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def bytes_of(tokenizer, text):
    """One token for each byte of the text: nothing is ever a whole character but ASCII."""
    return [index for character in text.encode() for index in [tokenizer.id_of(_symbol(character))]]


def _symbol(byte):
    """How byte-level vocabularies spell a byte: printable ones as they are, the rest from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def test_no_character_is_ever_broken(tokenizer):
    ids = bytes_of(tokenizer, EMOJI)
    assert tokenizer.decode(ids) == EMOJI and len(ids) == len(EMOJI.encode())
    _, deltas = play(tokenizer, ids, len(ids))
    assert text_of(deltas) == EMOJI and [delta.token_id for delta in deltas] == ids
    assert not any(REPLACEMENT in delta.text for delta in deltas)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(ids) - 1) + ["length"]


def test_an_answer_cut_within_a_character_says_so_once_at_its_end(tokenizer):
    ids = bytes_of(tokenizer, "a🌦")[:-1]
    _, deltas = play(tokenizer, ids, len(ids))
    assert [delta.text for delta in deltas] == ["a", "", "", REPLACEMENT]


@pytest.mark.parametrize("stop", ["the end", "🌦️", "東京"])
def test_a_stop_string_over_many_tokens(stop, tokenizer):
    ids = bytes_of(tokenizer, f"Say {stop[:-1]} or {stop}, then")
    end = len(bytes_of(tokenizer, f"Say {stop[:-1]} or {stop}"))
    answer, deltas = play(tokenizer, ids, stops=(stop, "\n\n"))
    assert text_of(deltas) == f"Say {stop[:-1]} or "
    assert answer.finish_reason == deltas[-1].finish_reason == "stop" and deltas[-1].stop == stop
    assert len(deltas) == end, "the token that completes it is the last one"


def test_a_stop_string_over_three_tokens_that_overlap_it(tokenizer):
    """"and" + " of" + "ing" hold "d ofi": it begins and ends within a token."""
    ids = [tokenizer.id_of(token) for token in ("and", "Ġof", "ing", "ing")]
    answer, deltas = play(tokenizer, ids, stops=("d ofi",))
    assert [delta.text for delta in deltas] == ["an", "", ""] and answer.finish_reason == "stop"


def test_what_only_looked_like_a_stop_string_comes_in_the_end(tokenizer):
    ids = bytes_of(tokenizer, "a</st")
    answer, deltas = play(tokenizer, ids, len(ids), stops=("</stop>",))
    assert [delta.text for delta in deltas] == ["a", "", "", "", "</st"] and answer.finish_reason == "length"
    eos = tokenizer.id_of("</s>")
    answer, deltas = play(tokenizer, [*ids, eos], stops=("</stop>",), stop_ids=frozenset({eos}))
    assert text_of(deltas) == "a</st" and deltas[-1] == replace(deltas[-1], token_id=eos, text="</st", stop=None)


def test_callbacks_stop_replace_and_drop(tokenizer):
    ids = bytes_of(tokenizer, "abcdef")
    calls = []

    def shout(delta):
        return replace(delta, text=delta.text.upper())

    def filter_b_stop_at_d(delta):
        calls.append(delta.text)
        return None if delta.text == "B" else delta.ending() if delta.text == "D" else delta

    answer, deltas = play(tokenizer, ids, callbacks=(shout, filter_b_stop_at_d))
    assert text_of(deltas) == "ACD" and calls == ["A", "B", "C", "D"]
    assert answer.finish_reason == deltas[-1].finish_reason == "callback"
    assert answer.ids[1:] == ids[:4], "what the model has read is what it said, whatever came out; and not a token more"


def test_a_dropped_last_delta_still_ends_the_answer(tokenizer):
    ids = bytes_of(tokenizer, "ab")
    _, deltas = play(tokenizer, ids, 2, callbacks=(lambda delta: None,))
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("", "length")]


def test_a_callback_may_give_its_own_reason(tokenizer):
    _, deltas = play(tokenizer, bytes_of(tokenizer, "ab"), callbacks=(lambda delta: delta.ending("tool call"),))
    assert [delta.finish_reason for delta in deltas] == ["tool call"]


def test_a_banned_string_is_gone_around(tokenizer):
    """After "the " the model wants "end" and next to it "x": the answer goes back to the "e"."""
    wanted = bytes_of(tokenizer, "the end.")
    x = tokenizer.id_of("x")
    answer, deltas = play(tokenizer, wanted, len(wanted), second=(x,), banned=("end",))
    assert text_of(deltas) == "the xnd."
    assert [delta.token_id for delta in deltas] == answer.ids[1:] and answer.finish_reason == "length"


def test_going_back_into_a_character(tokenizer):
    """The banned character is three bytes: the first of them is what must not come again."""
    wanted = bytes_of(tokenizer, "a東b")
    answer, deltas = play(tokenizer, wanted, 4, second=(tokenizer.id_of("x"),), banned=("東",))
    assert text_of(deltas).startswith("ax") and answer.finish_reason == "length"
    assert [delta.token_id for delta in deltas] == answer.ids[1:]


def test_tokens_wait_only_while_they_may_begin_a_banned_string(tokenizer):
    answer = Answer(Request([7], 10, banned=("eno",)), tokenizer)
    counts = [len(answer.advance(logits_for(index))) for index in bytes_of(tokenizer, "aenbe")]
    assert counts == [1, 0, 0, 3, 0]
    assert answer.advance(logits_for(tokenizer.id_of("</s>"))) == [], "a special token adds no text"
    assert text_of(answer.advance(logits_for(tokenizer.id_of("x")))) == "ex"


def test_a_banned_string_at_the_end_comes_as_far_as_it_came(tokenizer):
    wanted = bytes_of(tokenizer, "the en")
    _, deltas = play(tokenizer, wanted, len(wanted), banned=("end",))
    assert text_of(deltas) == "the en" and deltas[-1].finish_reason == "length"


def test_no_way_around_ends_the_answer(tokenizer, monkeypatch):
    """Every single byte is banned."""
    monkeypatch.setattr(answer_module, "ATTEMPTS", 50)
    banned = tuple(chr(code) for code in range(33, 127))
    answer, deltas = play(tokenizer, bytes_of(tokenizer, " a"), second=bytes_of(tokenizer, "".join(banned)), banned=banned)
    assert text_of(deltas) == " " and deltas[-1].finish_reason == answer.finish_reason == "banned"


def test_stop_strings_and_banned_ones_together(tokenizer):
    wanted = bytes_of(tokenizer, "one end. two")
    answer, deltas = play(tokenizer, wanted, second=(tokenizer.id_of("."),), stops=(".",), banned=("end",))
    assert text_of(deltas) == "one " and answer.finish_reason == "stop"


def test_a_seeded_answer_is_the_same_with_and_without_strings_that_never_come(tokenizer):
    def draw(**settings):
        answer = Answer(Request([7], 30, Sampling(temperature=1.0), seed=3, **settings), tokenizer)
        while answer.finish_reason is None:
            answer.advance(torch.zeros(276))
        return answer.ids

    assert draw() == draw(banned=("never to be seen",), stops=("never to be seen",))


@pytest.mark.parametrize("settings", [{"stops": ("",)}, {"banned": ("a", "")}])
def test_empty_strings_are_refused(settings):
    with pytest.raises(RequestError, match="empty string"):
        Request([1], 1, **settings)


def test_delta_ending_is_a_copy():
    delta = Delta("a", 1)
    assert delta.ending() == Delta("a", 1, "callback") and delta.finish_reason is None
