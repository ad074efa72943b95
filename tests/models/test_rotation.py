"""Rotations: orthogonal, drawn by a seed, and refused where norms cannot be folded."""

import pytest
import tiny
import torch

from quantkit.errors import UnsupportedModel
from quantkit.models import catalog, rotation
from quantkit.models.architecture import LinearSpec
from quantkit.models.config import ModelConfig
from quantkit.models.rotation import Orthogonal, Rotation, norm_before


def drawn(size: int, seed: int = 0) -> Orthogonal:
    return Orthogonal.drawn(size, torch.Generator().manual_seed(seed))


def matrix(orthogonal: Orthogonal, size: int) -> torch.Tensor:
    return orthogonal.turn(torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 2, 15, 24, 64, 80, 576, 1024])
def test_a_turn_is_one_orthogonal_matrix(size: int) -> None:
    turned = matrix(drawn(size), size)
    torch.testing.assert_close(turned @ turned.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    x = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(drawn(size).turn(x), x @ turned, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [64, 128, 1024])
def test_a_power_of_two_spreads_every_channel_evenly(size: int) -> None:
    turned = matrix(drawn(size), size)
    assert torch.allclose(turned.abs(), torch.full_like(turned, size**-0.5))
    assert 0.3 < (turned < 0).to(torch.float64).mean() < 0.7


def test_a_seed_gives_one_rotation_and_another_seed_another() -> None:
    first, same, other = (matrix(drawn(80, seed), 80) for seed in (5, 5, 6))
    assert torch.equal(first, same) and not torch.allclose(first, other)


def test_a_weight_is_turned_in_pieces_as_it_is_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    family = "Qwen2ForCausalLM"
    config = ModelConfig.read(tiny.make_config(family))
    turning = Rotation.drawn(config, catalog.FAMILIES[family], seed=0)
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    specs = [
        LinearSpec(f"model.layers.0.self_attn.{role}_proj", 64, (64,), (role,), "s") for role in ("q", "v", "o")
    ]
    norm = torch.linspace(0.5, 2, 64)

    def turned() -> list[torch.Tensor]:
        return [turning.linear(spec, weight, None if spec.role == "o" else norm) for spec in specs]

    whole = turned()
    monkeypatch.setattr(rotation, "PIECE_VALUES", 1)
    pieces = turned()
    assert all(torch.equal(*pair) and pair[0].dtype == torch.bfloat16 for pair in zip(whole, pieces, strict=True))
    assert not torch.equal(whole[0], whole[1]), "heads of v are turned too"


@pytest.mark.parametrize(
    ("name", "role", "expected"),
    [
        ("model.layers.3.self_attn.v_proj", "v", "model.layers.3.input_layernorm"),
        ("model.layers.3.self_attn.o_proj", "o", None),
        ("model.layers.3.mlp.experts.1.gate_proj", "gate", "model.layers.3.post_attention_layernorm"),
        ("model.layers.3.mlp.gate", "router", "model.layers.3.post_attention_layernorm"),
        ("model.layers.3.mlp.down_proj", "down", None),
        ("lm_head", "head", "model.norm"),
    ],
)
def test_each_linear_takes_up_the_norm_that_it_reads(name: str, role: str, expected: str | None) -> None:
    assert norm_before(LinearSpec(name, 64, (64,), (role,), name)) == expected


@pytest.mark.parametrize("family", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_a_family_with_norms_behind_is_refused_by_name(family: str) -> None:
    config = ModelConfig.read(tiny.make_config(family))
    with pytest.raises(UnsupportedModel, match=f"`{family}` cannot be rotated: its norms behind attention") as caught:
        Rotation.drawn(config, catalog.FAMILIES[family], seed=0)
    assert "--rotate" in (caught.value.hint or "")
