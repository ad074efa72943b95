"""The bit allocator: one option for each linear, the least damage that a budget of bits can buy.

This is the multiple-choice knapsack. Its Lagrangian relaxation gives a bound below which no choice can come, and rules
out every option that cannot be part of a better choice than the one in hand (Kellerer, Pferschy, Pisinger, Knapsack
Problems, 2004, chapter 11). What is left is solved by dynamic programming over the budget. Nothing is random.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from quantkit.errors import PlanError

MOST_CELLS = 200_000
"""Steps in which the budget is counted. Options are rounded up to them, so that the budget is never exceeded."""
MOST_CHOICES = 200_000_000
BISECTIONS = 100


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store a linear: all its bits on disk, and the damage it does, which adds up over linears."""

    bits: int
    damage: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """`chosen[i]` is the place of linear i's option in its list. No choice within the budget has less damage than
    `bound`."""

    chosen: tuple[int, ...]
    bits: int
    damage: float
    bound: float


def allocate(options: Sequence[Sequence[Option]], budget_bits: int, weights: int) -> Allocation:
    """The choice of least damage whose bits are not above the budget.

    weights  of all linears together: what messages divide bits by

    Raises PlanError when even the smallest options are above the budget, or when all largest ones together leave more
    than 0.5 % of it.
    """
    require_feasible(options, budget_bits, weights)
    kept = [_undominated(listed) for listed in options]
    price, bound = _best_price(kept, budget_bits)
    chosen = _greedy(kept, price, budget_bits)
    gap = _damage(kept, chosen) - bound
    reduced = [_within(own, price, gap) for own in kept]
    found = _fill(kept, _solve_exactly(kept, reduced, budget_bits), budget_bits)
    if _damage(kept, found) < _damage(kept, chosen):
        chosen = found
    picked = [own[place] for own, place in zip(kept, chosen, strict=True)]
    return Allocation(
        tuple(number for number, _ in picked),
        sum(option.bits for _, option in picked),
        sum(option.damage for _, option in picked),
        bound,
    )


_Kept = list[tuple[int, Option]]


def _undominated(options: Sequence[Option]) -> _Kept:
    """Options with their places, by ascending bits and strictly descending damage."""
    kept: _Kept = []
    for number, option in sorted(enumerate(options), key=lambda item: (item[1].bits, item[1].damage, item[0])):
        if not kept or option.damage < kept[-1][1].damage:
            kept.append((number, option))
    return kept


def require_feasible(options: Sequence[Sequence[Option]], budget_bits: int, weights: int) -> None:
    """Raises as `allocate` does; damages do not matter."""
    least = sum(min(option.bits for option in listed) for listed in options)
    most = sum(max(option.bits for option in listed) for listed in options)
    asked = budget_bits / weights
    if budget_bits < least:
        nearest = -(-least * 1000 // weights) / 1000
        raise PlanError(
            f"{asked:.4g} bits per weight are out of reach: the smallest layouts take {least / weights:.4f}",
            hint=f"use `--bpw {nearest:g}` or more",
        )
    if most < 0.995 * budget_bits:
        nearest = most * 1000 // weights / 1000
        raise PlanError(
            f"{asked:.4g} bits per weight are out of reach: the largest layouts take {most / weights:.4f}",
            hint=f"use `--bpw {nearest:g}` or less",
        )


def _best_price(kept: Sequence[_Kept], budget_bits: int) -> tuple[float, float]:
    """The price of a bit that gives the greatest Lagrangian bound, and that bound.

    At a price every linear takes its cheapest option; the sum of costs less price · budget is a lower bound.
    """

    def priced(price: float) -> tuple[int, float]:
        cheapest = [min((option.damage + price * option.bits, option.bits) for _, option in own) for own in kept]
        return sum(bits for _, bits in cheapest), sum(cost for cost, _ in cheapest) - price * budget_bits

    low, high = 0.0, 1e-12
    while priced(high)[0] > budget_bits and high < 1e300:
        high *= 8
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if priced(middle)[0] > budget_bits else (low, middle)
    return high, max(priced(low)[1], priced(high)[1])


def _greedy(kept: Sequence[_Kept], price: float, budget_bits: int) -> list[int]:
    """The cheapest option of each linear at this price, within the budget, and the rest of the budget used up."""
    chosen = [
        min(range(len(own)), key=lambda place: (own[place][1].damage + price * own[place][1].bits, own[place][1].bits))
        for own in kept
    ]
    if sum(own[place][1].bits for own, place in zip(kept, chosen, strict=True)) > budget_bits:
        chosen = [0] * len(kept)
    return _fill(kept, chosen, budget_bits)


def _fill(kept: Sequence[_Kept], chosen: Sequence[int], budget_bits: int) -> list[int]:
    """Steps up while any fits, always the one that saves most damage for its bits."""
    chosen = list(chosen)
    left = budget_bits - sum(own[place][1].bits for own, place in zip(kept, chosen, strict=True))
    while True:
        best: tuple[float, int, int] | None = None
        for linear, own in enumerate(kept):
            now = own[chosen[linear]][1]
            for place in range(chosen[linear] + 1, len(own)):
                more = own[place][1].bits - now.bits
                if more > left:
                    break
                gain = (now.damage - own[place][1].damage) / more
                if best is None or gain > best[0]:
                    best = gain, linear, place
        if best is None:
            return chosen
        _, linear, place = best
        left -= kept[linear][place][1].bits - kept[linear][chosen[linear]][1].bits
        chosen[linear] = place


def _within(own: _Kept, price: float, gap: float) -> list[int]:
    """The places that can be part of a better choice: their cost is above the cheapest by no more than the gap."""
    costs = [option.damage + price * option.bits for _, option in own]
    slack = gap + 1e-9 * (abs(gap) + min(costs))
    return [place for place, cost in enumerate(costs) if cost - min(costs) <= slack]


def _solve_exactly(kept: Sequence[_Kept], reduced: Sequence[list[int]], budget_bits: int) -> list[int]:
    """Dynamic programming over the budget left by the smallest option of each linear. Exact where the steps of the
    options have a common divisor that is coarse enough; else each step up is rounded up to a cell."""
    chosen = [places[0] for places in reduced]
    left = budget_bits - sum(own[place][1].bits for own, place in zip(kept, chosen, strict=True))
    if left < 0:  # no better choice exists among these options
        return [0] * len(kept)
    open_linears = [linear for linear, places in enumerate(reduced) if len(places) > 1]
    steps = {
        linear: [kept[linear][place][1].bits - kept[linear][chosen[linear]][1].bits for place in reduced[linear]]
        for linear in open_linears
    }
    divisor = gcd(*(step for listed in steps.values() for step in listed)) or 1
    reach = min(left, sum(listed[-1] for listed in steps.values()))
    cells = max(1, min(MOST_CELLS, MOST_CHOICES // max(1, len(open_linears))))
    unit = divisor * max(1, -(-reach // (divisor * cells)))
    size = reach // unit
    best = np.zeros(size + 1)
    choices = np.zeros((len(open_linears), size + 1), dtype=np.uint8)
    for row, linear in enumerate(open_linears):
        after = np.full(size + 1, np.inf)
        for number, (place, step) in enumerate(zip(reduced[linear], steps[linear], strict=True)):
            shift = -(-step // unit)
            if shift > size:
                break
            damage = best[: size + 1 - shift] + kept[linear][place][1].damage
            better = damage < after[shift:]
            after[shift:][better] = damage[better]
            choices[row, shift:][better] = number
        best = after
    cell = size
    for row in range(len(open_linears) - 1, -1, -1):
        linear = open_linears[row]
        number = int(choices[row, cell])
        chosen[linear] = reduced[linear][number]
        cell -= -(-steps[linear][number] // unit)
    return chosen


def _damage(kept: Sequence[_Kept], chosen: Sequence[int]) -> float:
    return sum(own[place][1].damage for own, place in zip(kept, chosen, strict=True))
