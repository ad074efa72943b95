"""Squares of gradients, against sums written out over what the backward pass shows."""

from pathlib import Path

import pytest
import tiny
import torch

from quantkit.calibration import gradients, sensitivity
from quantkit.calibration.gradients import StageGradients, run_backward
from quantkit.calibration.sensitivity import Sensitivity, TokenWeights
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.errors import CalibrationError
from quantkit.models import catalog
from quantkit.models.architecture import block_of
from quantkit.models.config import ModelConfig
from quantkit.progress import Silent

ROWS = torch.randint(5, 320, (6, 20), generator=torch.Generator().manual_seed(3))
PLACE = {"seed": 4, "dtype": torch.float32, "device": "cpu", "folder": None, "progress": Silent()}


def measure(path: Path, rows: torch.Tensor = ROWS, **options) -> Sensitivity:
    checkpoint = open_checkpoint(path)
    place = checkpoint, ModelConfig.read(checkpoint.config), catalog.find(checkpoint.config)
    return sensitivity.measure(*place, rows, **PLACE, **options)


def observe(path: Path, rows: torch.Tensor = ROWS) -> dict[str, list[StageGradients]]:
    found: dict[str, list[StageGradients]] = {}
    checkpoint = open_checkpoint(path)
    run_backward(
        checkpoint,
        ModelConfig.read(checkpoint.config),
        catalog.find(checkpoint.config),
        rows,
        lambda seen: found.setdefault(seen.stage.name, []).append(seen),
        **PLACE,
    )
    return found


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM"])
def test_squares_by_output_and_by_token(family: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gradients, "BATCH_TOKENS", 40)
    path = tiny.write_model(tmp_path / "model", family, tokenizer=False)
    result, found = measure(path), observe(path)
    assert result.tokens == 120 and set(result.stages) == set(found)
    for name, batches in found.items():
        energies = torch.cat([seen.inputs for seen in batches]).double().square().sum(1)
        own_weights = []
        for number, linear in enumerate(batches[0].stage.linears):
            squares = torch.cat([seen.outputs[number] for seen in batches]).double().square()
            expected = torch.stack([squares[token] * energies[token] for token in range(len(energies))]).sum(0) / 120
            torch.testing.assert_close(result.outputs[linear], expected, rtol=1e-5, atol=0)
            weights = squares.sum(1)
            own_weights.append(weights / (weights * energies).sum() * energies.sum())
        stage = result.stages[name]
        torch.testing.assert_close(stage.weights.double(), sum(own_weights) / len(own_weights), rtol=1e-5, atol=1e-12)
        assert torch.equal(stage.tokens, torch.cat([seen.tokens for seen in batches]))
        assert float((stage.weights * energies).sum() / energies.sum()) == pytest.approx(1, rel=1e-5)


def test_an_expert_has_the_tokens_that_reached_it(tmp_path: Path) -> None:
    """The router's rows of expert 3 are the mean of the others': it is never the first."""
    config = tiny.make_config("MixtralForCausalLM", num_experts_per_tok=1)
    tensors = tiny.make_tensors(config, 0, torch.float32)
    for layer in range(2):
        router = tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
        router[3] = router[:3].mean(dim=0)
    path = tiny.write_model(tmp_path / "model", "MixtralForCausalLM", tokenizer=False, num_experts_per_tok=1)
    tiny.write_tensors(path, tensors)
    result = measure(path)
    for layer in range(2):
        experts = [name for name in result.stages if f"layers.{layer}." in name and ".experts." in name]
        assert experts and not any(".experts.3" in name for name in experts)
        reached = torch.cat([result.stages[name].tokens for name in experts])
        assert torch.equal(reached.bincount(), torch.full((120,), 2))  # one expert, two stages
    assert not any(".experts.3." in name for name in result.outputs)


def test_tokens_without_gradient_count_for_equal(tmp_path: Path) -> None:
    """A block whose outputs are projected to nothing has no gradients inside."""
    config = tiny.make_config("LlamaForCausalLM")
    tensors = tiny.make_tensors(config, 0, torch.float32)
    tensors["model.layers.0.mlp.down_proj.weight"].zero_()
    path = tiny.write_model(tmp_path / "model", tokenizer=False)
    tiny.write_tensors(path, tensors)
    result = measure(path)
    assert torch.equal(result.stages["model.layers.0.mlp.gate_up"].weights, torch.ones(120))
    assert float(result.outputs["model.layers.0.mlp.up_proj"].sum()) == 0


def test_gradients_that_are_not_finite_are_named(tmp_path: Path) -> None:
    config = tiny.make_config("LlamaForCausalLM")
    tensors = tiny.make_tensors(config, 0, torch.float32)
    # Nothing overflows on the way forward; squares of gradients do, before `o_proj` shrinks what goes on.
    tensors["model.layers.1.self_attn.o_proj.weight"] *= 1e21
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1e-21
    path = tiny.write_model(tmp_path / "model", tokenizer=False)
    tiny.write_tensors(path, tensors)
    with pytest.raises(CalibrationError, match=r"gradients at `model.layers.1.self_attn.v_proj` are not finite"):
        measure(path)


def test_counts_mix_two_hessians_of_equal_diagonal() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 8, generator=generator).double()
    measured, total = 20, 50
    weights = torch.rand(measured, generator=generator)
    energies = x[:measured].square().sum(1)
    weights *= float(energies.sum() / (weights * energies).sum())
    found = Sensitivity(measured, {}, {"stage": TokenWeights(weights, torch.arange(measured))})
    counts = found.counts("stage", total, share=0.25)
    mixed = (x * counts[:, None]).T @ x / total
    plain, weighted = x.T @ x / total, (x[:measured] * weights[:, None]).T @ x[:measured] / measured
    torch.testing.assert_close(mixed, 0.75 * plain + 0.25 * weighted)
    torch.testing.assert_close(weighted.trace(), (x[:measured].T @ x[:measured] / measured).trace())


def test_counts_of_an_expert_are_those_of_its_tokens() -> None:
    found = Sensitivity(4, {}, {"stage": TokenWeights(torch.tensor([1.0, 3.0]), torch.tensor([3, 1]))})
    assert found.counts("stage", 6, share=0.5).tolist() == [0.5, 0.5 + 0.75 * 3, 0.5, 0.5 + 0.75, 0.5, 0.5]
    assert found.counts("another", 6) is None


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_covariances_of_output_gradients(family: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gradients, "BATCH_TOKENS", 40)
    monkeypatch.setattr(sensitivity, "CHUNK_OUTPUTS", 48)
    path = tiny.write_model(tmp_path / "model", family, tokenizer=False)
    result, found = measure(path), observe(path)
    assert list(result.covariances) == list(result.outputs)
    for batches in found.values():
        energies = torch.cat([seen.inputs for seen in batches]).double().square().sum(1)
        for number, linear in enumerate(batches[0].stage.linears):
            rows = torch.cat([seen.outputs[number] for seen in batches]).double()
            whole = sum(energy * torch.outer(row, row) for energy, row in zip(energies, rows, strict=True)) / 120
            assert [len(chunk) for chunk in result.covariances[linear]] == sensitivity.chunk_sizes(len(whole))
            start = 0
            for chunk in result.covariances[linear]:
                end = start + len(chunk)
                difference = chunk.double() - whole[start:end, start:end]
                assert difference.norm() <= 5e-3 * whole[start:end, start:end].norm()  # bfloat16
                assert torch.equal(chunk, chunk.T)
                start = end
            assert start == len(whole)


def test_covariances_can_be_handed_over_block_by_block_and_are_not_held_then(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "model", tokenizer=False, num_hidden_layers=3)
    together, blocks = measure(path), []
    assert not measure(path, keep=blocks.append).covariances
    assert [{block_of(name) for name in block} for block in blocks] == [{2}, {1}, {0}]
    found = {name: chunks for block in blocks for name, chunks in block.items()}
    assert list(found) == list(together.covariances)
    for name, chunks in found.items():
        assert all(map(torch.equal, chunks, together.covariances[name]))


def test_chunks_are_as_few_and_as_equal_as_can_be() -> None:
    assert sensitivity.chunk_sizes(512) == [512] and sensitivity.chunk_sizes(576) == [288, 288]
    assert sensitivity.chunk_sizes(1537) == [385, 384, 384, 384] and sensitivity.chunk_sizes(1) == [1]


def test_covariances_of_gradients_in_bfloat16_are_those_of_their_values(tmp_path: Path) -> None:
    """Products of pairs of bfloat16, where the processor has them, round a gradient that its token scales once more."""
    path = tiny.write_model(tmp_path / "model", tokenizer=False)
    checkpoint = open_checkpoint(path)
    place = checkpoint, ModelConfig.read(checkpoint.config), catalog.find(checkpoint.config)
    own, found = {**PLACE, "dtype": torch.bfloat16}, {}
    result = sensitivity.measure(*place, ROWS, **own)
    run_backward(*place, ROWS, lambda seen: found.setdefault(seen.stage.name, []).append(seen), **own)
    for batches in found.values():
        energies = torch.cat([seen.inputs for seen in batches]).double().square().sum(1)
        for number, linear in enumerate(batches[0].stage.linears):
            assert batches[0].outputs[number].dtype == torch.bfloat16
            gradients_there = torch.cat([seen.outputs[number] for seen in batches]).double()
            whole = (gradients_there * energies[:, None]).T @ gradients_there / ROWS.numel()
            scale = whole.diagonal().sqrt() + 1e-30
            start = 0
            for chunk in result.covariances[linear]:
                assert torch.equal(chunk, chunk.T)
                here = slice(start, start := start + len(chunk))
                error = (chunk.double() - whole[here, here]).abs() / (scale[here, None] * scale[here])
                assert error.max() < 2**-7  # of what is kept, and of two factors
