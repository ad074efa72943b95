"""Layers over devices: small cases by hand, all others against every possible spread."""

from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import PlanError
from quantkit.runtime.autosplit import spread


def test_one_device_that_holds_all_gets_all() -> None:
    assert spread([10] * 4, free=[30, 40, 100]) == (2, 2, 2, 2)


def test_devices_are_filled_alike_by_what_each_has_free() -> None:
    assert spread([10] * 6, free=[45, 25]) == (0, 0, 0, 0, 1, 1)
    assert spread([10] * 8, free=[60, 60]) == (0,) * 4 + (1,) * 4


def test_embedding_and_head_go_along_with_the_ends() -> None:
    assert spread([10] * 4, free=[40, 40], first=25) == (0, 1, 1, 1)
    assert spread([10] * 4, free=[40, 40], last=25) == (0, 0, 0, 1)


def test_a_device_without_room_is_left_out() -> None:
    assert spread([10] * 4, free=[20, 0, 20]) == (0, 0, 2, 2)


def test_what_fits_nowhere_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match="layers of 45 bytes, the largest of 15, do not fit into free memory of 30, 14 bytes"):
        spread([15] * 3, free=[30, 14])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.lists(st.integers(0, 60), min_size=1, max_size=3))
def test_no_other_spread_is_better(layers, free) -> None:
    def cost(placed):
        used = [sum(size for size, device in zip(layers, placed, strict=True) if device == number) for number in range(len(free))]
        if any(size > room for size, room in zip(used, free, strict=True)):
            return None
        shares = [size / room for size, room in zip(used, free, strict=True) if room]
        return len(set(placed)), max(shares, default=0.0)

    costs = [cost(placed) for placed in combinations_with_replacement(range(len(free)), len(layers))]
    possible = [found for found in costs if found is not None]
    if not possible:
        with pytest.raises(PlanError):
            spread(layers, free)
    else:
        assert cost(spread(layers, free)) == min(possible)
