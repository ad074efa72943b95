import random

import pytest

from quantkit.evaluators.degeneration import (
    Answer,
    Loop,
    distinct,
    divergence_point,
    examine,
    find_loops,
    looped_tokens,
    stuttered_tokens,
    window_means,
)


def noise(count, seed=0):
    return random.Random(seed).sample(range(100, 100 + 10 * count), count)


def answer(ids, entropy=1.0, stopped=False):
    return Answer(tuple(ids), (entropy,) * len(ids), stopped, "")


@pytest.mark.parametrize("period", [1, 2, 3, 7, 24, 60, 100])
def test_a_loop_is_found_with_its_place_and_shortest_period(period):
    before, after = noise(50), noise(20, seed=1)
    rounds = max(3, 24 // period + 1)
    ids = [*before, *list(range(period)) * rounds, *after]
    assert find_loops(ids) == (Loop(50, period, period * rounds),)
    assert looped_tokens(find_loops(ids)) == period * (rounds - 1)


def test_two_loops_are_two():
    ids = [*noise(10), *[1, 2] * 20, *noise(10, seed=1), *[3, 4, 5] * 10]
    assert find_loops(ids) == (Loop(10, 2, 40), Loop(60, 3, 30))


def test_a_loop_that_ends_inside_a_round():
    assert find_loops([*noise(5), *[1, 2, 3, 4, 5] * 6, 1, 2]) == (Loop(5, 5, 32),)


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [1],
        noise(400),
        [*noise(20), *[7] * 23, *noise(20, seed=1)],  # too short
        [*noise(30), *noise(30), *noise(30, seed=1)],  # twice only
        [part for at in range(60) for part in (at, 1000)],  # counting: "one, two, three, …"
    ],
    ids=["empty", "one", "prose", "few", "twice", "counting"],
)
def test_what_is_no_loop(ids):
    assert find_loops(ids) == () and looped_tokens(find_loops(ids)) == 0


def test_stutter_is_what_a_lossy_cache_writes():
    """two, two, three, three, four, four: no loop, but each second pair says the one before again."""
    ids = [part for at in range(40) for part in (at, 1000) * 2]
    assert find_loops(ids) == ()
    assert stuttered_tokens(ids) == 2 + 39 * 3  # the comma in front repeats too
    assert stuttered_tokens([part for at in range(40) for part in (at, 1000)]) == 0
    assert stuttered_tokens([1, 1, 2, 3, 3, 3]) == 3
    assert stuttered_tokens([]) == 0


def test_entropy_collapses_in_windows():
    assert window_means([0.0] * 32 + [2.0] * 32 + [9.0] * 31) == [0.0, 2.0]
    half = Answer(tuple(noise(64)), (0.0,) * 32 + (2.0,) * 32, False, "")
    assert examine([half], 0, False).collapsed_rate == 0.5


def test_ends_too_early_or_never():
    short, long = answer(noise(5), stopped=True), answer(noise(50))
    assert examine([short], 6, False).early_stop and not examine([short], 5, False).early_stop
    assert examine([long], 60, True).missing_stop and not examine([long], 60, False).missing_stop
    assert not examine([long], 60, True).early_stop, "it was cut, it did not stop"
    assert examine([answer([], stopped=True)], 1, True).early_stop


def test_rates_are_shares_of_all_answers():
    loop = [1, 2] * 20
    found = examine([answer(loop), answer(noise(60))], 0, False)
    assert (found.tokens, found.loop_rate, found.stutter_rate) == (100, 0.38, 0.38)
    assert found.distinct_4 == pytest.approx((2 + 57) / (37 + 57))
    assert found.entropy == 1.0


def test_the_same_answer_twice_is_no_loop():
    """Answers are looked at one by one: two turns may well be answered alike."""
    same = answer(noise(40))
    assert examine([same, same, same], 0, False).loops == ()


def test_distinct_grams():
    assert distinct([[1, 2, 3, 1, 2, 3]], 2) == 3 / 5
    assert distinct([[1]], 4) == 1.0


def test_divergence_point():
    assert divergence_point([1, 2, 3], [1, 2, 4]) == 2
    assert divergence_point([1, 2, 3], [1, 2]) == 2
    assert divergence_point([1, 2], [1, 2]) is None
