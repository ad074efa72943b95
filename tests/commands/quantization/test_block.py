"""Hessians of a block, weighted by what a backward pass found, against sums over its tokens."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from quantkit.calibration import sensitivity
from quantkit.calibration.sensitivity import Sensitivity
from quantkit.calibration.stream import ActivationStream
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.quantization.block import solve_block, solve_stage
from quantkit.commands.quantization.hessians import UNKNOWN, ReadyStage, ready_stages
from quantkit.commands.quantization.passage import HeldPassage, Passage, whole_block
from quantkit.formats.gptq import GptqCodec
from quantkit.models import catalog
from quantkit.models.config import ModelConfig
from quantkit.models.fan import Activations
from quantkit.models.transformer import Block, Rotary, load_block, load_embedding
from quantkit.progress import Silent
from quantkit.solver.inverse import factor
from quantkit.solver.replaced import relative_error

ROWS = torch.randint(5, 320, (10, 40), generator=torch.Generator().manual_seed(3))
MEASURED = 4


def prepare(path: Path, batch_rows: int) -> tuple[Sensitivity, Block, ActivationStream, Rotary]:
    checkpoint = open_checkpoint(path)
    parts: tuple[Any, ...] = (checkpoint, ModelConfig.read(checkpoint.config), catalog.find(checkpoint.config))
    found = sensitivity.measure(
        *parts, ROWS[:MEASURED], seed=0, dtype=torch.float32, device="cpu", folder=None, progress=Silent()
    )
    embedding = load_embedding(*parts, torch.float32)
    stream = ActivationStream.start(embedding, ROWS, batch_rows=batch_rows)
    block = load_block(*parts, 0, torch.float32)
    return found, block, stream, Rotary.at(parts[1].ropes, torch.arange(ROWS.shape[1])[None])


def ready_in(block: Block, stream: ActivationStream, rotary: Rotary, *known: Sensitivity | None, **options: Any) -> Iterator[ReadyStage]:
    return ready_stages(block, block.stages(), whole_block(stream, rotary), stream.tokens, *known, **options)


def hessian_of(ready: ReadyStage) -> torch.Tensor:
    factor = ready.factor
    product = factor.lower.double().T @ (factor.pivots.double()[:, None] * factor.lower.double())
    place = torch.argsort(factor.order)
    return product[place[:, None], place] - factor.ridge * torch.eye(len(place))


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_a_quarter_of_a_hessian_is_weighted_by_gradients(family: str, tmp_path: Path) -> None:
    found, block, stream, rotary = prepare(tiny.write_model(tmp_path / "model", family, tokenizer=False), 3)
    whole: dict[str, Activations] = {}
    (hidden,) = [torch.cat(list(stream.batches()))]
    block.forward(hidden, rotary, observe=lambda seen: whole.__setitem__(seen.stage.name, seen))
    ready = {stage.names: stage for stage in ready_in(block, stream, rotary, found)}
    assert set(ready) == {seen.stage.linears for seen in whole.values()}
    for name, seen in whole.items():
        x = seen.inputs.double()
        tokens = torch.arange(ROWS.numel()) if seen.tokens is None else seen.tokens
        weights = dict(zip(found.stages[name].tokens.tolist(), found.stages[name].weights.tolist(), strict=True))
        total = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
        for token, own in zip(tokens.tolist(), x, strict=True):
            count = 0.75 + 0.25 * len(ROWS) / MEASURED * weights.get(token, 0.0)
            total += count * torch.outer(own, own)
        total /= len(x)
        result = hessian_of(ready[seen.stage.linears])
        assert (result - total).abs().max() < 1e-4 * total.diagonal().max()


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM", "Qwen2MoeForCausalLM"])
@pytest.mark.parametrize("left_out", ["", "down_proj", "self_attn", "proj"])
def test_what_is_held_inside_a_block_changes_nothing(family: str, left_out: str, tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "model", family, tokenizer=False)
    results, behind = [], []
    for kind, folder in ((Passage, None), (HeldPassage, None), (HeldPassage, tmp_path)):
        found, block, stream, rotary = prepare(path, 4)
        codecs = {name: GptqCodec(4, 32) for name in block.linears if not left_out or left_out not in name}
        passage = kind(stream, rotary, *([partial(new_folder, folder)] if folder else []))
        solved = {one.result.name: one for one in solve_block(block, passage, codecs, found)}
        assert solved.keys() == codecs.keys()
        results.append({name: one.stored.tensors() for name, one in solved.items()})
        plain = torch.cat([block.forward(hidden, rotary) for hidden in stream.batches()])
        behind.append(plain)
        if isinstance(passage, HeldPassage):
            assert torch.equal(torch.cat(list(passage.leave(block, "block 0").batches())), plain)
    for other, states in zip(results[1:], behind[1:], strict=True):
        assert torch.equal(states, behind[0])
        for name, tensors in results[0].items():
            assert tensors.keys() == other[name].keys()
            assert all(torch.equal(tensor, other[name][suffix]) for suffix, tensor in tensors.items())


def new_folder(root: Path, part: str) -> Path:
    (root / part).mkdir()
    return root / part


def test_a_linear_is_solved_for_what_rounded_ones_give_it(tmp_path: Path) -> None:
    _, block, stream, rotary = prepare(tiny.write_model(tmp_path / "model", "LlamaForCausalLM", tokenizer=False), 4)
    weights = {name: linear.weight() for name, linear in block.linears.items()}
    before = {ready.names: ready for ready in ready_in(block, stream, rotary)}
    codecs = {name: GptqCodec(2, 32) for name in block.linears}
    solved = {one.result.name: one for one in solve_block(block, Passage(stream, rotary), codecs)}
    assert list(solved) == list(weights)
    for ready in ready_in(block, stream, rotary):
        for name in ready.names:
            own, rounded = weights[name], solved[name].weight()
            by_rounded, by_dense = (
                relative_error(lambda outputs, own=own: own[:, outputs], rounded, known.factor)
                for known in (ready, before[ready.names])
            )
            assert solved[name].result.error == pytest.approx(by_rounded, rel=1e-4)
            first = "q_proj" in name or "k_proj" in name or "v_proj" in name
            assert (by_dense == pytest.approx(by_rounded, rel=1e-4)) == first


def test_batches_do_not_change_what_is_solved(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "model", "Qwen2MoeForCausalLM", tokenizer=False)
    results = []
    for batch_rows in (1, 4):
        found, block, stream, rotary = prepare(path, batch_rows)
        codecs = {name: GptqCodec(4, 32) for name in block.linears}
        results.append({solved.result.name: solved for solved in solve_block(block, Passage(stream, rotary), codecs, found)})
    # Attention over other batches rounds differently, so codes may; the errors may not.
    for name, solved in results[0].items():
        assert results[1][name].result.tokens == solved.result.tokens
        assert results[1][name].result.error == pytest.approx(solved.result.error, rel=0.05)


def test_an_expert_without_gradients_is_token_normalised_and_said_so(tmp_path: Path) -> None:
    found, block, stream, rotary = prepare(
        tiny.write_model(tmp_path / "model", "MixtralForCausalLM", tokenizer=False), 5
    )
    missing = next(name for name in found.stages if name.startswith("model.layers.0.") and ".experts.1." in name)
    less = Sensitivity(
        found.tokens, found.outputs, {name: stage for name, stage in found.stages.items() if name != missing}
    )
    (linears,) = (stage.linears for stage in block.stages() if stage.name == missing)
    remarks = {}
    for given in (found, less, None):
        ready = {stage.names: stage for stage in ready_in(block, stream, rotary, given)}
        remarks[given] = ready[linears].fallback, hessian_of(ready[linears])
    assert remarks[found][0] is None and remarks[None][0] is None
    assert remarks[less][0] == UNKNOWN
    assert torch.equal(remarks[less][1], remarks[None][1]) and not torch.equal(remarks[less][1], remarks[found][1])


@pytest.mark.parametrize("family", ["MixtralForCausalLM", "Qwen2MoeForCausalLM"])
def test_an_expert_reached_by_all_tokens_has_the_hessian_of_its_answers_to_them(family: str, tmp_path: Path) -> None:
    _, block, stream, rotary = prepare(tiny.write_model(tmp_path / "model", family, tokenizer=False), 3)
    (hidden,) = [torch.cat(list(stream.batches()))]
    states: dict[str, Activations] = {}
    plain = block.forward(hidden, rotary, observe=lambda seen: states.__setitem__(seen.stage.name, seen))
    widely = block.reaching(range(len(block.experts)))
    seen_by_all: dict[str, Activations] = {}
    reached = widely.forward(hidden, rotary, observe=lambda seen: seen_by_all.__setitem__(seen.stage.name, seen))
    assert (reached - plain).abs().max() < 1e-5 * plain.abs().max()
    ready = {stage.names: stage for stage in ready_in(block, stream, rotary, route_all=True)}
    assert len(ready) == len(block.stages())
    first = hessian_of(ready[states[block.experts[0][0]].stage.linears])
    for inputs, outputs in block.experts:
        routed = len(states[inputs].inputs)
        for name in (inputs, outputs):
            seen, found = seen_by_all[name], ready[seen_by_all[name].stage.linears]
            assert (found.routed, found.tokens, len(seen.inputs)) == (routed, ROWS.numel(), ROWS.numel())
            # A quarter of the weight is given to tokens regardless of their norm.
            x = seen.inputs.double()
            energies = x.square().sum(1)
            weights = (0.75 / energies.mean() + 0.25 / energies) * x.shape[1] / len(x)
            total = x.T @ (weights[:, None] * x)
            assert (hessian_of(found) - total).abs().max() < 1e-4 * total.diagonal().max()
        assert torch.equal(hessian_of(ready[seen_by_all[inputs].stage.linears]), first)


def test_a_hessian_that_is_not_positive_definite_is_damped_more_and_said_so(tmp_path: Path) -> None:
    _, block, _, _ = prepare(tiny.write_model(tmp_path / "model", tokenizer=False), 3)
    names = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")
    hessian = torch.eye(64)
    hessian[0, 1] = hessian[1, 0] = 1.05  # its least eigenvalue is -0.05
    solved = solve_stage(block.linears, ReadyStage(names, factor(hessian), 99), dict.fromkeys(names, GptqCodec(4, 32)))
    results = [one.result for one in solved]
    assert [(result.name, result.damping, result.extra_damping) for result in results] == [
        (name, pytest.approx(0.1), True) for name in names
    ]
    hessian[0, 1] = hessian[1, 0] = 3.0
    (lost,) = solve_stage(block.linears, ReadyStage(names[:1], factor(hessian), 99), {names[0]: GptqCodec(4, 32)})
    assert lost.result.fallback == "its Hessian stays singular up to damping 1"
