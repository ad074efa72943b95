"""Legs: the way of a text through a block in parts, each of which ends before linears that read one input.

A block is solved leg after leg: what a leg ends at is seen, the linears there are rounded, and the next leg runs with
them as they are then. So each product is needed once, where what was reached is held.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from quantkit.models.architecture import Stage
from quantkit.models.block import Block
from quantkit.models.fan import Observe
from quantkit.models.feedforward import GatedMLP
from quantkit.models.rope import Rotary

HIDDEN, INNER = 0, 1


class Reached(NamedTuple):
    """Where a text is inside a block.

    hidden  float32 [b, s, hidden]: the states before attention, or between attention and MLP
    inner   [b, s, width], in the dtype of the block: what the output linear of attention or MLP reads; None where no
            such linear is next, and for experts, which read their own
    """

    hidden: Tensor
    inner: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Leg:
    """
    stages  which read what this leg ends at
    made    the place in `Reached` of what is new at its end; None where it has nothing to run
    run     what is reached at its end, from what was reached at its beginning
    show    lets these stages' inputs be seen, from what is reached at its end; the only products are those before an
            expert's last linear
    """

    stages: tuple[Stage, ...]
    made: int | None
    run: Callable[[Block, Rotary, Reached], Reached]
    show: Callable[[Block, Reached, Observe], None]


def legs_of(block: Block) -> tuple[Leg, ...]:
    """Four, in the order they run; behind the last one there is `leave`."""
    attention, mlp = block.fans[:2], block.fans[2:]
    first, last = (tuple(fan.stage for fan in fans) for fans in (mlp[::2], mlp[1::2]))
    return (
        Leg((attention[0].stage,), None, _stay, _show_attention),
        Leg((attention[1].stage,), INNER, _mix, _show_mixed),
        Leg(first, HIDDEN, _attend, _show_mlp),
        Leg(last, INNER, _multiply, _show_multiplied)
        if isinstance(block.mlp, GatedMLP)
        else Leg(last, None, _stay, _show_experts),
    )


def leave(block: Block, reached: Reached) -> Tensor:
    """The states behind the block, float32 `[b, s, hidden]`."""
    if reached.inner is None:
        return block.fed(reached.hidden, block.mlp(block.before_mlp(reached.hidden), None))
    (out,) = _gated(block).output(reached.inner)
    return block.fed(reached.hidden, out)


def _stay(block: Block, rotary: Rotary, reached: Reached) -> Reached:
    return reached


def _mix(block: Block, rotary: Rotary, reached: Reached) -> Reached:
    return Reached(reached.hidden, block.attention.mix(block.before_attention(reached.hidden), rotary))


def _attend(block: Block, rotary: Rotary, reached: Reached) -> Reached:
    assert reached.inner is not None
    return Reached(block.attended(reached.hidden, reached.inner))


def _multiply(block: Block, rotary: Rotary, reached: Reached) -> Reached:
    return Reached(reached.hidden, _gated(block).inner(block.before_mlp(reached.hidden)))


def _show_attention(block: Block, reached: Reached, observe: Observe) -> None:
    block.attention.inputs.show(block.before_attention(reached.hidden), observe)


def _show_mixed(block: Block, reached: Reached, observe: Observe) -> None:
    assert reached.inner is not None
    block.attention.output.show(reached.inner, observe)


def _show_mlp(block: Block, reached: Reached, observe: Observe) -> None:
    block.mlp.show_inputs(block.before_mlp(reached.hidden), observe)


def _show_multiplied(block: Block, reached: Reached, observe: Observe) -> None:
    assert reached.inner is not None
    _gated(block).output.show(reached.inner, observe)


def _show_experts(block: Block, reached: Reached, observe: Observe) -> None:
    block.mlp.show(block.before_mlp(reached.hidden), observe)


def _gated(block: Block) -> GatedMLP:
    assert isinstance(block.mlp, GatedMLP)
    return block.mlp
