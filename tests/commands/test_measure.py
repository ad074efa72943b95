"""`commands.measure` on tiny models: every candidate of every linear, and damage that predicts what happens."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit import cli
from quantkit.calibration.text import token_rows
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands import measure as measure_command
from quantkit.commands.measure import run
from quantkit.commands.measuring.block import Kept, Trial, measure_stage
from quantkit.commands.measuring.check import checked_blocks, checked_candidate, worst_block
from quantkit.commands.measuring.report import MeasureReport
from quantkit.commands.quantization import block, job
from quantkit.commands.quantization.hessians import ReadyStage
from quantkit.commands.quantize import run as quantize
from quantkit.errors import CheckpointError, PlanError
from quantkit.formats import exl2_layout, exl2_mix
from quantkit.formats.codec import Layout
from quantkit.formats.dense import DenseTensor
from quantkit.formats.exl2 import Exl2Codec
from quantkit.measurement import Measurement
from quantkit.mix_plan import MixPlan
from quantkit.models.architecture import Stage
from quantkit.models.linear import Linear
from quantkit.progress import Silent
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import MeasureSettings, QuantizeSettings
from quantkit.solver.gptq import solve
from quantkit.solver.inverse import factor

TEXT = {"samples": 8, "length": 64}
# Written in parts, each with side data of its own.
FUSED = {("Phi3ForCausalLM", "qkv_proj"): (64, 32, 32), ("Phi3ForCausalLM", "gate_up_proj"): (128, 128)}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(
        tmp_path_factory.mktemp("source") / "model", hidden_size=128, intermediate_size=256, dtype="bfloat16"
    )


@pytest.fixture(scope="module")
def measured(model: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("measured") / "m.json"
    run(MeasureSettings(str(model), out, **TEXT), Silent())
    return out


def test_every_linear_is_measured_in_every_layout_it_can_hold(model: Path, measured: Path) -> None:
    found = Measurement.load(measured)
    assert [linear.name for linear in found.linears] == open_checkpoint(model).linears()
    for linear in found.linears:
        layouts = {exl2_layout.mixed(linear.in_features, exl2_mix.read(mix)) for mix in exl2_mix.CANDIDATES}
        assert len(linear.candidates) == len(layouts)
        for candidate in linear.candidates:
            layout = exl2_layout.mixed(linear.in_features, exl2_mix.read(candidate.mix))
            assert candidate.bits == exl2_layout.stored_bits(layout, linear.out_features, False)
            assert 0 < candidate.error < 1 and candidate.damage > 0
        assert linear.candidates[0].damage > 50 * linear.candidates[-1].damage
    assert found.calibration["rows"] == 8 and found.head_weights == 128 * 320


@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        # Attention adds up what values of many tokens err in common, which the sum over tokens does not see.
        ("self_attn.v_proj", (0.3, 1.6)),
        ("self_attn.o_proj", (0.6, 1.6)),
        ("mlp.up_proj", (0.6, 1.6)),
        ("mlp.down_proj", (0.6, 1.6)),
    ],
)
def test_damage_is_the_divergence_of_a_model_with_only_that_linear_quantized(
    kind: str, bounds: tuple[float, float], model: Path, measured: Path, tmp_path: Path
) -> None:
    measurement = Measurement.load(measured)
    name, mix = f"model.layers.1.{kind}", exl2_mix.CANDIDATES[3]
    dense = {linear.name: "for the test" for linear in measurement.linears if linear.name != name}
    MixPlan(measurement.model, 4.0, False, 16, {name: mix}, dense).save(tmp_path / "p.json")
    quantize(
        QuantizeSettings(
            str(model), tmp_path / "out", format="exl2", plan=tmp_path / "p.json", evaluate=False, **TEXT
        ),
        Silent(),
    )
    rows = token_rows("bundled", Tokenizer.open(model), 8, 64, 0)
    before = quantkit.load(model)(rows).log_softmax(-1)
    after = quantkit.load(tmp_path / "out")(rows).log_softmax(-1)
    divergence = float((before.exp() * (before - after)).sum(-1).mean())
    linear = next(linear for linear in measurement.linears if linear.name == name)
    predicted = next(found.damage for found in linear.candidates if found.mix == mix)
    assert bounds[0] < predicted / divergence < bounds[1]


@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM", "Gemma2ForCausalLM"])
def test_other_families_are_measured_too(family: str, tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", family)
    found = run(MeasureSettings(str(source), tmp_path / "m.json", **TEXT), Silent()).measurement
    biased = {name.removesuffix(".bias") for name in open_checkpoint(source).names() if name.endswith("_proj.bias")}
    assert bool(biased) == (family == "Qwen2ForCausalLM")
    for linear in found.linears:
        layout = exl2_layout.mixed(linear.in_features, exl2_mix.read(linear.candidates[0].mix))
        widths = FUSED.get((family, linear.name.rpartition(".")[2]), (linear.out_features,))
        bits = sum(exl2_layout.stored_bits(layout, width, linear.name in biased) for width in widths)
        assert linear.candidates[0].bits == bits
        assert all(candidate.damage > 0 for candidate in linear.candidates)


def test_what_exl2_cannot_hold_is_listed_with_its_bits(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", intermediate_size=72, dtype="bfloat16")
    report = run(MeasureSettings(str(source), tmp_path / "m.json", **TEXT), Silent())
    dense = [linear for linear in report.measurement.linears if not linear.candidates]
    assert {linear.name.rpartition(".")[2] for linear in dense} == {"down_proj"}
    assert all(linear.dense_bits == 16 * linear.weights and "72 input" in linear.dense_because for linear in dense)
    assert ["linears", "12 measured, 2 that EXL2 cannot hold"] in report.rows()


def test_the_same_seed_gives_the_same_file_from_memory_or_disk(
    model: Path, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "SPILL_BYTES", 0)
    run(MeasureSettings(str(model), tmp_path / "m.json", **TEXT), Silent())
    assert (tmp_path / "m.json").read_bytes() == measured.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]


def test_a_quantized_model_is_refused(model: Path, tmp_path: Path) -> None:
    quantize(QuantizeSettings(str(model), tmp_path / "out", evaluate=False, group_size=32, **TEXT), Silent())
    with pytest.raises(CheckpointError, match="already quantized"):
        run(MeasureSettings(str(tmp_path / "out"), tmp_path / "m.json", **TEXT), Silent())
    assert not (tmp_path / "m.json").exists()


@pytest.mark.parametrize("name", ["absent/m.json", "", ".", "file/m.json"])
def test_a_place_that_cannot_be_written_is_refused_before_work(model: Path, tmp_path: Path, name: str, monkeypatch) -> None:
    monkeypatch.setattr(measure_command, "open_subject", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"cannot be written|is a folder") as caught:
        run(MeasureSettings(str(model), Path(name), **TEXT), Silent())
    assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_command_prints_tables_or_json(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["measure", str(model), "-o", str(tmp_path / "m.json"), "--samples", "2", "--length", "32"]
    assert cli.run(options) == 0
    shown = capsys.readouterr().out
    assert "block 1" in shown and "mlp.down_proj" in shown
    assert cli.run([*options, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["linears"]) == 14
    assert torch.is_inference_mode_enabled() is False


def test_the_prediction_is_checked_on_a_few_blocks(model: Path, measured: Path) -> None:
    """What is stored is the divergence of a model with only that block quantized, computed here in another way."""
    found = Measurement.load(measured)
    assert [check.block for check in found.checks] == [0, 1]
    assert Measurement.load(measured).as_json()["checks"][0].keys() == {"block", "bits_per_weight", "predicted", "seen", "tokens"}
    for check in found.checks:
        linears = [linear for linear in found.linears if f".{check.block}." in linear.name]
        chosen = [checked_candidate(linear) for linear in linears]
        assert check.predicted == pytest.approx(sum(candidate.damage for candidate in chosen), rel=1e-12)
        assert check.bits_per_weight == sum(each.bits for each in chosen) / sum(each.weights for each in linears)
        assert 3.0 < check.bits_per_weight < 3.6 and check.tokens == 8 * 64
        assert 0.4 < check.ratio < 1.6
    report = MeasureReport(measured, found)
    assert [row[-1] for row in report.check_rows()] == [f"{check.ratio:.2f}" for check in found.checks]
    assert any(title.startswith("prediction") for title, _, _ in report.tables())


def test_what_is_seen_is_the_divergence_of_the_quantized_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly: a measurement solves each linear for what unquantized ones give it. In float32, and its outputs do not make
    up for each other, which they do not in a measurement."""
    monkeypatch.setattr(block, "factor_outputs", lambda covariances: None)
    options = {"samples": 8, "length": 64, "dtype": "fp32"}
    found = run(MeasureSettings(str(model), tmp_path / "m.json", **options), Silent()).measurement
    own = {linear.name: checked_candidate(linear).mix for linear in found.linears if ".1." in linear.name}
    dense = {linear.name: "for the test" for linear in found.linears if linear.name not in own}
    MixPlan(found.model, 4.0, False, 16, own, dense).save(tmp_path / "p.json")
    choice = QuantizeSettings(
        str(model), tmp_path / "out", format="exl2", plan=tmp_path / "p.json", evaluate=False, **options
    )
    quantize(choice, Silent())
    rows = token_rows("bundled", Tokenizer.open(model), 8, 64, 0)
    before, after = (quantkit.load(folder)(rows).double().log_softmax(-1) for folder in (model, tmp_path / "out"))
    divergence = float((before.exp() * (before - after)).sum(-1).mean())
    assert found.checks[1].seen == pytest.approx(divergence, rel=0.03)


def test_the_worst_block_is_checked_as_well(tmp_path: Path) -> None:
    """Six blocks, of which all but the second add a tenth of what is usual."""
    source = tiny.write_model(tmp_path / "model", num_hidden_layers=6)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and ".1." not in name:
            tensor *= 0.1
    save_file(tensors, source / "model.safetensors")
    found = run(MeasureSettings(str(source), tmp_path / "m.json", **TEXT), Silent()).measurement
    assert worst_block(found.linears) == 1
    assert [check.block for check in found.checks] == [0, 1, 2, 3, 5]
    assert found.checks[1].seen > 3 * max(check.seen for check in found.checks if check.block != 1)


@pytest.mark.parametrize(("layers", "blocks"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (30, [0, 10, 19, 29])])
def test_the_checked_blocks_are_spread(layers: int, blocks: list[int]) -> None:
    assert checked_blocks(layers) == blocks


def test_damage_is_judged_by_the_tokens_whose_gradients_it_is_made_of() -> None:
    """A token of huge norm that no gradient reaches outweighs all others in the Hessian of all tokens."""
    stage = Stage("s", ("model.layers.0.mlp.down_proj",))
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(2))
    weight[:, 16:] = 0  # nothing to lose where that token is
    linear = Linear(stage.linears[0], DenseTensor(weight), torch.float32)
    inputs = torch.ones(32)
    judge = torch.diag(torch.cat([inputs[:16], torch.zeros(16)]))
    found = factor(torch.diag(torch.cat([inputs[:16], 1e4 * inputs[16:]])), name="x")
    codec = Exl2Codec(Layout.uniform(32, 2, 32))
    trials = {linear.name: {"2": Trial(codec, codec.stored_bits(32, 32, bias=False))}}
    damages = []
    for by in (None, judge):
        ready = ReadyStage(stage.linears, found, 1, judge=by)
        by_name = {linear.name: linear}, ready, trials, {linear.name: torch.ones(32)}
        measured = measure_stage(*by_name, Kept({linear.name: ""}))
        damages.append(measured[linear.name][0].damage)
    codes = solve(linear.weight(), found, codec).codes
    error = linear.weight() - codes.dequantize()
    assert damages[1] == pytest.approx(0.5 * float((error.T @ judge @ error).trace()) / 16, rel=1e-5)
    assert damages[1] > 1000 * damages[0]
