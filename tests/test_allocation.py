"""The allocator against every possible choice, against its own bound, and against budgets nobody can meet."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.allocation import Option, allocate
from quantkit.errors import PlanError

OPTIONS = st.lists(
    st.builds(Option, st.integers(1, 60), st.floats(0, 10, allow_subnormal=False)), min_size=1, max_size=4
)


def realistic(linears: int, seed: int = 0) -> tuple[list[list[Option]], int]:
    """Options as measured ones are: damage falls fourfold with each bit, sizes are odd, levels differ widely."""
    draw = random.Random(seed)
    options, weights = [], 0
    for _ in range(linears):
        size = draw.choice([576 * 576, 576 * 192, 576 * 1536])
        level = 10 ** draw.uniform(-6, -2)
        widths = (2.2, 2.4, 2.7, 3.1, 3.3, 3.6, 4.1, 4.3, 4.6, 5.1, 6.1, 8.1)
        options.append([Option(int(width * size) // 32 * 32, level * 4**-width * draw.uniform(0.8, 1.2)) for width in widths])
        weights += size
    return options, weights


@settings(deadline=None)
@given(st.lists(OPTIONS, min_size=1, max_size=5), st.floats(0, 1))
def test_no_choice_within_the_budget_is_better(options: list[list[Option]], share: float) -> None:
    least = sum(min(option.bits for option in listed) for listed in options)
    most = sum(max(option.bits for option in listed) for listed in options)
    budget = least + int(share * (most - least))
    found = allocate(options, budget, 1)
    picked = [listed[number] for listed, number in zip(options, found.chosen, strict=True)]
    assert sum(option.bits for option in picked) == found.bits <= budget
    best = min(
        sum(option.damage for option in choice)
        for choice in itertools.product(*options)
        if sum(option.bits for option in choice) <= budget
    )
    assert found.damage == pytest.approx(best, abs=1e-9)
    assert found.bound <= best + 1e-9


@pytest.mark.parametrize("bpw", [2.25, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.5])
def test_a_real_size_is_within_half_a_percent_of_the_bound_and_uses_the_budget(bpw: float) -> None:
    options, weights = realistic(210)
    found = allocate(options, int(bpw * weights), weights)
    assert found.bits <= bpw * weights < 1.005 * found.bits
    assert found.bound <= found.damage <= 1.005 * found.bound
    assert allocate(options, int(bpw * weights), weights) == found


def test_thousands_of_experts_are_no_more_than_a_longer_list() -> None:
    options, weights = realistic(2000)
    found = allocate(options, 4 * weights, weights)
    assert found.bits <= 4 * weights
    assert found.damage <= 1.0005 * found.bound


def test_an_option_that_is_larger_and_worse_is_never_taken() -> None:
    found = allocate([[Option(100, 2.0), Option(90, 1.0), Option(80, 3.0)]], 100, 10)
    assert found.chosen == (1,)


@pytest.mark.parametrize(
    ("bpw", "words", "hint"),
    [(1.5, "the smallest layouts take 2.", "--bpw 2."), (9.0, "the largest layouts take 8.", "--bpw 8.")],
)
def test_a_target_out_of_reach_is_refused_with_the_nearest_one(bpw: float, words: str, hint: str) -> None:
    options, weights = realistic(20)
    with pytest.raises(PlanError, match=words) as caught:
        allocate(options, int(bpw * weights), weights)
    assert hint in (caught.value.hint or "")
    nearest = float((caught.value.hint or "").split("--bpw ")[1].split("`")[0])
    assert allocate(options, int(nearest * weights), weights).bits <= nearest * weights
