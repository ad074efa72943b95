"""Whole checkpoints that other tools wrote: the logits of the runtime against those of independent implementations.

The float32 target is a dense transformers model with the dequantized weights; only the order of sums differs from it.
Against a float16 run the tolerance is what half-precision arithmetic moves.
"""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import quantkit

HERE = Path(__file__).parents[1] / "golden"
SAME, HALF_PRECISION = 1e-4, 5e-3


def test_gptq_model_of_auto_round() -> None:
    folder = HERE / "gptq" / "model-ar-w4-g128-sym"
    expected = load_file(folder / "expected.safetensors")
    logits = quantkit.load(folder)(expected["input_ids"])
    assert float((logits - expected["logits_ref_fp32"]).abs().max()) < SAME
    assert float((logits - expected["logits_gptqmodel"]).abs().max()) < HALF_PRECISION


@pytest.mark.parametrize(("model", "linears"), [("tiny-llama", 15), ("llama-3.3bpw", 15)])
def test_exl2_models_of_exllamav2(model: str, linears: int) -> None:
    """Weights bit for bit, by their digests; logits to the order of sums."""
    path = HERE / "exl2" / f"{model}.expected.safetensors"
    expected = load_file(path)
    with safe_open(path, "pt") as file:
        digests = dict(file.metadata())
    assert len(digests) == linears
    checkpoint = quantkit.open_checkpoint(HERE / "exl2" / model)
    for name, digest in digests.items():
        weight = checkpoint.linear(name).dequantize().t().contiguous()
        assert hashlib.sha256(weight.numpy().tobytes()).hexdigest() == digest, name
    logits = quantkit.load(HERE / "exl2" / model)(expected["input_ids"])
    wrong = (logits - expected["logits_ref_fp32"]).abs().max()
    assert float(wrong) < SAME * max(1.0, float(expected["logits_ref_fp32"].abs().max()))


def test_token_by_token_is_the_same_as_all_at_once() -> None:
    """One row and many rows take different kernels, with the same weights."""
    folder = HERE / "gptq" / "model-ar-w4-g128-sym"
    ids = load_file(folder / "expected.safetensors")["input_ids"][:1, :4]
    model = quantkit.load(folder)
    single = torch.cat([model(ids[:, : n + 1])[:, -1:] for n in range(4)], dim=1)
    assert torch.allclose(single, model(ids), atol=1e-5)


def _full_set() -> list[Path]:
    root = os.environ.get("QUANTKIT_GOLDEN")
    return sorted(Path(root).glob("gptq/*/case.json")) if root else []


@pytest.mark.proof
def test_the_full_set_is_there() -> None:
    if "QUANTKIT_GOLDEN" not in os.environ:
        pytest.skip("QUANTKIT_GOLDEN does not name a folder of golden checkpoints")
    assert len(_full_set()) == 19


@pytest.mark.proof
@pytest.mark.parametrize("case", _full_set(), ids=lambda path: path.parent.name)
def test_full_checkpoints(case: Path) -> None:
    folder = case.parent
    expected = load_file(folder / "expected.safetensors")
    checkpoint = quantkit.open_checkpoint(folder)
    modules = [name.removeprefix("dequant.") for name in expected if name.startswith("dequant.")]
    assert len(modules) >= 14
    for module in modules:
        assert torch.equal(checkpoint.dense(module), expected[f"dequant.{module}"]), module
    logits = quantkit.load(folder)(expected["input_ids"])
    assert float((logits - expected["logits_ref_fp32"]).abs().max()) < SAME
    assert float((logits - expected["logits_gptqmodel"]).abs().max()) < HALF_PRECISION
