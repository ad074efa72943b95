"""RotatedCheckpoint: the same logits from other weights, for every family; what it reads and what it refuses."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.checkpoint.fingerprint import fingerprint, in_form
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.checkpoint.rotated import RotatedCheckpoint
from quantkit.errors import CheckpointError
from quantkit.models.contents import check_contents
from quantkit.models.transformer import Model

FAMILIES = [family for family in tiny.FAMILIES if not family.startswith("Gemma")]
IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(7))
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
BIASED = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "Qwen3ForCausalLM": {"attention_bias": True},
    "Qwen3MoeForCausalLM": {"attention_bias": True},
}


def logits(checkpoint: Checkpoint) -> Tensor:
    return Model.load(checkpoint, checkpoint.model_config, checkpoint.architecture, torch.float32)(IDS)


def require_alike(rotated: Checkpoint, original: Checkpoint) -> None:
    found, expected = logits(rotated), logits(original)
    assert (found - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_the_same_in_other_weights(family: str, tied: bool, tmp_path: Path) -> None:
    original = open_checkpoint(tiny.write_model(tmp_path / "m", family, tie_word_embeddings=tied))
    rotated = RotatedCheckpoint.of(original, seed=0)
    require_alike(rotated, original)
    check_contents(rotated, rotated.model_config, rotated.architecture)
    assert not rotated.model_config.tie_embeddings and original.model_config.tie_embeddings == tied
    for name in original.names():
        before, after = original.tensor(name), rotated.tensor(name)
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        if name.endswith("norm.weight") and "self_attn" not in name:
            assert torch.equal(after, torch.ones_like(after))
        else:
            kept = name.endswith(("_norm.weight", "q_proj.bias", "k_proj.bias"))
            assert torch.equal(before, after) == kept, name


@pytest.mark.parametrize("family", BIASED)
def test_biases_on_both_ends_are_turned(family: str, tmp_path: Path) -> None:
    original = open_checkpoint(tiny.write_model(tmp_path / "m", family, **BIASED[family]))
    assert any(name.endswith("o_proj.bias") for name in original.names())
    require_alike(RotatedCheckpoint.of(original, seed=3), original)


@pytest.mark.parametrize("head_dim", [24, 40, 8])
def test_heads_of_any_width_are_turned(head_dim: int, tmp_path: Path) -> None:
    original = open_checkpoint(tiny.write_model(tmp_path / "m", "Qwen3ForCausalLM", head_dim=head_dim, hidden_size=96))
    require_alike(RotatedCheckpoint.of(original, seed=0), original)


def test_a_fused_linear_in_parts_and_experts_under_their_other_names(tmp_path: Path) -> None:
    phi = tiny.write_model(tmp_path / "phi", "Phi3ForCausalLM")
    whole = open_checkpoint(phi)
    expected = logits(whole)
    tensors = {}
    for name, tensor in load_file(phi / "model.safetensors").items():
        if "qkv_proj" in name:
            for part, piece in zip("qkv", tensor.split((64, 32, 32)), strict=True):
                tensors[name.replace("qkv", part)] = piece.contiguous()
        else:
            tensors[name] = tensor
    save_file(tensors, phi / "model.safetensors")
    found = logits(RotatedCheckpoint.of(open_checkpoint(phi), seed=0))
    assert (found - expected).abs().max() < 1e-4 * expected.std()

    mixtral = tiny.write_model(tmp_path / "mixtral", "MixtralForCausalLM")
    expected = logits(open_checkpoint(mixtral))
    renamed = {
        name.replace(".block_sparse_moe.", ".mlp.")
        .replace(".w1", ".gate_proj")
        .replace(".w3", ".up_proj")
        .replace(".w2", ".down_proj"): tensor
        for name, tensor in load_file(mixtral / "model.safetensors").items()
    }
    save_file(renamed, mixtral / "model.safetensors")
    found = logits(RotatedCheckpoint.of(open_checkpoint(mixtral), seed=0))
    assert (found - expected).abs().max() < 1e-4 * expected.std()


def test_a_tied_head_is_the_embedding_with_the_last_norm_in_it(tmp_path: Path) -> None:
    original = open_checkpoint(tiny.write_model(tmp_path / "m", tie_word_embeddings=True))
    rotated = RotatedCheckpoint.of(original, seed=0)
    assert HEAD in rotated.names() and HEAD not in original.names()
    assert rotated.stored_bytes == original.stored_bytes + original.tensor(EMBEDDING).nbytes
    gram = original.tensor(EMBEDDING) @ original.tensor(EMBEDDING).T
    torch.testing.assert_close(rotated.tensor(EMBEDDING) @ rotated.tensor(EMBEDDING).T, gram, rtol=0, atol=1e-4)
    scaled = original.tensor(EMBEDDING) * original.tensor("model.norm.weight")
    mixed = rotated.tensor(HEAD) @ rotated.tensor(EMBEDDING).T
    torch.testing.assert_close(mixed, scaled @ original.tensor(EMBEDDING).T, rtol=0, atol=1e-4)


def test_the_seed_decides_and_the_fingerprint_knows_it(tmp_path: Path) -> None:
    original = open_checkpoint(tiny.write_model(tmp_path / "m", dtype="bfloat16"))
    first, same, other = (RotatedCheckpoint.of(original, seed) for seed in (5, 5, 6))
    names = original.linears()
    assert all(torch.equal(first.tensor(f"{name}.weight"), same.tensor(f"{name}.weight")) for name in names)
    assert not any(torch.equal(first.tensor(f"{name}.weight"), other.tensor(f"{name}.weight")) for name in names)
    assert len({fingerprint(one) for one in (original, first, other)}) == 3
    assert fingerprint(first) == fingerprint(same) == in_form(fingerprint(original), first)


def test_outliers_are_spread(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][:, 3] *= 100
    tiny.write_tensors(folder, tensors)
    original = open_checkpoint(folder)

    def peak(weight: Tensor) -> float:
        return float((weight.abs().amax(1) / weight.square().mean(1).sqrt()).mean())

    assert peak(original.tensor(name)) > 7  # of √64
    assert peak(RotatedCheckpoint.of(original, seed=0).tensor(name)) < 2


def test_a_value_beyond_the_dtype_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "m", dtype="float16")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][:] = 60_000
    tensors[HEAD] *= 30
    tiny.write_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match=r"`lm_head.weight` of `.*` cannot be rotated: in float16") as caught:
        RotatedCheckpoint.of(open_checkpoint(folder), seed=0).tensor(HEAD)
    assert "bfloat16" in (caught.value.hint or "")
