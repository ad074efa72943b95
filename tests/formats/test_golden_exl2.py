"""The full set of files that ExLlamaV2 wrote, tensor by tensor: `QUANTKIT_GOLDEN` names the folder they are in.

The tests of every day hold smaller copies of the same files to digests; see `tests/golden/exl2/README.md`.
"""

import os
import statistics
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import quantkit
from quantkit.formats import exl2
from quantkit.formats.exl2 import Exl2Codec
from quantkit.kernels.protocol import WIDTHS
from quantkit.solver.gptq import solve
from quantkit.solver.inverse import factor

ROOT = Path(os.environ.get("QUANTKIT_GOLDEN", "."))
LAYERS = sorted((ROOT / "exl2").glob("*_k*.safetensors")) if "QUANTKIT_GOLDEN" in os.environ else []
CHECKPOINTS = {
    "tiny-llama": ("exl2/tiny-llama", "exl2/tiny-llama.dequant.safetensors", "exl2/tiny-llama.logits.safetensors"),
    "llama-3.3bpw": ("exl2-checkpoint/llama-3.3bpw", *["exl2-checkpoint/llama-3.3bpw/expected.safetensors"] * 2),
}
pytestmark = pytest.mark.proof


@pytest.fixture(autouse=True)
def full_set() -> None:
    if "QUANTKIT_GOLDEN" not in os.environ:
        pytest.skip("QUANTKIT_GOLDEN does not name a folder of golden files")


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """The layer's tensors by suffix, everything else, and the facts about it."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        facts = dict(file.metadata() or {})
    return {name.removeprefix("layer."): tensors[name] for name in tensors if name.startswith("layer.")}, tensors, facts


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.contiguous().view(torch.int16), right.contiguous().view(torch.int16))


def test_all_layers_are_here() -> None:
    assert len(LAYERS) == 20


@pytest.mark.parametrize("path", LAYERS, ids=lambda path: path.stem)
def test_layers_bit_for_bit_and_back(path: Path) -> None:
    layer, tensors, facts = read(path)
    decoded = exl2.decode("m", layer)
    assert same_bits(decoded.dequantize(), tensors["ref.dequant"])
    codes = decoded.codes()
    if "ref.codes" in tensors:
        assert torch.equal(codes.q[:, : tensors["ref.codes"].shape[1]], tensors["ref.codes"])
    if "ref.perm" in tensors:
        assert torch.equal(codes.order, tensors["ref.perm"].long())
    if "ref.qscale_plus1" in tensors:
        stored = torch.stack([grid.stored["q_scale"] for grid in codes.grids])
        assert torch.equal(stored + 1, tensors["ref.qscale_plus1"])
        assert {int(bits) for bits in tensors["layer.q_groups"][::2]} == set(WIDTHS)
    encoded = exl2.encode(codes, decoded.bias).tensors()
    assert encoded.keys() == layer.keys()
    assert all(torch.equal(encoded[suffix], layer[suffix]) for suffix in layer)
    if "bpw" in facts and "out_features" in facts and int(facts["out_features"]) == decoded.out_features:
        assert decoded.bits_per_weight == pytest.approx(float(facts["bpw"]), rel=0.01)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_models_bit_for_bit_and_their_logits(name: str) -> None:
    folder, weights, outputs = (ROOT / part for part in CHECKPOINTS[name])
    checkpoint, expected, logits = quantkit.open_checkpoint(folder), load_file(weights), load_file(outputs)
    linears = [*checkpoint.linears(), "lm_head"]
    for linear in linears:
        assert same_bits(checkpoint.dense(linear), expected[f"{linear}.weight"] if f"{linear}.weight" in expected else expected[linear])
    reference = logits["logits"] if "logits" in logits else logits["ref.logits_dequant_fp32"]
    found = quantkit.load(folder)(logits["input_ids"])
    assert len(linears) == 15
    assert float((found - reference).abs().max()) < 1e-4 * max(1.0, float(reference.abs().max()))


def test_weighted_errors_on_the_stored_inputs() -> None:
    """Below ExLlamaV2's in every case, by a tenth or more in the median; same weight, Hessian and layout."""
    ratios = {}
    for path in LAYERS:
        layer, tensors, facts = read(path)
        if "in.hessian_sum" not in tensors:
            continue
        weight = tensors["in.weight"].float().t().contiguous()
        hessian = tensors["in.hessian_sum"] / float(facts["num_batches"])
        codec = Exl2Codec(exl2.decode("m", layer).codes().layout)
        solved = codec.encode(solve(weight, factor(hessian), codec).codes, None).dequantize()
        wrong = (weight - solved.float()).double()
        ratios[path.stem] = float((wrong * (hessian.double() @ wrong)).sum()) / float(facts["hessian_weighted_error"])
    print(ratios, statistics.median(ratios.values()))
    assert len(ratios) >= 5
    assert max(ratios.values()) < 1
    assert statistics.median(ratios.values()) <= 0.9
