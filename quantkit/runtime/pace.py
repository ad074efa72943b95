"""Pace: how many tokens a pass may have, so that it takes no longer than wanted."""

SHRINK, GROW = 0.7, 1.1


class Pace:
    """`budget` tokens, at most those given; without a `target` in seconds it never changes.

    After a pass that took too long the budget is what the target would have had room for, at worst `SHRINK` of it;
    after one that used all of it in time it grows by `GROW`.
    """

    def __init__(self, most: int, target: float | None = None) -> None:
        self.budget = most
        self._most = most
        self._target = target

    def note(self, tokens: int, seconds: float) -> None:
        """A pass had so many tokens and took so long."""
        if self._target is None or not tokens:
            return
        if seconds > self._target:
            fitting = int(tokens * self._target / seconds)
            self.budget = max(1, min(self.budget, max(fitting, int(self.budget * SHRINK))))
        elif tokens >= self.budget:
            self.budget = min(self._most, max(self.budget + 1, int(self.budget * GROW)))
