"""Which layouts EXL2 can hold, how a mix of widths becomes one, and what a layout takes on disk.

Stored rows go from the most to the least important, so widths descend. The kernels that read the format go in steps of
32 rows: groups, and with them the borders between widths, are multiples of 32. The one exception is a last group of 16
rows at 2 bits, a section that is read 16 rows at a time; at other widths such a group would be read past its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.errors import FormatError
from quantkit.formats.codec import Group, Layout
from quantkit.kernels.protocol import WIDTHS

STEP, SHORT_STEP = 32, 16
# Readers keep the permutation in 16 bits.
MOST_IN_FEATURES = 65536
# Shares that were written with a few digits need not sum to 1 in binary.
SHARES_TO_ONE = 1e-5


@dataclass(frozen=True, slots=True)
class Width:
    """A share of the rows (above 0, up to 1) at one width. `group_size` is a multiple of 32; -1 is one group."""

    bits: int
    group_size: int
    share: float = 1.0


def mixed(in_features: int, widths: Sequence[Width]) -> Layout:
    """The legal layout nearest to the shares. Borders are the nearest multiples of 32 rows, so that a share of less
    than 16 rows may vanish, and the last group of each width may be short.

    Raises FormatError for a mix that makes no sense (`check`) and for rows that it cannot hold (`shape_refusal`).
    """
    check(widths)
    reason = shape_refusal(in_features, widths[-1].bits)
    if reason is not None:
        raise FormatError(reason)
    whole = in_features - in_features % STEP
    groups: list[Group] = []
    start, reached = 0, 0.0
    for number, width in enumerate(widths):
        reached += width.share
        border = int(reached * in_features / STEP + 0.5) * STEP
        end = whole if number == len(widths) - 1 else min(whole, border)
        size = width.group_size if width.group_size != -1 else max(STEP, end - start)
        groups += [Group(width.bits, min(size, end - first)) for first in range(start, end, size)]
        start = end
    if in_features % STEP:
        groups.append(Group(widths[-1].bits, in_features % STEP))
    return Layout(tuple(groups))


def check(widths: Sequence[Width]) -> None:
    """Raises FormatError unless widths descend, group sizes are multiples of 32 and shares sum to 1."""
    for width in widths:
        if width.bits not in WIDTHS:
            raise FormatError(f"EXL2 holds 2, 3, 4, 5, 6 or 8 bits, not {width.bits}")
        if width.group_size != -1 and (width.group_size < STEP or width.group_size % STEP):
            message = f"EXL2 holds groups of a multiple of {STEP} rows, not of {width.group_size}"
            raise FormatError(message, hint="use group size 128")
        if not 0 < width.share <= 1:
            raise FormatError(f"expected a share of the rows above 0 and up to 1, found {width.share:g}")
    bits = [width.bits for width in widths]
    if bits != sorted(bits, reverse=True):
        raise FormatError(f"EXL2 stores widths in descending order, found {', '.join(map(str, bits))} bits")
    total = sum(width.share for width in widths)
    if abs(total - 1) > SHARES_TO_ONE:
        raise FormatError(f"expected shares of the rows that sum to 1, found a sum of {total:g}")


def refusal(layout: Layout) -> str | None:
    """Why EXL2 cannot hold this layout, in words for people; None when it can."""
    if not layout.groups:
        return "a layout without groups holds nothing"
    widest = max(WIDTHS)
    for number, group in enumerate(layout.groups):
        if group.bits not in WIDTHS:
            return f"EXL2 holds 2, 3, 4, 5, 6 or 8 bits, but group {number} has {group.bits}"
        if group.bits > widest:
            return f"EXL2 stores widths in descending order, but group {number} has {group.bits} bits after {widest}"
        widest = group.bits
    reason = shape_refusal(layout.rows, widest)
    if reason is not None:
        return reason
    whole = layout.groups if layout.rows % STEP == 0 else layout.groups[:-1]
    for number, group in enumerate(whole):
        if group.rows <= 0 or group.rows % STEP:
            return f"EXL2 holds groups of a multiple of {STEP} rows, but group {number} has {group.rows}"
    last = layout.groups[-1].rows
    if len(whole) < len(layout.groups) and last != SHORT_STEP:
        return f"the last {SHORT_STEP} of {layout.rows} rows must be their own group, but the last group has {last}"
    return None


def shape_refusal(in_features: int, last_bits: int) -> str | None:
    """Why no layout that ends at this width holds so many input features; None when one does."""
    if not 0 < in_features <= MOST_IN_FEATURES:
        return f"{in_features} input features are not between 1 and the {MOST_IN_FEATURES} that EXL2 can order"
    if in_features % STEP == 0 or (in_features % STEP == SHORT_STEP and last_bits == 2):
        return None
    reason = f"{in_features} input features are not a multiple of {STEP}, as EXL2's readers need"
    if in_features % STEP == SHORT_STEP:
        return f"{reason} unless the last {SHORT_STEP} rows have 2 bits, not {last_bits}"
    return reason


def stored_bits(layout: Layout, out_features: int, bias: bool) -> int:
    """All bits on disk of a weight of this layout, outputs padded to a multiple of 32, all side data included.

    Codes; for each group 16 bits of q_scale_max, 32 of q_groups and a scale code of 4 for each column; 32 of q_invperm
    for each input; a float16 bias.
    """
    columns = padded(out_features)
    groups = len(layout.groups) * (16 + 32 + 4 * columns)
    return layout.code_bits(columns) + groups + 32 * layout.rows + 16 * columns * bias


def stored_bits_in_parts(layout: Layout, widths: Sequence[int], bias: bool) -> int:
    """The same of a fused weight, which is on disk in parts of so many outputs, each with side data of its own."""
    return sum(stored_bits(layout, width, bias) for width in widths)


def padded(out_features: int) -> int:
    """Columns on disk."""
    return out_features + -out_features % STEP
