import math

import pytest
import torch

from quantkit.runtime.acceptance import certain, settle

DRAWS = 50_000
CRITICAL = {7: 24.3, 9: 27.9}  # chi-square, passed once in a thousand


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random_chances(vocab, seed, spread=1.5):
    return (spread * torch.randn(vocab, generator=seeded(seed), dtype=torch.float64)).softmax(0)


def chi_square(tokens, chances):
    counts = torch.bincount(tokens, minlength=len(chances)).double()
    expected = len(tokens) * chances
    assert bool((counts[expected == 0] == 0).all())
    possible = expected > 0
    return float(((counts - expected) ** 2 / expected)[possible].sum())


def settled(p, q, seed, draws=DRAWS):
    """Guesses drawn from q, and what comes of them."""
    random = seeded(seed)
    guesses = torch.multinomial(q, draws, replacement=True, generator=random)
    return guesses, settle(p.expand(draws, -1), guesses, q.expand(draws, -1), random)


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_is_distributed_as_the_main_model_says(seed):
    p, q = random_chances(8, seed), random_chances(8, 100 + seed)
    guesses, tokens = settled(p, q, seed)
    assert chi_square(guesses, p) > 100 * CRITICAL[7], "the draft says something else"
    assert chi_square(tokens, p) < CRITICAL[7]
    kept = float((tokens == guesses).double().mean())
    expected = float(torch.minimum(p, q).sum())  # section 3.1, and a rejected guess never comes back
    assert kept == pytest.approx(expected, abs=4 * math.sqrt(0.25 / DRAWS))


def test_a_guess_that_was_certain():
    """An n-gram: q is 1 at its token."""
    p = random_chances(10, 3)
    for token in (int(p.argmax()), int(p.argmin())):
        _, tokens = settled(p, certain(token, 10), token)
        assert chi_square(tokens, p) < CRITICAL[9]


def test_tokens_that_one_of_the_two_rules_out():
    p = torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=torch.float64)
    q = torch.tensor([0.5, 0.25, 0.0, 0.25], dtype=torch.float64)
    _, tokens = settled(p, q, 1)
    assert chi_square(tokens, p) < 10.8
    _, tokens = settled(certain(2, 4), q, 1)
    assert set(tokens.tolist()) == {2}, "greedy: no other token ever comes"


def test_equal_distributions_keep_every_guess():
    p = random_chances(8, 5)
    guesses, tokens = settled(p, p.clone(), 2)
    assert torch.equal(guesses, tokens)


def test_a_rule_that_is_off_is_seen():
    """What the tests above would say of a residual that is the main model's own distribution."""
    p, q = random_chances(8, 0), random_chances(8, 100)
    random = seeded(0)
    guesses = torch.multinomial(q, DRAWS, replacement=True, generator=random)
    accepted = torch.rand(DRAWS, generator=random, dtype=torch.float64) < p[guesses] / q[guesses]
    wrong = torch.where(accepted, guesses, torch.multinomial(p, DRAWS, replacement=True, generator=random))
    assert chi_square(wrong, p) > 10 * CRITICAL[7]
