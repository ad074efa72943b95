"""The calibration text on its way through one block while its linears are solved, leg after leg (`models.legs`).

What a linear is solved for is what the linears before it give as they are rounded, so that it may make up for their
errors. `Passage` computes what a leg ends at from the states before the block, whenever it is looked at. `HeldPassage`
does every product once, and holds what was reached on the disk: the same results, where a product costs more than
reading what it gave.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path

from torch import Tensor

from quantkit.calibration.stream import ActivationStream
from quantkit.models.block import Block
from quantkit.models.fan import Activations
from quantkit.models.legs import HIDDEN, Leg, Reached, leave, legs_of
from quantkit.models.rope import Rotary

See = Callable[[Block, Callable[[int, Activations], None]], None]
"""One look at a whole text in a block: calls with what linears read, and where the first token of its batch is."""


def whole_block(stream: ActivationStream, rotary: Rotary) -> See:
    """The inputs of all linears of a block that stays as it is."""

    def see(block: Block, observe: Callable[[int, Activations], None]) -> None:
        start = 0
        for hidden in stream.batches():
            block.show(hidden, rotary, partial(observe, start))
            start += hidden.shape[0] * hidden.shape[1]

    return see


class Passage:
    """A text before a block, `stream`, and the legs it has gone."""

    def __init__(self, stream: ActivationStream, rotary: Rotary) -> None:
        self.tokens = stream.tokens
        self._hidden, self._rotary = stream, rotary
        self._gone: list[Leg] = []

    def go(self, block: Block, leg: Leg) -> None:
        """The next leg, with the linears of `block` as they are from now on."""
        self._gone.append(leg)

    def see(self, block: Block, observe: Callable[[int, Activations], None]) -> None:
        """What the stages at the end of the last leg read; a `See`."""
        start = 0
        for reached in self._reached(block):
            self._gone[-1].show(block, reached, partial(observe, start))
            start += reached.hidden.shape[0] * reached.hidden.shape[1]

    def _reached(self, block: Block) -> Iterator[Reached]:
        for hidden in self._hidden.batches():
            reached, rotary = Reached(hidden.to(block.device)), self._rotary.to(block.device)
            for leg in self._gone:
                reached = leg.run(block, rotary, reached)
            yield reached


class HeldPassage(Passage):
    """The same, each leg run once, by a block on the CPU. `folder` gives an empty one for a part of what is held, which
    is in memory without."""

    def __init__(
        self, stream: ActivationStream, rotary: Rotary, folder: Callable[[str], Path] | None = None
    ) -> None:
        super().__init__(stream, rotary)
        self._inner: ActivationStream | None = None
        self._folder = folder

    def go(self, block: Block, leg: Leg) -> None:
        super().go(block, leg)
        if leg.made is None:
            return
        folder = None if self._folder is None else self._folder(f"leg {len(self._gone)}")
        stream = self._hidden.aside(self._run(block, leg, leg.made), folder=folder)
        if leg.made == HIDDEN:
            self._hidden, self._inner = stream, None
        else:
            self._inner = stream

    def leave(self, block: Block, name: str, folder: Path | None = None) -> ActivationStream:
        """The states behind the block, whose linears are all solved. Raises CalibrationError for NaN or infinity."""
        inner, left = self._read_inner(), legs_of(block)[len(self._gone) :]

        def run(hidden: Tensor) -> Tensor:
            reached = Reached(hidden, next(inner))
            for leg in left:
                reached = leg.run(block, self._rotary, reached)
            return leave(block, reached)

        return self._hidden.follow(run, name, folder=folder)

    def _run(self, block: Block, leg: Leg, place: int) -> Iterator[Tensor]:
        """What is new at the end of a leg, batch after batch."""
        for reached in self._reached(block):
            made = leg.run(block, self._rotary, reached)[place]
            assert made is not None
            yield made

    def _reached(self, block: Block) -> Iterator[Reached]:
        return map(Reached, self._hidden.batches(), self._read_inner())

    def _read_inner(self) -> Iterator[Tensor | None]:
        return repeat(None) if self._inner is None else self._inner.batches()
