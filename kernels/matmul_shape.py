"""How the launch of a matmul kernel is cut into blocks."""

from dataclasses import dataclass

from quantkit.kernels.tiles import STRIP


@dataclass(frozen=True, slots=True)
class Shape:
    """How a matmul is cut: `tokens` rows and 64·strips columns for each block, `range` runs for each split."""

    tokens: int
    grid: tuple[int, int, int]
    range: int

    @property
    def splits(self) -> int:
        return self.grid[2]

    @property
    def partial(self) -> tuple[int, ...]:
        """Of the splits' partial sums: tiles of y, splits, tokens, columns."""
        return self.grid[0] * self.grid[1], self.splits, self.tokens, _columns_of_block(self.tokens)

    @staticmethod
    def of(rows: int, out: int, runs: int, processors: int) -> "Shape":
        """As many splits as it takes to fill the processors, each of whole runs for all warps along k."""
        tokens = next((few for few in (8, 16) if rows <= few), 32)
        across, down = -(-rows // tokens), -(-out // _columns_of_block(tokens))
        resident = processors * (2 if tokens == 8 else 1)
        least = 4 if tokens == 8 else 2  # a run for each warp along k
        splits = min(max(1, resident // max(1, across * down)), -(-runs // least))
        each = -(-runs // splits)
        each += -each % least
        return Shape(tokens, (across, down, -(-runs // each)), each)


def _columns_of_block(tokens: int) -> int:
    """As `Shape` in `matmul.cuh`."""
    return STRIP * (2 if tokens == 8 else 4)
