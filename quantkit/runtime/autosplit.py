"""Autosplit: which device gets which layers of a model that runs in one process, by the free memory of each.

    spread([300, 300, 300, 300], free=[1000, 400])          # (0, 0, 0, 1)

Layers stay in order and run one after another, so that more devices make nothing faster: as few as can hold the model
get some of it, and none of them is filled more than it must be. This is the plan alone; a model runs on one device, or
shared by several processes (`runtime.parallel`).
"""

from collections.abc import Sequence
from itertools import accumulate

from quantkit.errors import PlanError

Choice = tuple[int, float, int]
"""Devices used, the fullest one's share of its free memory, and how many layers come before the last device's."""


def spread(layers: Sequence[int], free: Sequence[int], first: int = 0, last: int = 0) -> tuple[int, ...]:
    """The device of each layer, by its place in `free`; devices that get none are left out.

    layers       bytes of each, its part of the cache included
    free         bytes that each device has for them, room for activations already taken off
    first, last  bytes that go along with the first and the last layer: embedding and head

    Raises PlanError where no spread fits.
    """
    sizes = [*layers]
    sizes[0] += first
    sizes[-1] += last
    sums = [0, *accumulate(sizes)]
    choices: list[list[Choice | None]] = [[(0, 0.0, 0)] + [None] * len(sizes)]
    for room in free:
        choices.append([_best(choices[-1], sums, room, end) for end in range(len(sums))])
    if choices[-1][-1] is None:
        told = ", ".join(f"{room:,}" for room in free)
        raise PlanError(
            f"layers of {sums[-1]:,} bytes, the largest of {max(sizes):,}, do not fit into free memory of {told} bytes",
            hint="use a model of fewer bits, a shorter context, or `--kv q4_0`",
        )
    placed: list[int] = []
    for device in range(len(free), 0, -1):
        choice = choices[device][len(sizes) - len(placed)]
        assert choice is not None
        placed += [device - 1] * (len(sizes) - len(placed) - choice[2])
    return tuple(reversed(placed))


def _best(before: Sequence[Choice | None], sums: Sequence[int], room: int, end: int) -> Choice | None:
    """How to place the first `end` layers when one more device of this much room may have the last of them."""
    found: list[Choice] = []
    for start in range(end + 1):
        earlier, size = before[start], sums[end] - sums[start]
        if earlier is not None and start == end:
            found.append((earlier[0], earlier[1], end))
        elif earlier is not None and size <= room:
            found.append((earlier[0] + 1, max(earlier[1], size / room if room else 0.0), start))
    return min(found, default=None)
