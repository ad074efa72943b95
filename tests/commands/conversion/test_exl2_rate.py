"""The search for a rate: few trials, the lowest rate that is good enough, a wrong prediction corrected."""

import pytest

from quantkit.commands.conversion.exl2_rate import MOST_TRIALS, RATES, lowest_rate
from quantkit.errors import GateError, PlanError


def damage(scale: float):
    return lambda rate: scale * 4.0**-rate


@pytest.mark.parametrize("wrong_by", [1.0, 3.0, 0.2])
def test_the_lowest_rate_is_found_whatever_the_scale_of_the_prediction(wrong_by: float) -> None:
    tried = []

    def attempt(rate: float) -> float:
        tried.append(rate)
        return wrong_by * damage(100)(rate)

    rate, trials = lowest_rate(damage(100), attempt, 0.01)
    expected = next(rate for rate in RATES if wrong_by * damage(100)(rate) <= 0.01)
    assert rate == expected
    assert [trial.rate for trial in trials] == tried
    assert len(tried) == len(set(tried)) <= MOST_TRIALS


def test_a_prediction_of_the_wrong_shape_still_ends_at_a_rate_that_is_good() -> None:
    rate, trials = lowest_rate(damage(1), lambda rate: 0.3 / rate, 0.05)
    assert next(trial.added for trial in trials if trial.rate == rate) <= 0.05
    assert len(trials) <= MOST_TRIALS


def test_a_bound_that_nothing_meets_is_refused() -> None:
    with pytest.raises(GateError, match=r"no rate that was tried adds at most 0.001 nats"):
        lowest_rate(damage(1), lambda rate: 0.5, 0.001)


def test_rates_out_of_reach_are_not_tried() -> None:
    def predict(rate: float) -> float:
        if rate < 4 or rate > 6:
            raise PlanError("out of reach")
        return damage(100)(rate)

    rate, _ = lowest_rate(predict, damage(100), 1.0)
    assert rate == 4.0
