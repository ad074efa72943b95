"""Mixes as text: read, spelled, refused, and the shipped ones legal."""

from itertools import pairwise

import pytest

from quantkit.errors import FormatError
from quantkit.formats import exl2_mix
from quantkit.formats.exl2_layout import Width, mixed, refusal, stored_bits


def test_text_and_mix_are_the_same_thing() -> None:
    mix = exl2_mix.read("8@128:15% 6@32:85%")
    assert mix == (Width(8, 128, 0.15), Width(6, 32, 0.85))
    assert exl2_mix.spell(mix) == "8@128:15% 6@32:85%"
    assert exl2_mix.read("4@64") == (Width(4, 64),)
    assert exl2_mix.read(exl2_mix.spell((Width(4, -1),))) == (Width(4, -1),)


@pytest.mark.parametrize("text", ["", "4", "4@", "4@64 3@64", "5@64:25%4@64:75%", "4@64:x%"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(FormatError) as caught:
        exl2_mix.read(text)
    assert "5@64:25% 4@64:75%" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["3@64:50% 4@64:50%", "4@64:50% 3@64:40%", "7@64", "4@48"])
def test_what_the_format_lacks_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match=r"EXL2|expected shares"):
        exl2_mix.read(text)


@pytest.mark.parametrize("rows", [576, 1536, 4096])
def test_candidates_are_legal_and_ascend(rows: int) -> None:
    layouts = [mixed(rows, exl2_mix.read(text)) for text in exl2_mix.CANDIDATES]
    assert not any(refusal(layout) for layout in layouts)
    bits = [stored_bits(layout, rows, False) / rows**2 for layout in layouts]
    assert bits == sorted(set(bits))
    assert bits[0] < 2.3 and bits[-1] > 8
    assert max(after - before for before, after in pairwise(bits) if after < 5) < 0.51


def test_a_head_of_six_bits_takes_what_exllamav2_gives_it() -> None:
    layout = mixed(4096, exl2_mix.read(exl2_mix.HEAD[6]))
    assert stored_bits(layout, 32000, False) / (4096 * 32000) == pytest.approx(6.3448, abs=0.03)
    for text in exl2_mix.HEAD.values():
        assert refusal(mixed(576, exl2_mix.read(text))) is None


@pytest.mark.parametrize("rows", [16, 48, 144, 592, 4112])
def test_sixteen_rows_too_many_are_the_least_important_at_two_bits(rows: int) -> None:
    for text in (*exl2_mix.CANDIDATES, *exl2_mix.HEAD.values()):
        mix = exl2_mix.read(text)
        held = exl2_mix.held(mix, rows)
        layout = mixed(rows, exl2_mix.read(exl2_mix.spell(held)))
        assert layout.rows == rows and refusal(layout) is None
        assert (layout.groups[-1].bits, layout.groups[-1].rows) == (2, 16)
        if mix[-1].bits == 2:
            assert held == mix
        elif rows > 16:
            assert {group.bits for group in layout.groups[:-1]} <= {width.bits for width in mix}
    assert exl2_mix.held(exl2_mix.read("4@64"), 576) == exl2_mix.read("4@64")


def test_shares_written_with_a_few_digits_sum_to_one() -> None:
    for part in range(1, 50):
        mix = tuple(Width(bits, 32, share) for bits, share in ((5, part / 97), (4, part / 131), (3, 1 - part / 97 - part / 131)))
        assert [width.bits for width in exl2_mix.read(exl2_mix.spell(mix))] == [5, 4, 3]
