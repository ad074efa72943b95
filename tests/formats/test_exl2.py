"""EXL2 linears: files that ExLlamaV2 wrote, what is refused, and that encoding gives back the bytes."""

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from quantkit import kernels
from quantkit.errors import FormatError
from quantkit.formats import exl2
from quantkit.formats.exl2 import Exl2Tensor

GOLDEN = sorted(
    path for path in (Path(__file__).parents[1] / "golden" / "exl2").glob("*_k*.safetensors")
)


def _golden(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """The layer's tensors by suffix, everything else, and the facts about it."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
        facts = file.metadata()
    layer = {name.removeprefix("layer."): tensor for name, tensor in tensors.items() if name.startswith("layer.")}
    return layer, tensors, facts


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def test_all_cases_are_here() -> None:
    assert len(GOLDEN) == 20


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_layers_dequantize_bit_for_bit(path: Path) -> None:
    layer, _, facts = _golden(path)
    assert exl2.recognise(layer)
    padded = exl2.decode("m", layer)
    assert _digest(padded.dequantize()) == facts["dequantized_sha256"]
    decoded = exl2.decode("m", layer, int(facts["out_features"]))
    weight = decoded.dequantize()
    assert weight.shape == (decoded.in_features, int(facts["out_features"]))
    assert torch.equal(weight, padded.dequantize()[:, : weight.shape[1]])
    if "codes_sha256" in facts:
        assert _digest(decoded.codes().q) == facts["codes_sha256"]
    for m in (1, 40):
        x = torch.randn(m, decoded.in_features, generator=torch.Generator().manual_seed(m))
        expected = x @ weight.float() + (0 if decoded.bias is None else decoded.bias.float())
        assert torch.allclose(decoded.matmul(x), expected, atol=1e-4 * float(expected.std()))
    for suffix, tensor in decoded.tensors().items():  # unchanged by what was computed from them
        assert torch.equal(tensor, layer[suffix]), suffix


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_encoding_decoded_codes_gives_the_same_bytes(path: Path) -> None:
    layer, _, _ = _golden(path)
    decoded = exl2.decode("m", layer)
    encoded = exl2.encode(decoded.codes(), decoded.bias)
    assert encoded.tensors().keys() == layer.keys()
    for suffix, tensor in encoded.tensors().items():
        assert tensor.dtype == layer[suffix].dtype
        assert torch.equal(tensor, layer[suffix]), suffix
    assert encoded.stored_bits == decoded.stored_bits == sum(tensor.nbytes * 8 for tensor in layer.values())


def test_padding_is_written_as_exact_zeros() -> None:
    path = next(path for path in GOLDEN if "padded" in path.stem)
    layer, _, facts = _golden(path)
    codes = exl2.decode("m", layer, int(facts["out_features"])).codes()
    encoded = exl2.encode(codes, torch.ones(40, dtype=torch.float16))
    assert encoded.out_features == 40
    assert torch.equal(encoded.tensors()["q_weight"], layer["q_weight"])
    whole = exl2.decode("m", encoded.tensors())
    assert whole.out_features == 64
    assert not whole.dequantize()[:, 40:].any()
    assert encoded.tensors()["bias"].tolist() == [1] * 40 + [0] * 24


def test_original_gemm_kernel_agrees() -> None:
    """Its sums are in half precision: 0.1 at magnitudes of 20."""
    layer, tensors, _ = _golden(next(path for path in GOLDEN if path.stem.startswith("codes_all")))
    found = exl2.decode("m", layer).matmul(tensors["in.x"].float())
    assert torch.allclose(found, tensors["ref.y_gemm"].float(), atol=0.1)


def test_a_stored_permutation_is_ignored() -> None:
    layer, _, facts = _golden(GOLDEN[0])
    decoded = exl2.decode("m", {**layer, "q_perm": torch.zeros_like(layer["q_invperm"])})
    assert _digest(decoded.dequantize()) == facts["dequantized_sha256"]
    assert "q_perm" not in decoded.tensors()


# --- refusals


def _layer() -> dict[str, Tensor]:
    """Widths 8, 6, 5, 4, 3, 2: groups of 32 rows, 16 of them."""
    return _golden(next(path for path in GOLDEN if path.stem.startswith("mix865432")))[0]


def _changed(suffix: str, index: int, value: int) -> dict[str, Tensor]:
    tensor = _layer()[suffix].clone()
    tensor[index] = value
    return {suffix: tensor}


REFUSALS = {
    "missing order": ({"q_invperm": None}, "`m` has no tensor `m.q_invperm`"),
    "wrong dtype": ({"q_groups": torch.zeros(32, dtype=torch.int32)}, "`m.q_groups`: expected int16, found int32"),
    "odd groups": ({"q_groups": torch.zeros(31, dtype=torch.int16)}, "`m.q_groups`: expected pairs of width"),
    "width 7": (_changed("q_groups", 0, 7), "group 0 of `m.q_groups`: expected 2, 3, 4, 5, 6 or 8 bits, found 7"),
    "width that does not fit its rows": (_changed("q_groups", 4, 8), "group 2 of `m.q_groups`.*no multiple of 32 rows"),
    "first start": (_changed("q_groups", 1, 1), "group 0 of `m.q_groups`: starts do not match"),
    "start before the last": (_changed("q_groups", 3, 0), "group 0 of `m.q_groups`: starts do not match"),
    "start beyond the end": (_changed("q_groups", 31, 500), "group 1[45] of `m.q_groups`"),
    "order not a permutation": (_changed("q_invperm", 0, 1), "`m.q_invperm` is no permutation of 0 … 511"),
    "order with a gap": (_changed("q_invperm", 0, 512), "`m.q_invperm` is no permutation of 0 … 511"),
    "short order": ({"q_invperm": torch.arange(480, dtype=torch.int32)}, "`m.q_invperm`: expected 512 numbers, one for each row"),
    "NaN maximum": (_changed("q_scale_max", 0, float("nan")), "`m.q_scale_max`: expected 16 finite numbers"),
    "short scales": ({"q_scale": torch.zeros(15, 8, dtype=torch.int32)}, r"`m.q_scale`: expected shape \[16, 8\]"),
    "odd columns": ({"q_weight": torch.zeros(224, 63, dtype=torch.int32)}, "`m.q_weight`: expected a matrix of a multiple of 32 columns"),
    "long bias": ({"bias": torch.zeros(65)}, r"`m.bias`: expected shape \[64\]"),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_faults_are_named(fault: str) -> None:
    changes, message = REFUSALS[fault]
    tensors = {suffix: tensor for suffix, tensor in {**_layer(), **changes}.items() if tensor is not None}
    with pytest.raises(FormatError, match=message):
        exl2.decode("m", tensors)


def test_widths_must_descend() -> None:
    groups = torch.tensor([4, 0, 5, 4], dtype=torch.int16)
    tensors = {
        "q_weight": torch.zeros(9, 32, dtype=torch.int32),
        "q_scale": torch.zeros(2, 4, dtype=torch.int32),
        "q_scale_max": torch.ones(2, dtype=torch.float16),
        "q_groups": groups,
        "q_invperm": torch.arange(64, dtype=torch.int32),
    }
    with pytest.raises(FormatError, match=r"group 1 of `m\.q_groups`: widths must descend, found 5 after 4 bits"):
        exl2.decode("m", tensors)
    tensors["q_groups"] = torch.tensor([5, 0, 4, 5], dtype=torch.int16)
    assert exl2.decode("m", tensors).in_features == 64


@pytest.mark.parametrize("true", [31, 32, 65, 100])
def test_a_width_that_padding_does_not_explain_is_refused(true: int) -> None:
    with pytest.raises(FormatError, match=f"`m.q_weight`: expected {true} columns, padded to 32, found 64"):
        exl2.decode("m", _layer(), true)


def test_more_inputs_than_a_permutation_can_name_are_refused() -> None:
    """Five groups of 32832 rows at 8 bits; the last start is beyond 32767, so that as int16 it is negative."""
    starts = torch.tensor([number for group in range(5) for number in (8, group * 8208)], dtype=torch.int32)
    tensors = {
        "q_weight": torch.zeros(5 * 8208, 32, dtype=torch.int32),
        "q_scale": torch.zeros(5, 4, dtype=torch.int32),
        "q_scale_max": torch.ones(5, dtype=torch.float16),
        "q_groups": starts.to(torch.int16),
        "q_invperm": torch.arange(5 * 32832, dtype=torch.int32),
    }
    with pytest.raises(FormatError, match=r"`m\.q_invperm`: 164160 inputs are more than the 65536"):
        exl2.decode("m", tensors)


@settings(max_examples=20, deadline=None)
@given(
    widths=st.lists(st.sampled_from(((8, 32), (6, 64), (5, 32), (4, 32), (3, 64), (2, 32))), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
    out=st.integers(1, 70),
)
def test_any_weight_survives_encoding(widths: list[tuple[int, int]], seed: int, out: int) -> None:
    random = torch.Generator().manual_seed(seed)
    groups = sorted(widths, key=lambda group: -group[0])
    rows, padded = sum(count for _, count in groups), -(-out // 32) * 32
    backend = kernels.backend("cpu", "reference")
    words, pairs = [], []
    for bits, count in groups:
        pairs += [bits, sum(len(run) for run in words)]
        words.append(backend.pack(torch.randint(0, 1 << bits, (count, padded), dtype=torch.uint8, generator=random), bits))
    tensors = {
        "q_weight": torch.cat(words),
        "q_scale": torch.randint(-(2**31), 2**31 - 1, (len(groups), padded // 8), dtype=torch.int32, generator=random),
        "q_scale_max": torch.rand(len(groups), generator=random).to(torch.float16),
        "q_groups": torch.tensor(pairs, dtype=torch.int16),
        "q_invperm": torch.randperm(rows, generator=random).to(torch.int32),
    }
    decoded = exl2.decode("m", tensors, out)
    encoded: Exl2Tensor = exl2.encode(decoded.codes())
    assert torch.equal(encoded.dequantize(), decoded.dequantize())
    assert torch.equal(decoded.codes().dequantize().to(torch.float16), decoded.dequantize())
    decoded.matmul(torch.randn(1, rows))  # repacks
    assert all(torch.equal(tensor, tensors[suffix]) for suffix, tensor in decoded.tensors().items())
