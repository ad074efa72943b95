"""GPTQ linears: files of other tools, bytes by hand, round trips, refusals."""

import dataclasses
import hashlib
import itertools
import json
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from quantkit.errors import FormatError
from quantkit.formats import gptq
from quantkit.formats.codec import Codes
from quantkit.formats.gptq import GptqCodec, GptqConfig, GptqSettings, GptqTensor
from quantkit.formats.gptq_zeros import read_zeros, write_zeros

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "gptq").glob("*.safetensors"))


def solved(codec: GptqCodec, weight: Tensor, *, order: Tensor | None = None) -> Codes:
    """Nearest rounding of weight [in, out], rows taken in `order`."""
    rows, layout = weight.shape[0], codec.layout(weight.shape[0])
    order = torch.arange(rows) if order is None else order
    q, grids = [], []
    for group, start, end in layout.spans():
        grid = codec.fit(weight[order[start:end]], group.bits, None)
        q.append(grid.quantize(weight[order[start:end]]))
        grids.append(grid)
    return Codes(torch.cat(q), tuple(grids), layout, order)


def some_weight(rows: int, out: int, seed: int = 0) -> Tensor:
    """With an output that is never negative, one never positive and one all zero."""
    weight = torch.randn(rows, out, generator=torch.Generator().manual_seed(seed)) * 0.05
    weight[:, 3], weight[:, 6], weight[:, 9] = weight[:, 3].abs(), -weight[:, 6].abs(), 0
    return weight


def stored(bits: int = 4, group_size: int = 32, *, rows: int = 64, out: int = 32, **options) -> tuple[GptqTensor, GptqSettings]:
    codec = GptqCodec(bits, group_size, **options)
    order = None
    if codec.act_order:
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    return codec.encode(solved(codec, some_weight(rows, out), order=order), None), codec.settings


# --- files that other tools wrote


def test_all_cases_are_here() -> None:
    assert len(GOLDEN) == 19


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_layers_dequantize_bit_for_bit(path: Path) -> None:
    with safe_open(path, "pt") as file:
        facts, names = file.metadata(), list(file.keys())
        tensors = {name: file.get_tensor(name) for name in names}
    config = GptqConfig.read(json.loads(facts["quantization_config"]))
    digests = json.loads(facts["dequantized_sha256"])
    assert digests
    for module, digest in digests.items():
        own = {name.removeprefix(f"{module}."): tensors[name] for name in names if name.startswith(f"{module}.")}
        assert gptq.recognise(own)
        decoded = gptq.decode(module, own, config.for_module(module))
        weight = decoded.dequantize().t().contiguous() + 0.0  # negative zero is zero
        assert hashlib.sha256(weight.numpy().tobytes()).hexdigest() == digest, module
        x = torch.randn(2, decoded.in_features)
        expected = x @ weight.t().float() + (0 if decoded.bias is None else decoded.bias.float())
        assert torch.allclose(decoded.matmul(x), expected, atol=1e-5)
        for suffix, tensor in decoded.tensors().items():  # unchanged by what was computed from them
            assert torch.equal(tensor, own[suffix]), suffix
        assert decoded.stored_bits == sum(tensor.nbytes * 8 for tensor in own.values())


def test_a_writer_recomputes_the_bytes_of_other_tools() -> None:
    """Zero points of every golden case, decoded and written again, are the words of the file."""
    rewritten = 0
    for path in GOLDEN:
        with safe_open(path, "pt") as file:
            config = GptqConfig.read(json.loads(file.metadata()["quantization_config"]))
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                if name.endswith(".qzeros"):
                    chosen = config.for_module(name.removesuffix(".qzeros"))
                    words = file.get_tensor(name)
                    zeros = read_zeros(words, chosen)
                    if chosen.checkpoint_format == "gptq_v2" or bool((zeros > 0).all()):
                        assert torch.equal(write_zeros(zeros, chosen.bits, chosen), words)
                        rewritten += 1
    assert rewritten > 60


@pytest.mark.parametrize(("written", "labelled"), [("gptq_v2", "gptq"), ("gptq", "gptq_v2")])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_wrong_label_is_noticed_in_symmetric_files(bits: int, written: str, labelled: str) -> None:
    tensor, _ = stored(bits, checkpoint_format=written)
    with pytest.raises(FormatError, match=f"its words follow `{written}`, but `checkpoint_format` says `{labelled}`"):
        gptq.decode("m", tensor.tensors(), GptqSettings(bits, 32, checkpoint_format=labelled))


# --- what is written


ENCODINGS = list(itertools.product((2, 3, 4, 8), (32, 64, -1), (True, False), (True, False)))


@pytest.mark.parametrize(("bits", "group_size", "sym", "act_order"), ENCODINGS)
def test_encoded_codes_come_back(bits: int, group_size: int, sym: bool, act_order: bool) -> None:
    weight = some_weight(96, 64)
    codec = GptqCodec(bits, group_size, sym, act_order)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(2)) if act_order else None
    codes = solved(codec, weight, order=order)
    tensor = codec.encode(codes, None)
    expected = codes.dequantize().to(torch.float16)
    assert torch.equal(tensor.dequantize(), expected)
    tensors = tensor.tensors()
    assert {suffix: (t.dtype, tuple(t.shape)) for suffix, t in tensors.items()} == {
        "qweight": (torch.int32, (96 * bits // 32, 64)),
        "qzeros": (torch.int32, (len(codes.grids), 64 * bits // 32)),
        "scales": (torch.float16, (len(codes.grids), 64)),
        "g_idx": (torch.int32, (96,)),
    }
    again = gptq.decode("m", tensors, codec.settings)
    assert torch.equal(again.dequantize(), expected)
    assert tensor.stored_bits == again.stored_bits == codec.stored_bits(96, 64, bias=False)
    size = 96 if group_size == -1 else group_size
    assert torch.equal(tensors["g_idx"][codes.order], torch.arange(96, dtype=torch.int32) // size)


def test_v1_asymmetric_keeps_its_zero_points_above_zero() -> None:
    tensor, chosen = stored(4, sym=False, checkpoint_format="gptq")
    assert int(read_zeros(tensor.tensors()["qzeros"], chosen).min()) >= 1


def test_symmetric_is_written_as_v1_and_asymmetric_as_v2() -> None:
    assert GptqCodec(sym=True).checkpoint_format == "gptq"
    assert GptqCodec(sym=False).checkpoint_format == "gptq_v2"


def test_bias_is_written_as_float16_and_added() -> None:
    codec, weight = GptqCodec(4, 32), some_weight(32, 32)
    bias = torch.linspace(-1, 1, 32, dtype=torch.bfloat16)
    tensor = codec.encode(solved(codec, weight), bias)
    assert tensor.tensors()["bias"].dtype == torch.float16
    assert torch.allclose(tensor.matmul(torch.zeros(2, 32)), bias.float())
    assert tensor.stored_bits == codec.stored_bits(32, 32, bias=True)


def test_groups_solved_in_another_order_are_numbered_by_place() -> None:
    """Reordering whole groups, and rows within them, needs no act-order file."""
    codec, weight = GptqCodec(4, 32), some_weight(96, 32)
    order = torch.cat([torch.arange(64, 96).flip(0), torch.arange(0, 32), torch.arange(32, 64)])
    codes = solved(codec, weight, order=order)
    tensor = codec.encode(codes, None)
    assert torch.equal(tensor.tensors()["g_idx"], torch.arange(96, dtype=torch.int32) // 32)
    assert torch.equal(tensor.dequantize(), codes.dequantize().to(torch.float16))


def test_scattered_groups_need_act_order() -> None:
    codec, weight = GptqCodec(4, 32), some_weight(64, 32)
    codes = solved(codec, weight, order=torch.arange(64).view(2, 32).t().flatten())
    with pytest.raises(FormatError, match="only an act-order file can hold groups of scattered rows"):
        codec.encode(codes, None)


@pytest.mark.parametrize(("shape", "side"), [((48, 32), "48 input"), ((32, 40), "40 output")])
def test_shapes_that_cannot_be_packed_are_refused_in_words(shape: tuple[int, int], side: str) -> None:
    refusal = GptqCodec().refusal(*shape)
    assert refusal is not None
    assert refusal.startswith(f"{side} features are not a multiple of 32")
    assert GptqCodec().refusal(32, 64) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "2, 3, 4 or 8 bits, not 5"),
        ({"group_size": 0}, "group size 0"),
        ({"group_size": 2**31}, "group size 2147483648 is larger than any weight"),
        ({"checkpoint_format": "v3"}, "found `v3`"),
    ],
)
def test_codec_refuses_what_no_file_holds(options: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        GptqCodec(**options)


def test_a_group_larger_than_the_weight_is_one_group() -> None:
    tensor, chosen = stored(group_size=1000)
    for group_size in (1000, -1, 10**30):
        decoded = gptq.decode("m", tensor.tensors(), dataclasses.replace(chosen, group_size=group_size))
        assert torch.equal(decoded.dequantize(), tensor.dequantize())


@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from((2, 3, 4, 8)),
    rows=st.integers(1, 4).map(lambda n: 32 * n),
    out=st.integers(1, 3).map(lambda n: 32 * n),
    group_size=st.sampled_from((-1, 16, 32, 48, 64)),
    sym=st.booleans(),
    act_order=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_written_linear_reads_back_equal(bits, rows, out, group_size, sym, act_order, seed) -> None:
    codec = GptqCodec(bits, group_size, sym, act_order)
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=random) if act_order else None
    codes = solved(codec, some_weight(rows, out, seed), order=order)
    tensor = codec.encode(codes, torch.randn(out, generator=random))
    again = gptq.decode("m", tensor.tensors(), codec.settings)
    assert torch.equal(again.dequantize(), codes.dequantize().to(torch.float16))
    x = torch.randn(3, rows, generator=random)
    assert torch.allclose(again.matmul(x), x @ again.dequantize().float() + again.bias.float(), atol=1e-4)
    assert torch.equal(again.tensors()["qweight"], tensor.tensors()["qweight"])


@pytest.mark.parametrize("use", [lambda tensor: tensor.matmul(torch.zeros(1, 64)), GptqTensor.repack])
def test_codes_are_in_memory_once(use) -> None:
    """The words as on disk are let go when they are repacked, and made again when they are asked for."""
    tensor, _ = stored(act_order=True)
    words = tensor.tensors()["qweight"]
    before, gone = words.clone(), weakref.ref(words)
    del words
    use(tensor)
    assert gone() is None
    assert torch.equal(tensor.tensors()["qweight"], before)


# --- what is read


def test_missing_or_all_zero_g_idx_means_groups_in_sequence() -> None:
    tensor, chosen = stored()
    for g_idx in (None, torch.zeros(64, dtype=torch.int32)):
        tensors = {**tensor.tensors(), "g_idx": g_idx}
        if g_idx is None:
            del tensors["g_idx"]
        decoded = gptq.decode("m", tensors, chosen)
        assert torch.equal(decoded.dequantize(), tensor.dequantize())
        assert decoded.tensors().keys() == tensors.keys()


def test_act_order_without_its_g_idx_is_refused() -> None:
    tensor, chosen = stored(act_order=True)
    for g_idx, message in ((None, "is absent"), (torch.zeros(64, dtype=torch.int32), "is all zeros")):
        tensors = {name: own for name, own in {**tensor.tensors(), "g_idx": g_idx}.items() if own is not None}
        with pytest.raises(FormatError, match=f"`m.g_idx` {message}, but `desc_act` is true.* of 2 groups") as caught:
            gptq.decode("m", tensors, chosen)
        assert '"desc_act": false' in caught.value.hint
        in_sequence = gptq.decode("m", tensors, dataclasses.replace(chosen, act_order=False))
        assert torch.equal(in_sequence.row_groups, torch.arange(64) // 32)


def test_negative_g_idx_counts_from_the_last_group() -> None:
    tensor, chosen = stored(act_order=True)
    g_idx = tensor.tensors()["g_idx"]
    decoded = gptq.decode("m", {**tensor.tensors(), "g_idx": torch.where(g_idx == 1, -1, g_idx).to(torch.int32)}, chosen)
    assert torch.equal(decoded.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_other_float_types(dtype: torch.dtype) -> None:
    tensor, chosen = stored()
    scales = (tensor.tensors()["scales"].double() * 1.0003).to(dtype)
    decoded = gptq.decode("m", {**tensor.tensors(), "scales": scales}, chosen)
    steps = tensor.dequantize().double() / tensor.tensors()["scales"].double().repeat_interleave(32, 0)
    expected = (steps.nan_to_num().round() * scales.double().repeat_interleave(32, 0)).to(torch.float16)
    assert torch.equal(decoded.dequantize(), expected)
    assert torch.allclose(decoded.matmul(torch.eye(64)), expected.float(), atol=1e-6)


def test_a_zero_scale_gives_zeros() -> None:
    tensor, chosen = stored(sym=False)
    assert not tensor.dequantize()[:, 9].any()  # an all-zero output
    scales = torch.zeros_like(tensor.tensors()["scales"])
    assert not gptq.decode("m", {**tensor.tensors(), "scales": scales}, chosen).dequantize().any()


def _refusals() -> dict[str, tuple[dict[str, Tensor | None], GptqSettings, str]]:
    tensor, chosen = stored()
    own = tensor.tensors()
    bad_scales, infinite = own["scales"].clone(), own["scales"].clone()
    far, below = own["g_idx"].clone(), own["g_idx"].clone()
    bad_scales[1, 5], infinite[0, 0], far[7], below[9] = float("nan"), -float("inf"), 2, -3
    return {
        "no scales": ({"scales": None}, chosen, "`m` has no tensor `m.scales`"),
        "float qweight": ({"qweight": own["scales"]}, chosen, r"`m.qweight`: expected an int32 matrix, found float16 of shape"),
        "wrong bits": ({}, GptqSettings(8, 32), r"`m.scales`: expected floats of shape \[1, 32\] at group size 32, found"),
        "odd rows": ({}, GptqSettings(3, 32), r"`m.qweight` \[8, 32\] at 3 bits: 85 input features are not a multiple of 32"),
        "wrong group size": ({}, GptqSettings(4, 16), r"`m.scales`: expected floats of shape \[4, 32\] at group size 16"),
        "narrow zeros": ({"qzeros": own["qzeros"][:, :3]}, chosen, r"`m.qzeros`: expected shape \[2, 4\], found int32 of shape"),
        "NaN scale": ({"scales": bad_scales}, chosen, "`m.scales` holds NaN or infinity"),
        "infinite scale": ({"scales": infinite}, chosen, "`m.scales` holds NaN or infinity"),
        "wide zeros": ({"qzeros": own["qzeros"].repeat(1, 2)}, chosen, r"`m.qzeros`: expected shape \[2, 4\], found int32"),
        "integer scales": ({"scales": own["scales"].int()}, chosen, "`m.scales`: expected floats"),
        "short g_idx": ({"g_idx": own["g_idx"][:-1]}, chosen, r"`m.g_idx`: expected integers of shape \[64\]"),
        "group beyond the last": ({"g_idx": far}, chosen, "`m.g_idx` names group 2, but there are 2 groups"),
        "group below the first": ({"g_idx": below}, chosen, "`m.g_idx` names group -3, but there are 2 groups"),
        "long bias": ({"bias": torch.zeros(33)}, chosen, r"`m.bias`: expected floats of shape \[32\]"),
    }


@pytest.mark.parametrize("fault", _refusals())
def test_faults_are_named(fault: str) -> None:
    changed, chosen, message = _refusals()[fault]
    tensors = {**stored()[0].tensors(), **changed}
    with pytest.raises(FormatError, match=message) as caught:
        gptq.decode("m", {suffix: tensor for suffix, tensor in tensors.items() if tensor is not None}, chosen)
    assert caught.value.hint


def test_a_linear_that_a_rule_calls_dense_is_refused_when_it_is_quantized() -> None:
    with pytest.raises(FormatError, match="a `dynamic` rule says that `m` is not quantized"):
        gptq.decode("m", stored()[0].tensors(), None)


@pytest.mark.parametrize("act_order", [False, True])
def test_steps_and_other_scales(act_order: bool) -> None:
    """A weight is its steps times its scales, and other scales change nothing else."""
    from quantkit.solver.gptq import solve_together
    from quantkit.solver.inverse import factor

    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(64, 32, generator=generator), torch.randn(200, 64, generator=generator)
    codec = GptqCodec(bits=3, group_size=32, sym=False, act_order=act_order)
    (solution,) = solve_together([weight], factor(x.T @ x / 200), codec)
    stored = codec.encode(solution.codes, None)
    scales = stored.tensors()["scales"].float()
    rebuilt = (stored.steps() * scales[stored.row_groups]).half()
    assert torch.equal(rebuilt, stored.dequantize().half())
    other = stored.with_scales(1.5 * scales)
    assert torch.equal(other.dequantize().half(), (stored.steps() * (1.5 * scales).half().float()[stored.row_groups]).half())
    assert {name for name, tensor in other.tensors().items() if not torch.equal(tensor, stored.tensors()[name])} == {"scales"}
    with pytest.raises(FormatError, match="beyond what float16 holds"):
        stored.with_scales(scales * 1e8)
