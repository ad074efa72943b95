"""The streaming backward pass against plain autograd through the whole model at once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from quantkit.calibration import gradients
from quantkit.calibration.gradients import StageGradients, run_backward
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.errors import CalibrationError
from quantkit.formats.codec import StoredTensor
from quantkit.formats.dense import DenseTensor
from quantkit.models import catalog
from quantkit.models.config import ModelConfig
from quantkit.models.transformer import Model
from quantkit.progress import Silent

ROWS = torch.randint(5, 320, (5, 24), generator=torch.Generator().manual_seed(3))
SEED = 11


class Probed(StoredTensor):
    """A dense weight that adds zeros to its outputs: their gradient is that of the outputs."""

    def __init__(self, inner: DenseTensor) -> None:
        self.inner = inner
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self.inputs: list[torch.Tensor] = []
        self.zeros: list[torch.Tensor] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.inner.tensors()

    def dequantize(self) -> torch.Tensor:
        return self.inner.dequantize()

    def to(self, device: str | torch.device) -> "Probed":
        return self

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs.append(x.detach())
        self.zeros.append(torch.zeros(len(x), self.out_features, requires_grad=True))
        return self.inner.matmul(x) + self.zeros[-1]


def parts(path: Path) -> tuple[Any, ModelConfig, Any]:
    checkpoint = open_checkpoint(path)
    return checkpoint, ModelConfig.read(checkpoint.config), catalog.find(checkpoint.config)


def twin(path: Path, rows: torch.Tensor, seed: int = SEED) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Linear → its inputs and the gradients at its outputs, all from one graph of the whole model. (Experts: in the
    order of their tokens.)"""
    model = Model.load(*parts(path), torch.float32)
    probes = {name: Probed(linear.stored) for name, linear in model.linears.items()}
    for name, linear in model.linears.items():
        linear.replace(probes[name])
    logits = model(rows)
    chances = torch.rand(rows.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    below = logits.detach().double().softmax(-1).cumsum(-1) <= chances[..., None]
    labels = below.sum(-1)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    ran = {name: probe for name, probe in probes.items() if probe.zeros}
    return {name: (probe.inputs[0], probe.zeros[0].grad) for name, probe in ran.items()}


def streamed(path: Path, rows: torch.Tensor, seed: int = SEED, **options: Any) -> dict[str, list[StageGradients]]:
    found: dict[str, list[StageGradients]] = {}
    settings = {"dtype": torch.float32, "device": "cpu", "folder": None, "progress": Silent(), **options}
    run_backward(
        *parts(path), rows, lambda seen: found.setdefault(seen.stage.name, []).append(seen), seed=seed, **settings
    )
    return found


def by_linear(found: dict[str, list[StageGradients]]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Name, tokens, inputs and gradients of each linear, in the order of the tokens."""
    for batches in found.values():
        tokens, order = torch.cat([seen.tokens for seen in batches]).sort()
        inputs = torch.cat([seen.inputs for seen in batches])[order]
        for number, name in enumerate(batches[0].stage.linears):
            yield name, tokens, inputs, torch.cat([seen.outputs[number] for seen in batches])[order]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_gradients_are_those_of_the_whole_model(family: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gradients, "BATCH_TOKENS", 48)  # two rows
    monkeypatch.setattr(gradients, "LOGITS_AT_ONCE", 320 * 7)
    path = tiny.write_model(tmp_path / "model", family, tokenizer=False)
    expected = twin(path, ROWS)
    found = {name: rest for name, *rest in by_linear(streamed(path, ROWS))}
    assert set(found) == set(expected)
    for name, (tokens, inputs, outputs) in found.items():
        assert len(tokens) == len(tokens.unique()) == len(expected[name][0])
        if ".experts." not in name:
            assert torch.equal(tokens, torch.arange(ROWS.numel()))
        torch.testing.assert_close(inputs, expected[name][0], rtol=1e-4, atol=1e-5)
        scale = float(expected[name][1].abs().max())
        assert scale > 0
        torch.testing.assert_close(outputs, expected[name][1], rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen2MoeForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_and_memory_give_the_same_bytes_each_time(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tiny.write_model(tmp_path / "model", family, tokenizer=False)
    runs = []
    for folder in (None, tmp_path / "a", tmp_path / "b"):
        if folder is not None:
            folder.mkdir()
        with torch.inference_mode():  # whatever the caller's mode
            runs.append(list(by_linear(streamed(path, ROWS, dtype=dtype, folder=folder))))
    for other in runs[1:]:
        for (name, *first), (again, *second) in zip(runs[0], other, strict=True):
            assert name == again and all(map(torch.equal, first, second))
    sizes = {place.name: sum(file.stat().st_size for file in place.iterdir()) for place in (tmp_path / "a").iterdir()}
    states = ROWS.numel() * 64
    assert sizes == {**{f"block-{index}": states * dtype.itemsize for index in range(3)}, "gradients": states * 4}


def test_the_seed_draws_the_labels(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "model", tokenizer=False)
    first, other = ({name: rest[-1] for name, *rest in by_linear(streamed(path, ROWS, seed))} for seed in (1, 2))
    assert all(not torch.equal(first[name], other[name]) for name in first)


def test_labels_are_drawn_as_the_model_says(tmp_path: Path) -> None:
    """Averaged over many draws, the gradient of the loss of the model's own labels vanishes."""
    path = tiny.write_model(tmp_path / "model", tokenizer=False)
    checkpoint, config, architecture = parts(path)
    head = Model.load(checkpoint, config, architecture, torch.float32).head
    states = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0)).expand(1, 4000, 64)
    chances = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1][None]
    found = gradients._loss_gradient(head, states, chances)[0]
    assert found.mean(0).norm() < 0.01 * found.norm(dim=1).mean()


def test_float16_runs_in_bfloat16(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "model", dtype="float16", tokenizer=False)
    halves, brains = (list(by_linear(streamed(path, ROWS, dtype=dtype))) for dtype in (torch.float16, torch.bfloat16))
    assert all(torch.equal(left[-1], right[-1]) for left, right in zip(halves, brains, strict=True))


def test_a_block_that_breaks_is_named(tmp_path: Path) -> None:
    config = tiny.make_config("LlamaForCausalLM")
    tensors = tiny.make_tensors(config, 0, torch.float32)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("inf")
    path = tiny.write_model(tmp_path / "model", tokenizer=False)
    tiny.write_tensors(path, tensors)
    with pytest.raises(CalibrationError, match="block 1 gives NaN or infinity in calibration row 0"):
        streamed(path, ROWS)


@pytest.mark.parametrize("vocabulary", [3, 512, 1300])
def test_labels_are_where_the_sum_of_probabilities_passes_the_chance(vocabulary: int) -> None:
    random = torch.Generator().manual_seed(vocabulary)
    probabilities = torch.randn(400, vocabulary, generator=random).mul(3).softmax(-1)
    probabilities[:100, vocabulary // 2 :] = 0
    chances = torch.rand(400, dtype=torch.float64, generator=random)
    chances[:2] = torch.tensor([0.0, 1 - 2**-53])
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    slow = (sums <= chances[:, None] * sums[:, -1:]).sum(-1).clamp(max=vocabulary - 1)
    labels = gradients.draw_labels(probabilities, chances)
    assert labels[0] == slow[0]
    assert torch.equal(labels[2:], slow[2:])
    assert bool((probabilities.gather(1, labels[:, None]) > 0).all())
