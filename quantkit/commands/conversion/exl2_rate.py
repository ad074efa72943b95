"""Which rate an EXL2 conversion gets: the one asked for, or the lowest whose added KL stays under a bound, by trial.

Predicted damage ranks rates well and errs in scale. So the rate whose prediction meets the bound is tried, what it
really adds corrects the scale, and so on, until the next rate would be one that was tried before. Where that is not
so after two trials, the prediction has another shape than the truth, and the rates between are halved instead.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quantkit.errors import GateError, PlanError

STEP = 0.25
RATES = tuple(2.25 + STEP * number for number in range(24))
"""2.25, 2.5, … 8 bits per weight."""
MOST_TRIALS = 5
BOUND = 0.01
"""Added KL in nats per token, where neither a rate nor a bound is given."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A rate and the KL, above that of the input, that was found for it."""

    rate: float
    added: float


def lowest_rate(
    predict: Callable[[float], float], attempt: Callable[[float], float], bound: float
) -> tuple[float, tuple[Trial, ...]]:
    """The lowest rate found whose `attempt` adds no more than `bound`, and all trials.

    predict  rate → predicted damage; raises PlanError for a rate out of reach
    attempt  rate → added KL, found by making the model

    Raises GateError when the widest rate in reach adds more.
    """
    predicted: dict[float, float] = {}
    for rate in RATES:
        try:
            predicted[rate] = predict(rate)
        except PlanError:
            continue
    if not predicted:
        predict(4.0)  # says why
        raise PlanError("no rate is within reach", hint="name one with `--bpw`")
    trials: dict[float, float] = {}
    scale = 1.0
    while len(trials) < MOST_TRIALS:
        rate = next((rate for rate in predicted if scale * predicted[rate] <= bound), max(predicted))
        good = [tried for tried, added in trials.items() if added <= bound]
        bad = [tried for tried, added in trials.items() if added > bound]
        # Between a rate that was too low and one that was good enough, whatever the prediction says.
        if bad and rate <= max(bad):
            rate = next((other for other in predicted if other > max(bad)), max(predicted))
        if rate in trials or (good and rate > min(good)):
            break
        if len(trials) > 1:
            rate = _middle([other for other in predicted if max(bad, default=0) < other < min(good, default=9)], rate)
        if not good and len(trials) == MOST_TRIALS - 1:
            rate = max(predicted)
        trials[rate] = attempt(rate)
        if predicted[rate] > 0 and trials[rate] > 0:
            scale = trials[rate] / predicted[rate]
    found = tuple(Trial(rate, added) for rate, added in trials.items())
    good = [trial.rate for trial in found if trial.added <= bound]
    if not good:
        best = min(found, key=lambda trial: trial.added)
        raise GateError(
            f"no rate that was tried adds at most {bound:g} nats: {best.rate:g} bits add {best.added:.4g}",
            hint=f"use `--match {best.added * 1.05:.2g}`, or name a rate with `--bpw`",
        )
    return min(good), found


def _middle(rates: list[float], otherwise: float) -> float:
    return rates[len(rates) // 2] if rates else otherwise
