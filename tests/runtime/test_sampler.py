import math

import pytest
import torch

from quantkit.errors import GateError, UsageError
from quantkit.runtime import sampler
from quantkit.runtime.sampler import Sampling, choose

NOTHING = torch.zeros(0, dtype=torch.int64)
LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def kept(logits):
    return torch.isfinite(logits).nonzero().flatten().tolist()


def test_greedy_takes_the_largest_and_the_lower_of_equals():
    assert choose(LOGITS, NOTHING, Sampling(), seeded()) == 1


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6, 1e-4])
def test_tiny_temperature_is_greedy(temperature):
    near = torch.tensor([2.0, 2.0 + 1e-6, 2.0])
    assert choose(near, NOTHING, Sampling(temperature=temperature), seeded()) == 1


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-3},
        {"temperature": 1e30},
        {"top_p": 0.0},
        {"top_p": 1e-300},
        {"top_k": -1},
        {"top_k": 1000},
        {"min_p": 1.0},
        {"min_p": 1e-300},
        {"repetition_penalty": 100.0},
        {"repetition_penalty": 0.01},
        {"typical_p": 0.0},
        {"typical_p": 1e-300},
        {"frequency_penalty": 100.0, "presence_penalty": -100.0},
        {"temperature": 1e-3, "top_p": 0.0, "top_k": 1, "min_p": 1.0, "repetition_penalty": 100.0},
    ],
)
def test_no_setting_leaves_nothing_to_choose_from(settings, scale):
    settings = {"temperature": 1.0, **settings}
    for seed in range(20):
        assert 0 <= choose(LOGITS * scale, torch.tensor([1, 4, 1]), Sampling(**settings), seeded(seed)) < 5


def test_narrowest_settings_choose_the_likeliest():
    for settings in ({"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}):
        logits = torch.tensor([0.0, 1.0, 1.5, 0.2])
        assert {choose(logits, NOTHING, Sampling(temperature=5.0, **settings), seeded(s)) for s in range(30)} == {2}


def test_top_k_keeps_the_lower_of_equals():
    assert kept(sampler.keep_top_k(LOGITS, 1)) == [1]
    assert kept(sampler.keep_top_k(LOGITS, 3)) == [1, 2, 3]
    assert kept(sampler.keep_top_k(LOGITS, 0)) == kept(sampler.keep_top_k(LOGITS, 99)) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_token_that_crosses():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert kept(sampler.keep_top_p(logits, 0.5)) == [1]
    assert kept(sampler.keep_top_p(logits, 0.51)) == [1, 3]
    assert kept(sampler.keep_top_p(logits, 0.8)) == [1, 2, 3]
    assert kept(sampler.keep_top_p(logits, 1.0)) == [0, 1, 2, 3]


def test_min_p_is_relative_to_the_likeliest():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert kept(sampler.keep_min_p(logits, 0.4)) == [1, 3]
    assert kept(sampler.keep_min_p(logits, 0.6)) == [1]


def test_penalty_moves_seen_tokens_once_and_always_down():
    penalized = sampler.penalize(LOGITS, torch.tensor([1, 4, 1, 1]), 2.0)
    assert penalized.tolist() == [1.0, 1.5, 2.0, 3.0, -2.0]
    assert choose(LOGITS, torch.tensor([1]), Sampling(repetition_penalty=2.0), seeded()) == 3


def test_typical_leaves_out_what_surprises_too_little_as_well():
    """Entropy 1.17 nats; the likeliest token surprises by 0.51, the second by 1.61, the two others by 2.3."""
    logits = torch.tensor([0.6, 0.2, 0.1, 0.1]).log()
    assert kept(sampler.keep_typical(logits, 0.1)) == [1]
    assert kept(sampler.keep_typical(logits, 0.3)) == [0, 1]
    assert kept(sampler.keep_typical(logits, 0.85)) == [0, 1, 2]
    assert kept(sampler.keep_typical(logits, 1.0)) == [0, 1, 2, 3]


def test_answer_penalties_count_the_answer_alone():
    seen = torch.tensor([3, 3, 1, 1, 4])
    assert sampler.discourage(LOGITS, seen, 0.5, 0.25).tolist() == [1.0, 1.75, 2.0, 1.75, -1.75]
    assert choose(LOGITS, seen, Sampling(frequency_penalty=0.6), seeded()) == 2
    assert choose(LOGITS, seen, Sampling(frequency_penalty=0.6), seeded(), prompt=2) == 3
    assert choose(LOGITS, seen, Sampling(presence_penalty=1.5), seeded(), prompt=5) == 1
    assert choose(LOGITS, seen, Sampling(presence_penalty=-1.5), seeded(), prompt=5) == 1


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_what_is_ruled_out_never_comes(temperature):
    sampling = Sampling(temperature=temperature, repetition_penalty=2.0, frequency_penalty=-3.0)
    drawn = {choose(LOGITS, torch.tensor([1, 3, 1]), sampling, seeded(s), 1, {1, 3}) for s in range(50)}
    assert drawn and not drawn & {1, 3}
    assert float(sampler.distribution(LOGITS, NOTHING, sampling, ruled_out={1, 3})[[1, 3]].sum()) == 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9}],
)
def test_distribution_is_that_of_the_draws(settings):
    sampling, random, seen = Sampling(presence_penalty=0.5, **settings), seeded(1), torch.tensor([1, 2])
    expected = sampler.distribution(LOGITS, seen, sampling)
    assert float(expected.sum()) == pytest.approx(1)
    counts = torch.zeros(5)
    for _ in range(5000):
        counts[choose(LOGITS, seen, sampling, random)] += 1
    assert bool((counts[expected == 0] == 0).all())
    possible = expected > 0
    assert float(((counts - 5000 * expected) ** 2 / (5000 * expected))[possible].sum()) < 18.5


def test_draws_follow_the_probabilities():
    """Chi-square over 20,000 draws with 3 degrees of freedom: 16.3 is passed once in a thousand."""
    expected = torch.tensor([0.1, 0.2, 0.3, 0.4])
    random, draws = seeded(5), 20_000
    counts = torch.zeros(4)
    for _ in range(draws):
        counts[choose(expected.sqrt().log(), NOTHING, Sampling(temperature=0.5), random)] += 1
    assert float(((counts - draws * expected) ** 2 / (draws * expected)).sum()) < 16.3


def test_same_seed_same_tokens():
    def run(seed):
        random = seeded(seed)
        return [choose(torch.zeros(50), NOTHING, Sampling(temperature=1.0), random) for _ in range(30)]

    assert run(3) == run(3) != run(4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_give_no_token(bad, temperature):
    logits = LOGITS.clone()
    logits[2] = bad
    with pytest.raises(GateError, match="1 of 5 logits are not finite"):
        choose(logits, NOTHING, Sampling(temperature=temperature), seeded())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "`--temperature` is -0.1, expected 0 or more"),
        ({"temperature": math.nan}, "`--temperature` is nan"),
        ({"temperature": math.inf}, "`--temperature` is inf"),
        ({"top_k": -2}, "`--top-k` is -2"),
        ({"top_p": 1.5}, "`--top-p` is 1.5, expected 0 to 1"),
        ({"min_p": -1.0}, "`--min-p` is -1.0, expected 0 to 1"),
        ({"repetition_penalty": 0.0}, "`--repetition-penalty` is 0.0, expected 0.01 to 100"),
        ({"typical_p": 1.01}, "`--typical-p` is 1.01, expected 0 to 1"),
        ({"frequency_penalty": 101.0}, "`--frequency-penalty` is 101.0, expected -100 to 100"),
        ({"presence_penalty": math.nan}, "`--presence-penalty` is nan"),
    ],
)
def test_values_out_of_range_name_the_option(settings, message):
    with pytest.raises(UsageError) as caught:
        Sampling(**settings)
    assert caught.value.message.startswith(message) and caught.value.hint.startswith("--")
