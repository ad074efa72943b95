"""gptq-to-exl2 in its three ways: what is written, how close it is, what is refused, what stays behind."""

import json
import weakref
from pathlib import Path

import plain_exl2
import pytest
import tiny
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.checkpoint.decoded import DecodedCheckpoint
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.conversion import damage
from quantkit.commands.conversion.damage import Yardstick
from quantkit.commands.conversion.data_free import _order
from quantkit.errors import CheckpointError, UsageError
from quantkit.formats.exl2 import Exl2Tensor
from quantkit.progress import Silent
from quantkit.runtime.load import load_model

TEXT = {"samples": 8, "length": 64}
GOLDEN = Path(__file__).parents[2] / "golden" / "gptq" / "model-ar-w4-g128-sym"


@pytest.fixture(scope="module", autouse=True)
def _little_text():
    """What a tiny model says of a few hundred tokens is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(damage, "WINDOWS", 4)
        patch.setattr(damage, "LENGTH", 128)
        yield


def convert(source: Path, out: Path, **options):
    text = {} if options.get("data_free") else TEXT
    return quantkit.convert("gptq-to-exl2", source, out, progress=Silent(), **{**text, **options})


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("source") / "model", hidden_size=128, intermediate_size=256)


@pytest.fixture(scope="module")
def gptq(original: Path) -> Path:
    out = original.with_name("gptq")
    quantkit.quantize(original, out, group_size=64, evaluate=False, progress=Silent(), **TEXT)
    return out


@pytest.fixture(scope="module")
def calibrated(gptq: Path):
    """A result at 5 bits, its report, and the measurement that it left."""
    out, measurement = gptq.with_name("calibrated"), gptq.with_name("measurement.json")
    return out, convert(gptq, out, bpw=5.0, measurement=measurement), measurement


def test_the_result_is_exl2_of_the_rate_and_all_else_is_as_it_was(gptq: Path, calibrated) -> None:
    out, report, _ = calibrated
    before, after = open_checkpoint(gptq), open_checkpoint(out)
    assert after.linears() == before.linears()
    assert all(isinstance(after.linear(name), Exl2Tensor) for name in after.linears())
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["head_bits"]) == ("exl2", 5.0, 16)
    assert 4.9 < config["bits_per_weight"] <= 5.0
    assert not (out / "quantize_config.json").exists()
    quantized = {tensor for name in before.linears() for tensor in before.tensors_of(name)}
    for name in set(before.names()) - quantized:
        assert torch.equal(after.tensor(name), before.tensor(name))
    assert {linear.name for linear in report.linears} == set(before.linears())
    errors = [linear.error for linear in report.linears]
    assert errors == sorted(errors, reverse=True)
    name = report.linears[0].name
    new, old = after.dense(name).float(), before.dense(name).float()
    assert report.linears[0].error == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-4)


def test_the_result_is_read_by_a_plain_reader_of_the_format(gptq: Path, calibrated, tmp_path: Path) -> None:
    free = tmp_path / "free"
    convert(gptq, free, bpw=4.5, data_free=True, evaluate=False)
    for out in (calibrated[0], free):
        read = open_checkpoint(out)
        assert plain_exl2.require_same(out, lambda name, read=read: read.dense(name).numpy()) == set(read.linears())


def test_calibration_adds_clearly_less_than_data_free(gptq: Path, calibrated, tmp_path: Path) -> None:
    free = convert(gptq, tmp_path / "free", bpw=5.0, data_free=True)
    assert calibrated[1].damage.kl_mean < 0.7 * free.damage.kl_mean
    assert free.damage.kl_input == 0.0
    assert free.damage.perplexity_input == free.damage.perplexity_reference


def test_the_original_is_what_the_third_way_comes_close_to(original: Path, gptq: Path, calibrated, tmp_path: Path) -> None:
    report = convert(gptq, tmp_path / "out", bpw=5.0, original=str(original))
    assert report.damage.reference == "the unquantized model"
    yardstick = Yardstick.of(open_checkpoint(original), open_checkpoint(gptq), Silent())
    assert report.damage.kl_mean < yardstick.judge(calibrated[0], Silent()).kl_mean
    assert report.damage.kl_mean < report.damage.kl_input


def test_old_groups_stay_together(gptq: Path, calibrated, tmp_path: Path) -> None:
    """Every group of the result is part of one group of the source, whichever way it was made."""
    free = tmp_path / "free"
    convert(gptq, free, bpw=5.0, data_free=True, evaluate=False)
    for folder in (calibrated[0], free):
        before, after = open_checkpoint(gptq), open_checkpoint(folder)
        for name in before.linears():
            groups, codes = before.linear(name).row_groups, after.linear(name).codes()
            for _, start, end in codes.layout.spans():
                assert len(groups[codes.order[start:end]].unique()) == 1, name


def test_an_act_order_source_lends_its_order(original: Path, tmp_path: Path) -> None:
    source = tmp_path / "gptq"
    quantkit.quantize(original, source, group_size=32, act_order=True, evaluate=False, progress=Silent(), **TEXT)
    for options in ({"data_free": True}, {}):
        out = tmp_path / f"out{len(options)}"
        convert(source, out, bpw=4.5, evaluate=False, **options)
        before, after = open_checkpoint(source), open_checkpoint(out)
        name = "model.layers.0.mlp.up_proj"
        groups, codes = before.linear(name).row_groups, after.linear(name).codes()
        for _, start, end in codes.layout.spans():
            assert len(groups[codes.order[start:end]].unique()) == 1
        if options:
            assert torch.equal(groups[codes.order], groups.sort().values)


def test_a_short_last_group_stays_last() -> None:
    weight = torch.ones(160, 4)
    weight[128:] = 9.0
    weight[64:128] = 3.0
    order = _order(weight, torch.arange(160) // 64)
    assert order.tolist() == [*range(64, 128), *range(64), *range(128, 160)]


def test_one_measurement_serves_several_rates(gptq: Path, calibrated, tmp_path: Path, monkeypatch) -> None:
    from quantkit.commands import measure

    monkeypatch.setattr(measure, "run", lambda *_: pytest.fail("measured again"))
    again = convert(gptq, tmp_path / "again", bpw=5.0, measurement=calibrated[2], evaluate=False)
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == load_file(calibrated[0] / "model.safetensors").keys()
    for name, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(calibrated[0] / "model.safetensors")[name]), name
    assert again.damage is None


def test_match_finds_the_lowest_rate_and_leaves_no_trial(gptq: Path, tmp_path: Path) -> None:
    own = tmp_path / "out.trial-of-mine-at-4bpw"
    own.mkdir()
    report = convert(gptq, tmp_path / "out", match=0.02, data_free=True)
    assert report.damage.kl_mean <= 0.02
    assert report.facts["target_bits_per_weight"] < 5.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", own.name]
    lower = convert(gptq, tmp_path / "lower", bpw=report.facts["target_bits_per_weight"] - 0.5, data_free=True)
    assert lower.damage.kl_mean > 0.02


@pytest.mark.parametrize("data_free", [True, False])
def test_a_head_is_quantized_when_asked_for(gptq: Path, tmp_path: Path, data_free: bool) -> None:
    convert(gptq, tmp_path / "out", bpw=5.0, head_bits=6, data_free=data_free, evaluate=False)
    before, after = open_checkpoint(gptq), open_checkpoint(tmp_path / "out")
    head = after.linear("lm_head")
    assert isinstance(head, Exl2Tensor)
    kept = before.dense("lm_head").float()
    assert (after.dense("lm_head").float() - kept).norm() < 0.05 * kept.norm()


def test_a_checkpoint_of_another_tool(tmp_path: Path) -> None:
    """Text stays the same: greedy tokens of the result are those of the source."""
    report = convert(GOLDEN, tmp_path / "out", bpw=7.5, data_free=True, evaluate=False)
    ids = load_file(GOLDEN / "expected.safetensors")["input_ids"]
    before, after = quantkit.load(GOLDEN)(ids), quantkit.load(tmp_path / "out")(ids)
    assert float((before - after).abs().mean()) < 0.02 * float(before.std())
    assert max(linear.error for linear in report.linears) < 0.03


def test_one_block_in_memory_when_calibrated(gptq: Path, calibrated, tmp_path: Path, monkeypatch) -> None:
    """When a block is read, what was decoded of all blocks but one other is gone."""
    deep = tiny.write_model(tmp_path / "deep", hidden_size=64, num_hidden_layers=4)
    quantkit.quantize(deep, tmp_path / "gptq", group_size=32, effort="nearest", evaluate=False, progress=Silent())
    decode, alive, most = DecodedCheckpoint.linear, [], []

    def watched(self, name: str):
        block = int(name.split(".")[2]) if "layers" in name else 99
        older = [1 for held, other in alive if held() is not None and other != block]
        most.append(len(older))
        stored = decode(self, name)
        alive.append((weakref.ref(stored), block))
        return stored

    monkeypatch.setattr(DecodedCheckpoint, "linear", watched)
    convert(tmp_path / "gptq", tmp_path / "out", bpw=5.0, evaluate=False)
    assert len(most) > 4 * 7
    assert max(most) <= 7


REFUSED = [
    ({"bpw": 4.0, "match": 0.1}, UsageError, "both choose the rate"),
    ({"evaluate": False}, UsageError, "found by measuring KL"),
    ({"match": 0.0}, UsageError, "above 0"),
    ({"bpw": 5.0, "data_free": True, "original": "x"}, UsageError, "two ways"),
    ({"bpw": 5.0, "data_free": True, "measurement": Path("m")}, UsageError, "needs text"),
    ({"bpw": 5.0, "data_free": True, "samples": 4}, UsageError, "`--samples` has no effect beside `--data-free`"),
    ({"bpw": 5.0, "data_free": True, "calibration": "x.txt"}, UsageError, "`--calibration` has no effect"),
    ({"bpw": 5.0, "data_free": True, "job": Path("j")}, UsageError, "`--job` has no effect"),
    ({"bpw": 5.0, "head_bits": 7}, UsageError, "head of 7 bits"),
    ({"bpw": 5.0, "bits": 4, "shard_size": "1GiB"}, UsageError, "`shard_size` has no meaning"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_makes_no_sense_is_refused_before_work(options, error, message, gptq: Path, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        quantkit.convert("gptq-to-exl2", gptq, tmp_path / "out", progress=Silent(), **options)
    assert not list(tmp_path.iterdir())


def test_other_models_are_refused(original: Path, gptq: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no linear in GPTQ form"):
        convert(original, tmp_path / "out", bpw=5.0, data_free=True)
    other = tiny.write_model(tmp_path / "other", hidden_size=64)
    with pytest.raises(CheckpointError, match="is not the model that"):
        convert(gptq, tmp_path / "out", bpw=5.0, original=str(other))
    with pytest.raises(CheckpointError, match="is quantized"):
        convert(gptq, tmp_path / "out", bpw=5.0, original=str(gptq))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_a_decoded_checkpoint_is_the_dense_model(gptq: Path) -> None:
    plain = open_checkpoint(gptq)
    decoded = DecodedCheckpoint.of(plain)
    assert decoded.quantization is None
    for name in plain.linears():
        assert torch.equal(decoded.linear(name).dequantize(), plain.linear(name).dequantize())
        assert decoded.group_rows(name, plain.linear(name).in_features) == 64
    ids = torch.arange(40)[None]
    source = load_model(decoded)(ids)
    assert torch.allclose(source, quantkit.load(gptq)(ids), atol=1e-4)


def test_a_head_in_gptq_form_becomes_exl2_in_either_way(original: Path, tmp_path: Path) -> None:
    source = tmp_path / "gptq"
    options = {"group_size": 32, "lm_head": True, "effort": "nearest", "evaluate": False}
    quantkit.quantize(original, source, progress=Silent(), **options)
    for way in ({"data_free": True}, {}):
        convert(source, tmp_path / "out", bpw=5.0, evaluate=False, overwrite=True, **way)
        after = open_checkpoint(tmp_path / "out")
        assert isinstance(after.linear("lm_head"), Exl2Tensor)
        assert not [name for name in after.names() if name.startswith("lm_head.") and ".q_" not in name]
    with pytest.raises(UsageError, match="quantized already"):
        convert(source, tmp_path / "other", bpw=5.0, head_bits=16, evaluate=False)
