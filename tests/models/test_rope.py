"""Rotary tables against the formulas written out in float64, and against transformers far from position 0."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quantkit.models.rope import DynamicRope, LinearRope, Llama3Rope, LongRope, Rope, Rotary, YarnRope

THETA, DIM, POSITIONS = 50000.0, 32, 4096
SHORT, LONG = tuple(1 + 0.05 * i for i in range(16)), tuple(2 + 0.5 * i for i in range(16))

VARIANTS: dict[str, tuple[Rope, dict[str, Any]]] = {
    "linear": (LinearRope(THETA, DIM, 4.0), {"factor": 4.0}),
    "dynamic": (DynamicRope(THETA, DIM, 4.0, POSITIONS), {"factor": 4.0}),
    "llama3": (
        Llama3Rope(THETA, DIM, 8.0, 1.0, 4.0, 1024),
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024},
    ),
    "yarn": (
        YarnRope(THETA, DIM, 4.0, 1024, 0.1 * math.log(4) + 1, 32.0, 1.0, True),
        {"factor": 4.0, "original_max_position_embeddings": 1024},
    ),
    "longrope": (
        LongRope(THETA, DIM, SHORT, LONG, 1024, math.sqrt(1 + math.log(4) / math.log(1024)), False),
        {
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "short_factor": list(SHORT),
            "long_factor": list(LONG),
        },
    ),
}


@pytest.mark.parametrize("length", [1, 1000, 8000, 60000])
@pytest.mark.parametrize("kind", VARIANTS)
def test_tables_far_from_the_start(kind: str, length: int) -> None:
    rope, stated = VARIANTS[kind]
    config = LlamaConfig(
        hidden_size=2 * DIM,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": kind, "rope_theta": THETA, **stated},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    assert rope.table_factor == pytest.approx(factor)
    torch.testing.assert_close(rope.frequencies(length), expected, rtol=2e-6, atol=0)
    positions = torch.tensor([[0, length - 1]])
    cos, sin = Rotary.at((rope,), positions).tables[rope]
    angles = positions.to(torch.float32)[..., None] * rope.frequencies(length)
    torch.testing.assert_close(cos, angles.cos() * factor)
    torch.testing.assert_close(sin, angles.sin() * factor)


def test_plain_rotation_by_hand() -> None:
    """Pair i is (element i, element i + dim/2), turned by position · theta^(-2i/dim)."""
    rope = Rope(100.0, 4)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).reshape(1, 1, 1, 5)
    turned = Rotary.at((rope,), torch.tensor([[7]])).turn(rope, x)[0, 0, 0]
    for pair, angle in ((0, 7.0), (1, 0.7)):
        first, second = x[0, 0, 0, pair], x[0, 0, 0, pair + 2]
        assert turned[pair] == pytest.approx(float(first * math.cos(angle) - second * math.sin(angle)), abs=1e-6)
        assert turned[pair + 2] == pytest.approx(float(second * math.cos(angle) + first * math.sin(angle)), abs=1e-6)
    assert turned[4] == 5.0


def test_scores_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, DIM, generator=generator)
    for rope, _ in VARIANTS.values():

        def score(query: int, key: int, rope: Rope = rope) -> float:
            rotary = Rotary.at((rope,), torch.tensor([[query, key]]), length=100)
            turned = rotary.turn(rope, torch.cat((q, k), dim=2))
            return float(turned[0, 0, 0] @ turned[0, 0, 1])

        assert score(9, 4) == pytest.approx(score(79, 74), abs=1e-4)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones() -> None:
    plain, rope = Rope(THETA, DIM).frequencies(1), VARIANTS["llama3"][0].frequencies(1)
    wavelength = 2 * math.pi / plain
    assert torch.equal(rope[wavelength < 1024 / 4], plain[wavelength < 1024 / 4])
    torch.testing.assert_close(rope[wavelength > 1024], plain[wavelength > 1024] / 8)
    between = (wavelength > 1024 / 4) & (wavelength < 1024)
    assert bool(between.any())
    assert bool(((rope < plain) & (rope > plain / 8))[between].all())


def test_frequencies_change_where_they_should() -> None:
    dynamic, long_rope = VARIANTS["dynamic"][0], VARIANTS["longrope"][0]
    assert torch.equal(dynamic.frequencies(1), dynamic.frequencies(POSITIONS))
    assert not torch.equal(dynamic.frequencies(POSITIONS), dynamic.frequencies(POSITIONS + 1))
    assert torch.equal(long_rope.frequencies(1), long_rope.frequencies(1024))
    assert not torch.equal(long_rope.frequencies(1024), long_rope.frequencies(1025))


def test_only_a_restarting_longrope_rebuilds_the_cache_and_only_once() -> None:
    long_rope = LongRope(THETA, DIM, SHORT, LONG, 1024, 1.0, restart=True)
    assert [long_rope.restarts(cached, 1025) for cached in (0, 1, 1024, 1025)] == [False, True, True, False]
    assert not long_rope.restarts(1000, 1024)
    assert not any(rope.restarts(1024, 1025) for rope, _ in VARIANTS.values())
