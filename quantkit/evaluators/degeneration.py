"""Degenerate text, told from its token ids: loops with their period, stutter, collapsed or flat entropy, wrong ends.

Pure functions over what a model wrote; `evaluators.probe` makes it write. Quantized caches and rounded weights seldom
break a short answer: they break the four-hundredth token of a long one ("two, two, three, three, three, …"), so all
figures here are shares of long answers. Repetition as a symptom: Holtzman et al., arXiv:1904.09751, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_PERIOD = 100
"""The longest loop looked for, in tokens: a sentence or a short paragraph said again and again."""
ROUNDS = 3
"""A passage is a loop when it comes this often in a row; twice happens in songs and lists."""
LEAST_LOOP = 24
"""A loop covers at least this many tokens: "ha ha ha" and "1000000" are none."""
STUTTER_PERIOD = 8
"""The longest passage whose immediate repetition counts as stutter."""
ENTROPY_WINDOW = 32
COLLAPSED = 0.02
"""Nats: a window whose mean entropy is lower was written without any doubt, token after token."""


@dataclass(frozen=True, slots=True)
class Loop:
    """`length` tokens from `start` on that repeat every `period` tokens, the first round included."""

    start: int
    period: int
    length: int

    @property
    def rounds(self) -> float:
        return self.length / self.period


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as a model wrote it.

    ids        token ids without the stop id
    entropies  entropy of the model's distribution before each of them, in nats, before any temperature
    stopped    whether a stop id ended it; else the budget did
    text       what it says
    """

    ids: tuple[int, ...]
    entropies: tuple[float, ...]
    stopped: bool
    text: str


@dataclass(frozen=True, slots=True)
class Symptoms:
    """What was found in the answers to one prompt.

    tokens          tokens looked at
    loops           loops of all answers, the longest first
    loop_rate       share of the tokens that stand in a loop, after its first round
    stutter_rate    share of the tokens that repeat the 1 to `STUTTER_PERIOD` tokens right before, in a loop or not
    distinct_4      different sequences of four tokens by all sequences of four
    entropy         mean entropy, in nats
    collapsed_rate  share of windows of `ENTROPY_WINDOW` tokens whose mean entropy is below `COLLAPSED`
    early_stop      the first answer ended before it can have said what was asked for
    missing_stop    a short answer was asked for and never ended
    """

    tokens: int
    loops: tuple[Loop, ...]
    loop_rate: float
    stutter_rate: float
    distinct_4: float
    entropy: float
    collapsed_rate: float
    early_stop: bool
    missing_stop: bool


def examine(answers: Sequence[Answer], least_tokens: int, must_stop: bool) -> Symptoms:
    """Symptoms of consecutive answers, each looked at on its own.

    least_tokens  an end of the first answer before this many is early
    must_stop     whether the first answer has to end within its budget
    """
    tokens = sum(len(answer.ids) for answer in answers)
    loops = [find_loops(answer.ids) for answer in answers]
    looped = sum(looped_tokens(found) for found in loops)
    stutter = sum(stuttered_tokens(answer.ids) for answer in answers)
    windows = [mean for answer in answers for mean in window_means(answer.entropies)]
    entropies = [entropy for answer in answers for entropy in answer.entropies]
    first = answers[0]
    return Symptoms(
        tokens=tokens,
        loops=tuple(sorted((loop for found in loops for loop in found), key=lambda loop: -loop.length)),
        loop_rate=looped / max(tokens, 1),
        stutter_rate=stutter / max(tokens, 1),
        distinct_4=distinct([answer.ids for answer in answers], 4),
        entropy=float(np.mean(entropies)) if entropies else 0.0,
        collapsed_rate=sum(mean < COLLAPSED for mean in windows) / max(len(windows), 1),
        early_stop=first.stopped and len(first.ids) < least_tokens,
        missing_stop=must_stop and not first.stopped,
    )


def find_loops(ids: Sequence[int]) -> tuple[Loop, ...]:
    """Loops in the order they begin; none lies inside another, and each has its shortest period."""
    row = np.asarray(ids)
    found: list[Loop] = []
    covered = np.zeros(len(row), dtype=bool)
    for period in range(1, min(MAX_PERIOD, len(row) // ROUNDS) + 1):
        least = max(ROUNDS * period, LEAST_LOOP)
        for start, matches in _runs(row[period:] == row[:-period]):
            length = matches + period
            if length < least or covered[start : start + length].mean() > 0.5:  # a multiple of a shorter period
                continue
            covered[start : start + length] = True
            found.append(Loop(start, period, length))
    return tuple(sorted(found, key=lambda loop: loop.start))


def looped_tokens(loops: Sequence[Loop]) -> int:
    """Tokens that stand in some loop after its first round, each counted once."""
    return len({at for loop in loops for at in range(loop.start + loop.period, loop.start + loop.length)})


def stuttered_tokens(ids: Sequence[int]) -> int:
    """Tokens of passages that say the 1 to `STUTTER_PERIOD` tokens before them again, each token counted once."""
    row = np.asarray(ids)
    stuttered = np.zeros(len(row), dtype=bool)
    for period in range(1, min(STUTTER_PERIOD, len(row) // 2) + 1):
        for start, matches in _runs(row[period:] == row[:-period]):
            if matches >= period:
                stuttered[start + period : start + period + matches] = True
    return int(stuttered.sum())


def distinct(answers: Sequence[Sequence[int]], order: int) -> float:
    """Different n-grams by all n-grams of the answers (distinct-n, arXiv:1510.03055); 1 where there is none."""
    grams = [tuple(ids[at : at + order]) for ids in answers for at in range(len(ids) - order + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def window_means(values: Sequence[float]) -> list[float]:
    """Means of windows of `ENTROPY_WINDOW` values that do not overlap; the rest is dropped."""
    whole = len(values) // ENTROPY_WINDOW * ENTROPY_WINDOW
    return np.asarray(values[:whole], dtype=np.float64).reshape(-1, ENTROPY_WINDOW).mean(axis=1).tolist()


def divergence_point(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first place where two answers differ, be it that one has ended; None where they are the same."""
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return None if len(left) == len(right) else min(len(left), len(right))


def _runs(equal: np.ndarray) -> list[tuple[int, int]]:
    """Start and length of each run of True in a bool array `[n]`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    return [(int(start), int(end - start)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
