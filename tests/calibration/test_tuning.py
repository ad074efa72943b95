"""Tuning against plain autograd through the whole model at once, and what it may and may not change."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from quantkit.calibration import tuning
from quantkit.calibration.tuning import RoundedLinear, tune
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.errors import CalibrationError
from quantkit.formats.codec import StoredTensor
from quantkit.formats.gptq import GptqCodec
from quantkit.models import catalog
from quantkit.models.block import read_block
from quantkit.models.config import ModelConfig
from quantkit.models.transformer import Model
from quantkit.progress import Silent
from quantkit.solver.gptq import solve

ROWS = torch.randint(5, 320, (6, 24), generator=torch.Generator().manual_seed(3))
FAMILIES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM"]


def parts(path: Path) -> tuple[Any, ModelConfig, Any]:
    checkpoint = open_checkpoint(path)
    return checkpoint, ModelConfig.read(checkpoint.config), catalog.find(checkpoint.config)


class Held:
    """Every linear of the blocks, rounded to nearest and held in memory; rows of a group are scattered."""

    def __init__(self, path: Path, bits: int = 2, *, scattered: bool = True) -> None:
        self.linears: dict[str, RoundedLinear] = {}
        self._bits = bits
        for name, linear in Model.load(*parts(path), torch.float32).linears.items():
            order = torch.randperm(linear.in_features, generator=torch.Generator().manual_seed(linear.in_features))
            order = order if scattered else order.sort().values
            codes = solve(linear.weight()[order], None, GptqCodec(bits=bits, group_size=32, sym=False)).codes
            zeros = torch.stack([grid.zero for grid in codes.grids])
            group = torch.empty(linear.in_features, dtype=torch.int64)
            group[order] = torch.arange(linear.in_features) // 32
            q = torch.empty_like(codes.q)
            q[order] = codes.q
            steps = (q.to(torch.int32) - zeros[group]).to(torch.int16)
            scale = torch.stack([grid.scale for grid in codes.grids])
            self.linears[name] = RoundedLinear(steps, group, scale, linear.stored.bias)

    @property
    def scales(self) -> Mapping[str, torch.Tensor]:
        return {name: linear.scale for name, linear in self.linears.items()}

    @property
    def bits(self) -> Mapping[str, int]:
        return dict.fromkeys(self.linears, self._bits)

    def linear(self, name: str) -> RoundedLinear:
        return self.linears[name]


class Plain(StoredTensor):
    """The same product as plain autograd knows it."""

    def __init__(self, linear: RoundedLinear, scale: torch.Tensor) -> None:
        self.in_features, self.out_features = linear.steps.shape
        self.linear_, self.scale, self.bias = linear, scale, linear.bias

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def dequantize(self) -> torch.Tensor:
        return self.linear_.steps * self.scale.detach()[self.linear_.group]

    def to(self, device: str | torch.device) -> "Plain":
        return self

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ (self.linear_.steps * self.scale[self.linear_.group])
        return y if self.bias is None else y + self.bias.float()


def norms_of(model: Model, config: ModelConfig, architecture: Any) -> dict[str, Any]:
    found = {"model.norm": model.head.norm}
    for index, block in enumerate(model.blocks):
        place = f"model.layers.{index}."
        found |= {f"{place}self_attn.{role}_norm": norm for role, norm in block.attention.norms.items()}
        found[place + "input_layernorm"] = block.before_attention
        if architecture.post_norms:
            found[place + "post_attention_layernorm"] = block.after_attention
            found[place + "pre_feedforward_layernorm"] = block.before_mlp
            found[place + "post_feedforward_layernorm"] = block.after_mlp
        else:
            found[place + "post_attention_layernorm"] = block.before_mlp
    return found


def whole(path: Path, held: Held, rows: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean KL, and its gradient for a relative change of each scale and norm, from one graph."""
    _, config, architecture = parts(path)
    teacher, student = Model.load(*parts(path), torch.float32), Model.load(*parts(path), torch.float32)
    leaves = {}
    for name, linear in student.linears.items():
        leaves[name] = torch.zeros_like(held.linears[name].scale).requires_grad_()
        linear.replace(Plain(held.linears[name], held.linears[name].scale * (1 + leaves[name])))
    for name, norm in norms_of(student, config, architecture).items():
        leaves[name] = torch.zeros_like(norm.weight).requires_grad_()
        object.__setattr__(norm, "weight", norm.weight * (1 + leaves[name]))
    wanted, found = teacher(rows).log_softmax(-1), student(rows).log_softmax(-1)
    loss = (wanted.exp() * (wanted - found)).sum(-1).mean()
    loss.backward()
    return float(loss.detach()), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_one_graph(family: str, scattered: bool, tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "model", family, dtype="float32")
    held = Held(path, scattered=scattered)
    assert all(linear.in_runs != scattered for linear in held.linears.values() if len(linear.scale) > 1)
    expected, gradients = whole(path, held, ROWS)
    original, config, architecture = parts(path)
    with torch.no_grad():
        student = tuning._Student(original, held, config, architecture, "cpu")
        teacher = tuning._Reader(original, config, architecture, torch.float32, "cpu")
        learner = tuning._Reader(student, config, architecture, torch.float32, "cpu")
        loss = learner.descend(ROWS, teacher.leaving(ROWS), teacher.head)
    assert loss == pytest.approx(expected, rel=1e-4)
    found = {name: leaf.grad for name, leaf in student._changes.items() if leaf.grad is not None}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-9, name


def run(path: Path, held: Held, rows: torch.Tensor = ROWS, **options: Any) -> tuning.Tuned:
    settings = {"passes": 6, "seed": 5, "dtype": torch.float32, "device": "cpu", "progress": Silent(), **options}
    return tune(*parts(path)[:1], held, *parts(path)[1:], rows, **settings)


def test_tuning_brings_the_model_nearer_to_the_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BATCH_TOKENS", 48)
    path = tiny.write_model(tmp_path / "model", dtype="float32")
    held = Held(path)
    before, _ = whole(path, held, ROWS)
    tuned = run(path, held)
    assert len(tuned.course) == 6
    for name, scale in tuned.scales.items():
        held.linears[name] = replace(held.linears[name], scale=scale)
    after, _ = whole(path, held, ROWS)
    assert after < 0.97 * before
    assert set(tuned.norms) == set(norms_of(Model.load(*parts(path), torch.float32), *parts(path)[1:]))


def test_same_seed_same_result_and_the_seed_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BATCH_TOKENS", 48)
    path = tiny.write_model(tmp_path / "model", dtype="float32")
    held = Held(path)
    first, again, other = (run(path, held, passes=1, seed=seed) for seed in (5, 5, 6))
    assert all(torch.equal(first.scales[name], scale) for name, scale in again.scales.items())
    assert any(not torch.equal(first.scales[name], scale) for name, scale in other.scales.items())


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen2MoeForCausalLM"])
def test_graphs_that_are_held_give_the_same(family: str, tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "model", family, dtype="float32")
    held = Held(path)
    one = tuning.graph_bytes(read_block(*parts(path), 0, torch.float32), ROWS.numel())
    none, first, both = (run(path, held, passes=2, graphs=graphs) for graphs in (0, one, 1 << 40))
    assert none.course == first.course == both.course
    for name, scale in none.scales.items():
        assert torch.equal(first.scales[name], scale) and torch.equal(both.scales[name], scale)
        assert not torch.equal(held.scales[name], scale) or family == "Qwen2MoeForCausalLM"


def test_codes_that_are_not_held_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_model(tmp_path / "model", dtype="float32")
    held = Held(path)
    usual = run(path, held, passes=1)
    monkeypatch.setattr(tuning, "HELD_BYTES", 0)
    assert all(torch.equal(usual.scales[name], scale) for name, scale in run(path, held, passes=1).scales.items())


@pytest.mark.parametrize("spread", [0.01, 1.0, 400.0])
def test_divergence_and_slope_are_those_of_autograd(spread: float) -> None:
    generator = torch.Generator().manual_seed(4)
    wanted, found = (spread * torch.randn(7, 300, generator=generator) for _ in "pq")
    leaf = found.double().requires_grad_()
    expected = (wanted.double().softmax(-1) * (wanted.double().log_softmax(-1) - leaf.log_softmax(-1))).sum()
    expected.backward()
    total, slope = tuning.divergence_and_slope(wanted.clone(), found.clone())
    assert total == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-5)
    torch.testing.assert_close(slope.double(), leaf.grad, rtol=1e-4, atol=1e-6)


def test_models_are_held_against_the_original_over_a_text(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "model", dtype="float32")
    held, (original, config, architecture) = Held(path), parts(path)
    with torch.no_grad():
        student = tuning._Student(original, held, config, architecture, "cpu")
    place = {"dtype": torch.float32, "device": "cpu"}
    same, rounded = tuning.divergences(original, (original, student), config, architecture, ROWS, **place)
    assert same == pytest.approx(0, abs=1e-6) and rounded == pytest.approx(whole(path, held, ROWS)[0], rel=1e-4)


def test_an_expert_that_no_token_reaches_stays_as_it_is(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "model", "MixtralForCausalLM", dtype="float32")
    held = Held(path)
    tuned = run(path, held, ROWS[:1, :3], passes=1)
    still = [name for name in held.scales if ".experts." in name and torch.equal(tuned.scales[name], held.scales[name])]
    assert 0 < len(still) < len([name for name in held.scales if ".experts." in name])


def test_what_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "model", dtype="float32")
    held = Held(path)
    held.linears["model.layers.1.mlp.down_proj"].scale[0, 0] = float("nan")
    with pytest.raises(CalibrationError, match="not finite"):
        run(path, held)
