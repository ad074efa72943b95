"""EXL2 linears: files that ExLlamaV2 wrote, what is refused, that encoding gives back the bytes, and writing against
ExLlamaV2's own quantizer on the same input."""

import hashlib
import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit import kernels
from quantkit.errors import FormatError
from quantkit.formats import exl2, exl2_config, exl2_grid, exl2_layout, exl2_mix
from quantkit.formats.codec import Codes, Grid, Group, Layout
from quantkit.formats.exl2 import Exl2Codec, Exl2Tensor, Width
from quantkit.kernels.protocol import WIDTHS
from quantkit.solver.gptq import Solution, solve
from quantkit.solver.inverse import factor

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


def _facts(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def _input(case: str) -> tuple[Tensor, Tensor]:
    """What was quantized: float32 [in, out], and the mean of the Hessian over batches, [in, in]."""
    with safe_open(INPUTS, "pt") as file:
        weight, triangle = file.get_tensor(f"{case}.weight"), file.get_tensor(f"{case}.hessian_sum")
    rows = weight.shape[1]
    hessian = torch.zeros(rows, rows)
    upper = torch.triu_indices(rows, rows)
    hessian[upper[0], upper[1]] = triangle / json.loads(_facts(INPUTS)[case])["num_batches"]
    return weight.to(torch.float32).t().contiguous(), hessian + hessian.triu(1).T


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
    layout = decoded.codes().layout
    assert exl2_layout.refusal(layout) is None
    assert exl2_layout.stored_bits(layout, decoded.out_features, decoded.bias is not None) == decoded.stored_bits


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


def test_every_code_and_scale_code_goes_both_ways() -> None:
    """Codes of all widths and all 16 scale codes, to words and back."""
    layer, _, _ = _golden(next(path for path in GOLDEN if path.stem.startswith("codes_all")))
    codes = exl2.decode("m", layer).codes()
    for bits in WIDTHS:
        spans = [codes.q[start:end] for group, start, end in codes.layout.spans() if group.bits == bits]
        assert torch.cat(spans).unique().tolist() == list(range(2**bits))
    scale_codes = torch.stack([grid.stored["q_scale"] for grid in codes.grids])
    assert scale_codes.unique().tolist() == list(range(16))
    again = exl2.decode("m", exl2.encode(codes).tensors()).codes()
    assert torch.equal(again.q, codes.q) and torch.equal(again.order, codes.order)
    assert torch.equal(torch.stack([grid.stored["q_scale"] for grid in again.grids]), scale_codes)


# --- writing


INPUTS = Path(__file__).parents[1] / "golden" / "exl2" / "inputs.safetensors"
CASES = sorted(path.stem for path in GOLDEN if path.stem in _facts(INPUTS))


def _weighted_error(case: str, weight: Tensor) -> float:
    """tr(D H Dᵀ) of a dequantized weight [in, out], the float weight and its Hessian as they were quantized."""
    float_weight, hessian = _input(case)
    wrong = (float_weight - weight.to(torch.float32)).double()
    return float((wrong * (hessian.double() @ wrong)).sum())


def _solved(case: str) -> tuple[Solution, Exl2Tensor]:
    """Solved with damping 0.01 in the layout of the file, and encoded."""
    weight, hessian = _input(case)
    path = next(path for path in GOLDEN if path.stem == case)
    codec = Exl2Codec(exl2.decode("m", _golden(path)[0]).codes().layout)
    solution = solve(weight, factor(hessian, damping=0.01), codec)
    return solution, codec.encode(solution.codes, None)


def test_the_stored_error_is_measured_as_the_files_say() -> None:
    assert len(CASES) == 5
    for case in CASES:
        layer, _, _ = _golden(next(path for path in GOLDEN if path.stem == case))
        stored = json.loads(_facts(INPUTS)[case])["hessian_weighted_error"]
        assert _weighted_error(case, exl2.decode("m", layer).dequantize()) == pytest.approx(stored, rel=1e-5)


def test_weighted_errors_are_below_those_of_exllamav2() -> None:
    """Same weights, Hessians and layouts: below in every case, and by at least a tenth in the median."""
    ratios = []
    for case in CASES:
        solution, encoded = _solved(case)
        stored = json.loads(_facts(INPUTS)[case])["hessian_weighted_error"]
        ratios.append(_weighted_error(case, encoded.dequantize()) / stored)
        weight, hessian = _input(case)
        energy = float((weight.double() * (hessian.double() @ weight.double())).sum())
        assert solution.error == pytest.approx(_weighted_error(case, encoded.dequantize()) / energy, rel=0.01)
    assert max(ratios) < 0.9, ratios
    assert statistics.median(ratios) < 0.86, ratios


def test_what_is_written_is_what_was_solved() -> None:
    """Every value on disk is the solver's, rounded once; the order is by descending diagonal."""
    for case in CASES:
        solution, encoded = _solved(case)
        again = exl2.decode("m", encoded.tensors())
        assert torch.equal(again.dequantize(), solution.codes.dequantize().to(torch.float16))
        diagonal = _input(case)[1].diagonal()[again.codes().order]
        assert bool((diagonal.diff() <= 0).all())


@pytest.mark.parametrize("in_features", [96, 144, 320])
@pytest.mark.parametrize("out_features", [1, 40, 64])
def test_a_mix_is_solved_written_and_counted(in_features: int, out_features: int) -> None:
    codec = Exl2Codec((Width(8, 32, 0.2), Width(4, 64, 0.3), Width(2, 64, 0.5)))
    random = torch.Generator().manual_seed(in_features + out_features)
    weight = torch.randn(in_features, out_features, generator=random) * 0.02
    x = torch.randn(4 * in_features, in_features, generator=random) * torch.rand(in_features, generator=random)
    solution = solve(weight, factor(x.T @ x / len(x)), codec)
    bias = torch.randn(out_features, generator=random)
    assert codec.refusal(in_features, out_features) is None
    assert solution.codes.layout == codec.layout(in_features)
    encoded = codec.encode(solution.codes, bias)
    assert (encoded.in_features, encoded.out_features) == (in_features, out_features)
    assert encoded.stored_bits == codec.stored_bits(in_features, out_features, True)
    assert encoded.stored_bits == sum(tensor.nbytes * 8 for tensor in encoded.tensors().values())
    tensors = encoded.tensors()
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {**exl2.DTYPES, "bias": torch.float16}
    whole = exl2.decode("m", tensors)
    assert not whole.dequantize()[:, out_features:].any() and not tensors["bias"][out_features:].any()
    assert torch.equal(encoded.dequantize(), solution.codes.dequantize().to(torch.float16))
    assert torch.equal(encoded.matmul(torch.zeros(1, in_features))[0], bias.to(torch.float16).to(torch.float32))


def test_nearest_rounding_clips_nothing() -> None:
    weight = torch.randn(128, 32, generator=torch.Generator().manual_seed(0))
    solution = solve(weight, None, Exl2Codec((Width(5, 32, 0.25), Width(3, 32, 0.75))))
    for grid, (_, start, end) in zip(solution.codes.grids, solution.codes.layout.spans(), strict=True):
        miss = (weight[start:end] - grid.dequantize(solution.codes.q[start:end])).abs()
        assert bool((miss <= grid.scale * 0.5001).all())


def test_a_codec_of_one_layout_takes_only_its_rows() -> None:
    codec = Exl2Codec(Layout((Group(4, 64), Group(3, 32))))
    assert codec.refusal(96, 5) is None and codec.layout(96) is codec.mix
    assert codec.refusal(128, 5) == "the layout is for 96 input features, not for 128"
    with pytest.raises(FormatError, match="the layout is for 96 input features, not for 128"):
        codec.layout(128)
    with pytest.raises(FormatError, match="descending order, but group 1 has 4 bits after 3"):
        Exl2Codec(Layout((Group(3, 32), Group(4, 64))))
    with pytest.raises(FormatError, match="EXL2 holds 2, 3, 4, 5, 6 or 8 bits, not 7"):
        Exl2Codec((Width(7, 32),))


@pytest.mark.parametrize(
    ("in_features", "bits", "reason"),
    [(144, 4, "unless the last 16 rows have 2 bits, not 4"), (100, 2, "100 input features are not a multiple of 32")],
)
def test_rows_that_readers_would_get_wrong_are_never_packed(in_features: int, bits: int, reason: str) -> None:
    """144 rows at 4 bits would fill whole words: readers then return 16 rows of what lies behind the weight."""
    codec = Exl2Codec((Width(bits, 128),))
    assert reason in str(codec.refusal(in_features, 64))
    with pytest.raises(FormatError, match=reason):
        solve(torch.randn(in_features, 64), None, codec)
    groups = Layout((Group(bits, 96), Group(bits, in_features - 96)))
    grid = codec.fit(torch.randn(96, 64), bits, None)
    codes = Codes(torch.zeros(in_features, 64, dtype=torch.uint8), (grid, grid), groups, torch.arange(in_features))
    with pytest.raises(FormatError, match=reason):
        codec.encode(codes, None)


def test_a_bias_beyond_float16_is_refused() -> None:
    codec = Exl2Codec((Width(4, 32),))
    codes = solve(torch.randn(32, 2), None, codec).codes
    with pytest.raises(FormatError, match="a bias of 7e\\+04 does not fit float16"):
        codec.encode(codes, torch.tensor([7e4, 1.0]))


def test_the_configuration_has_what_readers_look_for() -> None:
    config = exl2_config.write(
        bits=4.0, bits_per_weight=3.99871, head_bits=6, rows=14, length=2048, dataset="text.txt", head_bits_per_weight=6.34
    )
    assert config["quant_method"] == "exl2" and config["bits"] == 4.0 and config["head_bits"] == 6
    assert config["calibration"] == {"rows": 14, "length": 2048, "dataset": "text.txt"}
    assert config["bits_per_weight"] == 3.99871 and config["head_bits_per_weight"] == 6.34
    assert json.loads(json.dumps(config)) == config


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


SHARES = st.lists(
    st.tuples(st.sampled_from(WIDTHS), st.sampled_from((-1, 32, 64, 96, 128)), st.floats(0.02, 1)), min_size=1, max_size=6
)


@settings(max_examples=25, deadline=None)
@given(mix=SHARES, steps=st.integers(1, 12), tail=st.booleans(), out=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_every_legal_mix_is_written_and_read(mix: list[tuple], steps: int, tail: bool, out: int, seed: int) -> None:
    """All six widths in any shares, a last group of 16 rows, outputs that are padded, a bias padded with them."""
    random = torch.Generator().manual_seed(seed)
    total = sum(share for *_, share in mix)
    widths = exl2_mix.held(
        [Width(bits, size, share / total) for bits, size, share in sorted(mix, key=lambda width: -width[0])],
        rows := 32 * steps + 16 * tail,
    )
    codec = Exl2Codec(widths)
    layout = codec.layout(rows)
    q = torch.cat([torch.randint(0, 1 << g.bits, (g.rows, out), dtype=torch.uint8, generator=random) for g in layout.groups])
    grids = tuple(_random_grid(group.bits, out, random) for group in layout.groups)
    codes = Codes(q, grids, layout, torch.randperm(rows, generator=random))
    bias = torch.randn(out, generator=random)
    encoded = codec.encode(codes, bias)
    again = exl2.decode("m", encoded.tensors(), out)
    assert torch.equal(again.codes().q, q) and torch.equal(again.codes().order, codes.order)
    assert again.codes().layout == layout
    assert torch.equal(again.dequantize(), codes.dequantize().to(torch.float16))
    assert torch.equal(again.bias, bias.to(torch.float16))
    whole = exl2.decode("m", encoded.tensors())
    assert whole.out_features % 32 == 0 and not whole.dequantize()[:, out:].any() and not whole.bias[out:].any()
    assert again.stored_bits == codec.stored_bits(rows, out, True)


def _random_grid(bits: int, out: int, random: torch.Generator) -> Grid:
    codes = torch.randint(0, 16, (out,), dtype=torch.uint8, generator=random)
    most = torch.rand((), generator=random).to(torch.float16)
    unit = (most.to(torch.float32) / 256).to(torch.float16).to(torch.float32)
    scale = exl2_grid.scales(codes + 1.0, unit)
    half = torch.full((out,), 1 << bits - 1, dtype=torch.int32)
    return Grid(scale, half, (1 << bits) - 1, {"q_scale": codes, "q_scale_max": most})


def test_shards_without_an_index_and_permutations_of_old_writers(tmp_path: Path) -> None:
    """Every linear lies in both shards; what `q_perm` holds does not matter."""
    source = Path(__file__).parents[1] / "golden" / "exl2" / "tiny-llama"
    tensors = load_file(source / "output.safetensors")
    for name in [name for name in tensors if name.endswith(".q_invperm")]:
        tensors[name.replace("q_invperm", "q_perm")] = torch.zeros_like(tensors[name])
    names = sorted(tensors)
    for shard in (0, 1):
        part = {name: tensors[name] for name in names[shard::2]}
        save_file(part, tmp_path / f"output-0000{shard + 1}-of-00002.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    spread, whole = quantkit.open_checkpoint(tmp_path), quantkit.open_checkpoint(source)
    for name in (*whole.linears(), "lm_head"):
        assert len({spread.info(tensor).file for tensor in spread.tensors_of(name)}) == 2
        assert torch.equal(spread.dense(name), whole.dense(name))
    ids = torch.arange(20)[None]
    assert torch.equal(quantkit.load(tmp_path)(ids), quantkit.load(source)(ids))
