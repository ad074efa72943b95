"""Which layouts EXL2 holds, how shares become one, and what a layout takes on disk."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import FormatError
from quantkit.formats import exl2_layout
from quantkit.formats.codec import Group, Layout
from quantkit.formats.exl2_layout import Width, mixed, refusal, stored_bits
from quantkit.kernels.protocol import WIDTHS


def layout(*groups: tuple[int, int]) -> Layout:
    return Layout(tuple(Group(bits, rows) for bits, rows in groups))


def test_shares_become_the_nearest_multiples_of_32_rows() -> None:
    """10 % of 576 rows are one group of 64 rows, not one of 128."""
    assert mixed(576, [Width(5, 128, 0.1), Width(4, 128, 0.9)]) == layout((5, 64), *[(4, 128)] * 4)
    assert mixed(448, [Width(8, 32, 0.05), Width(4, 32, 0.1), Width(3, 64, 0.85)]) == layout(
        (8, 32), (4, 32), *[(3, 64)] * 6
    )
    assert mixed(4096, [Width(4, 128)]) == Layout.uniform(4096, 4, 128)
    assert mixed(96, [Width(4, -1)]) == layout((4, 96))


def test_a_share_below_half_a_step_vanishes() -> None:
    assert mixed(128, [Width(8, 32, 0.05), Width(4, 128, 0.95)]) == layout((4, 128))
    assert mixed(128, [Width(8, 32, 0.95), Width(4, 128, 0.05)]) == layout(*[(8, 32)] * 4)


def test_sixteen_rows_more_are_a_group_of_their_own_at_two_bits() -> None:
    assert mixed(144, [Width(3, 64, 0.5), Width(2, 64, 0.5)]) == layout((3, 64), (2, 64), (2, 16))
    assert mixed(112, [Width(2, 128)]) == layout((2, 96), (2, 16))
    assert mixed(144, [Width(3, 64, 0.95), Width(2, 64, 0.05)]) == layout((3, 64), (3, 64), (2, 16))
    assert mixed(16, [Width(2, -1)]) == layout((2, 16))


@pytest.mark.parametrize(
    ("in_features", "bits", "reason"),
    [
        (100, 4, "100 input features are not a multiple of 32, as EXL2's readers need$"),
        (144, 4, "144 input features are not a multiple of 32, .* unless the last 16 rows have 2 bits, not 4"),
        (136, 2, "136 input features are not a multiple of 32, as EXL2's readers need$"),
        (0, 4, "0 input features are not between 1 and the 65536"),
        (65568, 4, "65568 input features are not between 1 and the 65536 that EXL2 can order"),
    ],
)
def test_rows_that_no_layout_holds_are_refused(in_features: int, bits: int, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        mixed(in_features, [Width(bits, 128)])
    if in_features:
        assert refusal(layout((bits, in_features))) is not None


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ([Width(7, 128)], "EXL2 holds 2, 3, 4, 5, 6 or 8 bits, not 7"),
        ([Width(4, 48)], "groups of a multiple of 32 rows, not of 48"),
        ([Width(4, 0)], "groups of a multiple of 32 rows, not of 0"),
        ([Width(4, 128, 0.5), Width(3, 128, 0.4)], "shares of the rows that sum to 1, found a sum of 0.9"),
        ([Width(4, 128, 1.5), Width(3, 128, -0.5)], "a share of the rows above 0 and up to 1, found 1.5"),
        ([Width(3, 128, 0.5), Width(4, 128, 0.5)], "widths in descending order, found 3, 4 bits"),
        ([], "found a sum of 0"),
    ],
)
def test_mixes_that_make_no_sense_are_refused(widths: list[Width], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        exl2_layout.check(widths)


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([], "a layout without groups"),
        ([(4, 32), (5, 32)], "widths in descending order, but group 1 has 5 bits after 4"),
        ([(7, 32)], "but group 0 has 7"),
        ([(4, 48), (4, 48)], "groups of a multiple of 32 rows, but group 0 has 48"),
        ([(4, 32), (4, 0)], "groups of a multiple of 32 rows, but group 1 has 0"),
        ([(4, 128), (4, 16)], "144 input features .* 2 bits, not 4"),
        ([(2, 16), (2, 32)], "groups of a multiple of 32 rows, but group 0 has 16"),
        ([(2, 48)], "the last 16 of 48 rows must be their own group, but the last group has 48"),
        ([(8, 65536), (4, 32)], "65568 input features are not between"),
    ],
)
def test_layouts_that_readers_cannot_read_are_refused(groups: list[tuple[int, int]], reason: str) -> None:
    assert re.search(reason, str(refusal(layout(*groups))))


MIXES = st.lists(
    st.tuples(st.sampled_from(WIDTHS), st.sampled_from((-1, 32, 64, 96, 128)), st.floats(0.01, 1)), min_size=1, max_size=6
)


@settings(max_examples=200, deadline=None)
@given(mix=MIXES, steps=st.integers(1, 200), tail=st.booleans())
def test_every_mix_gives_a_legal_layout_near_its_shares(mix: list[tuple], steps: int, tail: bool) -> None:
    mix = sorted(mix, key=lambda width: -width[0])
    total = sum(share for *_, share in mix)
    widths = [Width(bits, size, share / total) for bits, size, share in mix]
    in_features = 32 * steps + 16 * (tail and widths[-1].bits == 2)
    found = mixed(in_features, widths)
    assert found.rows == in_features
    assert refusal(found) is None
    reached, rows = 0.0, 0
    for bits in sorted({width.bits for width in widths}, reverse=True):
        reached += sum(width.share for width in widths if width.bits == bits)
        rows += sum(group.rows for group in found.groups if group.bits == bits)
        assert abs(rows - reached * in_features) <= 32 + 1e-3
    sizes = {width.group_size if width.group_size != -1 else in_features for width in widths}
    assert max(group.rows for group in found.groups) <= max(sizes)


def test_bits_are_counted_with_all_side_data() -> None:
    """By hand: 256 rows, 96 outputs, 128 rows each at 8 and 6 bits."""
    head = layout((8, 128), (6, 128))
    codes, groups, order = 128 * 96 * 14, 2 * (16 + 32 + 4 * 96), 32 * 256
    assert stored_bits(head, 96, False) == codes + groups + order
    assert stored_bits(head, 96, True) == codes + groups + order + 16 * 96
    assert stored_bits(head, 65, False) == stored_bits(head, 96, False)  # padded to 96 columns
