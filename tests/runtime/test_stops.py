import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import RequestError
from quantkit.runtime.stops import StopStrings, beginning_of, first_of

TEXT = st.text("ab,c", max_size=12)
STRINGS = st.lists(st.text("ab,c", min_size=1, max_size=4), max_size=3)


@given(st.lists(TEXT, max_size=6), STRINGS)
def test_however_a_text_is_cut_it_ends_where_the_first_string_is_complete(pieces, strings):
    """A string ends the text as soon as it is there, so that of two the one that is complete first counts."""
    stops = StopStrings(strings)
    seen = "".join(stops.push(character) for piece in pieces for character in piece) + stops.finish()
    text = "".join(pieces)
    ends = [text.find(string) + len(string) for string in strings if string in text]
    assert (stops.found is None) == (not ends)
    if ends:
        whole = text[: min(ends)]
        assert whole == seen + stops.found and stops.found in strings
    else:
        assert seen == text


@given(st.lists(TEXT, max_size=6), STRINGS)
def test_nothing_waits_that_cannot_become_a_string(pieces, strings):
    stops, text, seen = StopStrings(strings), "", ""
    for piece in pieces:
        text, seen = text + piece, seen + stops.push(piece)
        if stops.found is not None:
            assert first_of(strings, text) and not stops.push("more") and not stops.finish()
            return
        waiting = text[len(seen) :]
        assert text.startswith(seen) and not any(string in seen for string in strings)
        assert not waiting or any(string.startswith(waiting) for string in strings)


def test_as_much_waits_as_may_begin_a_string():
    assert beginning_of((",b,c", "</stop>"), "a,b") == 2
    assert beginning_of((",b,c", "</stop>"), "a<") == 1
    assert beginning_of((",b,c",), "a,b,") == 3, "the longest beginning counts, not the last comma"
    assert beginning_of(("aab",), "aaa") == 2
    assert beginning_of((), "a") == beginning_of(("x",), "x") == 0


def test_an_empty_string_is_refused():
    with pytest.raises(RequestError, match="`--stop` is an empty string"):
        StopStrings(("a", ""))
