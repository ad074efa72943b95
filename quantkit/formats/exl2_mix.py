"""Mixes of widths as text, which ones are worth measuring, and the usual ones of a head.

`8@128:15% 6@128:85%` gives the most important 15 % of the rows 8 bits, the rest 6, both in groups of 128 rows.
`4@64` is one width for all rows.
"""

import math
import re
from collections.abc import Mapping, Sequence

from quantkit.errors import FormatError
from quantkit.formats import exl2_layout
from quantkit.formats.codec import Layout
from quantkit.formats.exl2_layout import SHORT_STEP, STEP, Width

_PART = re.compile(r"(\d+)@(-?\d+)(?::(\d+(?:\.\d+)?)%)?")

CANDIDATES = (
    "3@64:10% 2@64:90%",
    "3@64:30% 2@64:70%",
    "3@64:60% 2@64:40%",
    "4@64:5% 3@64:95%",
    "4@64:25% 3@64:75%",
    "4@64:55% 3@64:45%",
    "5@64:5% 4@64:95%",
    "5@64:25% 4@64:75%",
    "5@64:55% 4@64:45%",
    "6@64:10% 5@64:90%",
    "6@64:50% 5@64:50%",
    "8@128:10% 6@128:90%",
    "8@128",
)
"""From 2.1 to 8.1 bits, in steps of about a third of a bit where models live."""

HEAD: Mapping[int, str] = {
    2: "4@32:30% 2@32:70%",
    3: "4@32:15% 3@32:85%",
    4: "6@32:15% 4@32:85%",
    5: "6@128:15% 5@128:85%",
    6: "8@128:15% 6@128:85%",
    8: "8@128",
}
"""Head bits → the mix that ExLlamaV2 gives a head of so many bits."""


def aligned(mixes: Sequence[str], in_features: int, rows: int) -> tuple[str, ...]:
    """The same mixes for a weight whose groups of `rows` rows, a divisor of `in_features`, are to stay together.

    Borders between widths go to the nearest border of those groups, and no group of a mix is cut by one; mixes that
    become the same are named once. Where `rows` is no multiple of 32 the mixes stay as they are.
    """
    if rows % exl2_layout.STEP:
        return tuple(mixes)
    count = in_features // rows
    kept: dict[str, None] = {}
    for mix in mixes:
        before, reached, widths = 0, 0.0, []
        for width in read(mix):
            reached += width.share
            border = round(reached * count)
            if border > before:
                size = rows if width.group_size == -1 else math.gcd(width.group_size, rows)
                widths.append(Width(width.bits, size, (border - before) / count))
            before = border
        kept[spell(widths)] = None
    return tuple(kept)


def read(text: str) -> tuple[Width, ...]:
    """Raises FormatError for text that is no mix, and for a mix that EXL2 does not hold."""
    widths = []
    for part in text.split():
        found = _PART.fullmatch(part)
        if found is None or (found[3] is None and len(text.split()) > 1):
            raise FormatError(f"`{text}` is no mix of widths", hint="write one as `5@64:25% 4@64:75%`, or as `4@128`")
        widths.append(Width(int(found[1]), int(found[2]), float(found[3] or 100) / 100))
    if not widths:
        raise FormatError("an empty mix of widths holds nothing", hint="write one as `5@64:25% 4@64:75%`")
    exl2_layout.check(widths)
    return tuple(widths)


def held(widths: Sequence[Width], in_features: int) -> tuple[Width, ...]:
    """The mix with its least important 16 rows at 2 bits where so many input features can be held in no other way."""
    if in_features % STEP != SHORT_STEP or widths[-1].bits == 2:
        return tuple(widths)
    if in_features == SHORT_STEP:
        return (Width(2, STEP),)
    tail = SHORT_STEP / in_features
    shrunk = (Width(width.bits, width.group_size, width.share * (1 - tail)) for width in widths)
    return (*shrunk, Width(2, STEP, tail))


def head_layout(bits: int, in_features: int) -> Layout | None:
    """The layout of a head of so many bits, one of `HEAD`; None where EXL2 cannot hold so many input features."""
    if exl2_layout.shape_refusal(in_features, 2) is not None:
        return None
    return exl2_layout.mixed(in_features, held(read(HEAD[bits]), in_features))


def spell(widths: Sequence[Width]) -> str:
    """The text that `read` understands."""
    if len(widths) == 1:
        return f"{widths[0].bits}@{widths[0].group_size}"
    return " ".join(f"{width.bits}@{width.group_size}:{width.share * 100:.6g}%" for width in widths)
