"""`commands.quantize --format exl2` on tiny models: what is written, how large, what is refused."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

import quantkit
from quantkit import cli
from quantkit.calibration import sensitivity
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands import quantize as quantize_command
from quantkit.commands.measure import run as measure
from quantkit.commands.quantization import end, exl2
from quantkit.commands.quantization.rates import run_rates
from quantkit.commands.quantization.report import QuantizeReport
from quantkit.commands.quantize import run
from quantkit.errors import FormatError, GateError, PlanError, UsageError
from quantkit.mix_plan import MixPlan
from quantkit.progress import Silent
from quantkit.settings import MeasureSettings, PlanSettings, QuantizeSettings

IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(7))
TEXT = {"samples": 8, "length": 64}


def quantize(model: Path, out: Path, **options) -> QuantizeReport:
    return run(QuantizeSettings(str(model), out, format="exl2", **({"evaluate": False, **TEXT} | options)), Silent())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    return tiny.write_model(folder, hidden_size=128, intermediate_size=256, tie_word_embeddings=True, dtype="bfloat16")


@pytest.fixture(scope="module")
def measured(model: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("measured") / "m.json"
    measure(MeasureSettings(str(model), out, **TEXT), Silent())
    return out


def linear_bits(folder: Path) -> float:
    """Bits per weight of the blocks' linears, by the bytes of the file."""
    checkpoint = open_checkpoint(folder)
    names = checkpoint.linears()
    tensors = load_file(folder / "model.safetensors")
    stored = sum(tensors[tensor].nbytes for name in names for tensor in checkpoint.tensors_of(name))
    return 8 * stored / sum(checkpoint.linear(name).dequantize().numel() for name in names)


@pytest.mark.parametrize("bpw", [3.0, 4.0, 5.0])
def test_a_budget_is_met_by_the_bytes_of_the_file(bpw: float, model: Path, measured: Path, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "out", bpw=bpw, measurement=measured)
    assert 0.995 * bpw < linear_bits(tmp_path / "out") <= bpw
    assert report.bits_per_weight == linear_bits(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (written["quant_method"], written["bits"], written["head_bits"]) == ("exl2", bpw, 6)
    assert written["bits_per_weight"] == pytest.approx(linear_bits(tmp_path / "out"), abs=1e-6)
    assert written["calibration"] == {"rows": 8, "length": 64, "dataset": "bundled"}
    assert not (tmp_path / "out" / "quantize_config.json").exists()


def test_a_tied_head_is_written_out_quantized_and_wins(model: Path, measured: Path, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "out", bpw=8.0, measurement=measured, head_bits=8)
    source, written = open_checkpoint(model), open_checkpoint(tmp_path / "out")
    assert written.config["tie_word_embeddings"] is True
    embedding = source.tensor("model.embed_tokens.weight")
    assert torch.equal(written.tensor("model.embed_tokens.weight"), embedding)
    head = written.dense("lm_head")
    assert head.shape == (320, 128)
    assert 0 < float((head.float() - embedding.float()).norm() / embedding.float().norm()) < 0.01
    assert report.linears[-1].name == "lm_head" and report.plan.head is not None
    loaded = quantkit.load(tmp_path / "out")
    assert torch.equal(loaded.head.linear.stored.dequantize(), head.T)
    before, after = quantkit.load(model)(IDS), loaded(IDS)
    assert (before - after).abs().mean() < 0.05 * before.std()


def test_an_untied_head_is_replaced(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", dtype="bfloat16")
    quantize(source, tmp_path / "out", bpw=5.0)
    names = open_checkpoint(tmp_path / "out").names()
    assert "lm_head.q_weight" in names and "lm_head.weight" not in names
    before, after = quantkit.load(source)(IDS), quantkit.load(tmp_path / "out")(IDS)
    assert (before - after).abs().mean() < 0.2 * before.std()


def test_sixteen_head_bits_leave_it_as_it_is(model: Path, measured: Path, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "out", bpw=4.0, measurement=measured, head_bits=16)
    assert not [name for name in open_checkpoint(tmp_path / "out").names() if name.startswith("lm_head")]
    assert report.plan.head is None


@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM", "Gemma2ForCausalLM"])
def test_other_families_are_written_and_load_again(family: str, tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", family)
    # In float32: the router of a tiny mixture changes its mind about a token where a processor rounds otherwise.
    report = quantize(source, tmp_path / "out", bpw=6.5, head_bits=8, dtype="fp32")
    assert {linear.name for linear in report.linears} == {*open_checkpoint(source).linears(), "lm_head"}
    before, after = quantkit.load(source)(IDS), quantkit.load(tmp_path / "out")(IDS)
    assert (before - after).abs().mean() < 0.1 * before.std()


def test_fused_linears_are_written_in_the_parts_that_readers_of_exl2_know(tmp_path: Path) -> None:
    """Of 96, 48 and 48 outputs here, so that the last two are padded one by one."""
    source = tiny.write_model(tmp_path / "model", "Phi3ForCausalLM", hidden_size=96, num_attention_heads=4)
    report = quantize(source, tmp_path / "out", bpw=7.0, head_bits=8)
    names = {name for name in open_checkpoint(tmp_path / "out").names() if ".0." in name}
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert {f"model.layers.0.{part}.q_weight" for part in parts} <= names
    assert not [name for name in names if "qkv_proj" in name or "gate_up_proj" in name]
    assert report.bits_per_weight == linear_bits(tmp_path / "out") <= 7.0
    before, after = quantkit.load(source)(IDS), quantkit.load(tmp_path / "out")(IDS)
    assert (before - after).abs().mean() < 0.1 * before.std()


def test_a_bias_is_padded_with_its_outputs(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", "Qwen2ForCausalLM", num_key_value_heads=1)
    quantize(source, tmp_path / "out", bpw=6.5, head_bits=8)
    name = "model.layers.1.self_attn.v_proj"
    stored, before = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors")
    bias = stored[f"{name}.bias"]
    assert bias.dtype == torch.float16 and bias.shape == (32,) and stored[f"{name}.q_weight"].shape[1] == 32
    assert torch.equal(bias[:16], before[f"{name}.bias"].to(torch.float16)) and not bias[16:].any()
    assert (quantkit.load(source)(IDS) - quantkit.load(tmp_path / "out")(IDS)).abs().mean() < 0.5


def test_what_exl2_cannot_hold_stays_dense_is_said_and_refused_when_strict(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", intermediate_size=72, dtype="bfloat16")
    report = quantize(source, tmp_path / "out", bpw=7.0)
    assert {linear.kind for linear in report.plan.dense} == {"mlp.down_proj"}
    assert any("mlp.down_proj` (2×) stays dense: 72 input" in remark for remark in report.remarks())
    assert linear_bits(tmp_path / "out") <= 7.0
    assert torch.isfinite(quantkit.load(tmp_path / "out")(IDS)).all()
    with pytest.raises(FormatError, match="72 input features"):
        quantize(source, tmp_path / "strict", bpw=7.0, strict=True)
    assert not (tmp_path / "strict").exists()


def test_sixteen_rows_too_many_are_quantized_too(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", intermediate_size=144, dtype="bfloat16")
    with pytest.raises(FormatError, match=r"down_proj` has 144 input features, no multiple of 32: its last 16 rows"):
        quantize(source, tmp_path / "strict", bpw=5.0, strict=True)
    report = quantize(source, tmp_path / "out", bpw=5.0)
    assert any("`mlp.down_proj` " in remark and "the last group has 16 rows" in remark for remark in report.remarks())
    with pytest.raises(FormatError, match="the last group has 16") as caught:
        report.plan.require_regular()
    assert "--group-size" not in (caught.value.hint or "")
    down = next(linear for linear in report.plan.linears if linear.kind == "mlp.down_proj")
    assert down.layout is not None and (down.layout.groups[-1].bits, down.layout.groups[-1].rows) == (2, 16)
    assert linear_bits(tmp_path / "out") <= 5.0
    before, after = quantkit.load(source)(IDS), quantkit.load(tmp_path / "out")(IDS)
    assert (before - after).abs().mean() < 0.4 * before.std()


def test_what_cannot_succeed_is_refused_before_the_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exl2, "measure_model", None)
    monkeypatch.setattr(quantize_command, "run_backward", lambda *_: pytest.fail("it was begun"))
    source = tiny.write_model(tmp_path / "model", intermediate_size=72, dtype="bfloat16")
    for bpw in (1.5, 20.0):
        with pytest.raises(PlanError, match="out of reach") as caught:
            quantize(source, tmp_path / "out", bpw=bpw)
        assert "--bpw" in (caught.value.hint or "")
    with pytest.raises(FormatError, match="72 input features"):
        quantize(source, tmp_path / "out", bpw=7.0, strict=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_head_that_exl2_cannot_hold_stays_as_it_is(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", hidden_size=80, num_attention_heads=4, head_dim=24, vocab_size=300)
    report = quantize(source, tmp_path / "out", bpw=5.0)
    assert report.plan.head is not None and report.plan.head.layout is not None
    assert report.plan.head.layout.groups[-1].rows == 16
    odd = tiny.write_model(tmp_path / "odd", hidden_size=72, num_attention_heads=4, head_dim=24, dtype="bfloat16")
    left = quantize(odd, tmp_path / "left", bpw=13.0)
    assert any("`lm_head` stays dense: 72 input features" in remark for remark in left.remarks())
    assert json.loads((tmp_path / "left" / "config.json").read_text())["quantization_config"]["head_bits"] == 16
    assert "lm_head.weight" in open_checkpoint(tmp_path / "left").names()


def test_an_edited_plan_that_misses_its_target_is_remarked_upon(model: Path, measured: Path, tmp_path: Path) -> None:
    from quantkit.commands.plan import run as plan

    plan(PlanSettings(measured, 4.0, tmp_path / "p.json"), Silent())
    value = json.loads((tmp_path / "p.json").read_text())
    for mix, words in (("8@128", "bits per weight, more than the 4 that it was made for"), ("3@64:10% 2@64:90%", "of 4: no")):
        value["linears"] = dict.fromkeys(value["linears"], mix)
        (tmp_path / "p.json").write_text(json.dumps(value))
        report = quantize(model, tmp_path / mix[0], plan=tmp_path / "p.json")
        reached = f"the plan takes {linear_bits(tmp_path / mix[0]):.4f} bits per weight"
        assert any(reached in remark and words in remark for remark in report.remarks())


def test_files_of_another_size_than_planned_do_not_appear(model: Path, measured: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(end, "stored_bits", lambda written, name: 1)
    with pytest.raises(GateError, match=r"q_proj` takes 1 bits in .*, planned were"):
        quantize(model, tmp_path / "out", bpw=4.0, measurement=measured)
    assert not (tmp_path / "out").exists()


def test_a_plan_gives_the_bytes_of_its_budget(model: Path, measured: Path, tmp_path: Path) -> None:
    from quantkit.commands.plan import run as plan

    plan(PlanSettings(measured, 4.0, tmp_path / "p.json"), Silent())
    quantize(model, tmp_path / "a", plan=tmp_path / "p.json", strict=True)
    quantize(model, tmp_path / "b", bpw=4.0, measurement=measured)
    quantize(model, tmp_path / "c", bpw=4.0)
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert written[0] == written[1] == written[2]


def test_a_finished_result_is_told_without_reading_the_model_once_more(
    model: Path, measured: Path, tmp_path: Path, monkeypatch
) -> None:
    first = quantize(model, tmp_path / "out", bpw=5.0, measurement=measured).as_json()
    monkeypatch.setattr(exl2, "fingerprint", lambda checkpoint: pytest.fail("its fingerprint is known"))
    again = quantize(model, tmp_path / "out", bpw=5.0, measurement=measured).as_json()
    assert again["finished_before"] and first.keys() == again.keys() and first["plan"] == again["plan"]


def test_the_result_is_evaluated(model: Path, measured: Path, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "out", bpw=5.0, measurement=measured, evaluate=True)
    assert report.damage is not None and 0 < report.damage.kl_mean < 1
    assert ["bits per weight, head", "6.665"] in report.rows()
    json.dumps(report.as_json(), allow_nan=False)


def test_measurements_and_plans_of_another_model_are_refused(model: Path, measured: Path, tmp_path: Path) -> None:
    other = tiny.write_model(tmp_path / "other", seed=5, hidden_size=128, intermediate_size=256)
    with pytest.raises(PlanError, match="the measurement is of another model"):
        quantize(other, tmp_path / "out", bpw=4.0, measurement=measured)
    MixPlan("0" * 64, 4.0, False, 6, {"model.layers.0.mlp.up_proj": "4@64"}, {}).save(tmp_path / "p.json")
    with pytest.raises(PlanError, match="the plan is for another model"):
        quantize(model, tmp_path / "out", plan=tmp_path / "p.json")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda value: value["linears"].pop("model.layers.0.mlp.up_proj"), "under neither of"),
        (lambda value: value["dense"].update({"model.layers.0.mlp.up_proj": "?"}), "under both of"),
        (lambda value: value["linears"].update({"model.layers.7.mlp.up_proj": "4@64"}), "no linear of this model"),
    ],
)
def test_an_edited_plan_must_speak_of_this_models_linears(edit, words: str, model, measured, tmp_path: Path) -> None:
    from quantkit.commands.plan import run as plan

    plan(PlanSettings(measured, 4.0, tmp_path / "p.json"), Silent())
    value = json.loads((tmp_path / "p.json").read_text())
    edit(value)
    (tmp_path / "p.json").write_text(json.dumps(value))
    with pytest.raises(PlanError, match=words):
        quantize(model, tmp_path / "out", plan=tmp_path / "p.json")


@pytest.mark.parametrize("bpw", [1.5, 9.0])
def test_budgets_out_of_reach_leave_nothing_behind(bpw: float, model: Path, measured: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="out of reach"):
        quantize(model, tmp_path / "out", bpw=bpw, measurement=measured)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either a budget or a plan"),
        ({"bpw": 4.0, "plan": Path("p.json")}, "either a budget or a plan"),
        ({"bpw": 4.0, "bits": 3}, "`--bits` has no meaning with `--format exl2`"),
        ({"bpw": 4.0, "sym": False}, "`--asym` has no meaning"),
        ({"bpw": 4.0, "lm_head": True}, "`--lm-head` has no meaning with `--format exl2`"),
        ({"bpw": 4.0, "skip": (".*",)}, "`--skip` has no meaning"),
        ({"bpw": 4.0, "head_bits": 7}, "a head of 7 bits"),
        ({"bpw": float("nan")}, "bits per weight above 0, up to 64, found nan"),
        ({"bpw": float("inf")}, "found inf"),
        ({"plan": Path("p.json"), "head_bits": 8}, "`--head-bits` has no meaning beside `--plan`"),
        ({"format": "gptq", "bpw": 4.0}, "`--bpw` has no meaning with `--format gptq`"),
        ({"format": "awq"}, "unknown format `awq`"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict, words: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        run(QuantizeSettings(str(model), tmp_path / "out", **({"format": "exl2"} | options)), Silent())


def test_rates_that_would_share_a_folder_are_refused_before_work(model: Path, tmp_path: Path) -> None:
    choice = QuantizeSettings(str(model), tmp_path / "out", format="exl2", evaluate=False, **TEXT)
    for rates in ([4.0, 4.0], [4.0, 4.0000001]):
        with pytest.raises(UsageError, match="names a rate twice"):
            run_rates(choice, rates, Silent())
    with pytest.raises(UsageError, match="found nan"):
        run_rates(choice, [4.0, float("nan")], Silent())
    assert list(tmp_path.iterdir()) == []


def test_several_rates_share_measurement_and_gradients(model: Path, tmp_path: Path, monkeypatch) -> None:
    """And each is, byte for byte, what it is by itself."""
    passes = []
    measure_gradients = sensitivity.measure
    monkeypatch.setattr(sensitivity, "measure", lambda *given, **named: passes.append(1) or measure_gradients(*given, **named))
    choice = QuantizeSettings(str(model), tmp_path / "out", format="exl2", evaluate=False, **TEXT)
    run_rates(choice, [3.0, 4.5], Silent())
    assert len(passes) == 1
    quantize(model, tmp_path / "single", bpw=4.5, measurement=tmp_path / "out-measurement.json")
    assert len(passes) == 2
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out-4.5bpw", "single")]
    assert written[0] == written[1]


def test_several_rates_share_one_measurement(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ["--samples", "8", "--length", "64", "--no-eval", "--json"]
    options = ["quantize", str(model), "-o", str(tmp_path / "out"), "--format", "exl2", *text]
    assert cli.run([*options, "--bpw", "3.0,4.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-3bpw", "out-4.5bpw", "out-measurement.json"]
    assert [rate["bits_per_weight"] for rate in found["rates"]] == [
        linear_bits(tmp_path / "out-3bpw"),
        linear_bits(tmp_path / "out-4.5bpw"),
    ]
    assert cli.run([*options, "--bpw", "3.0,5.0"]) == 0
    again = json.loads(capsys.readouterr().out)["rates"]
    assert again[0]["finished_before"] and again[0]["bits_per_weight"] == found["rates"][0]["bits_per_weight"]
    assert again[1]["bits_per_weight"] == linear_bits(tmp_path / "out-5bpw")
    (tmp_path / "out-6bpw").mkdir()
    assert cli.run([*options, "--bpw", "3.0,6.0"]) == 10
    assert cli.run([*options, "--bpw", "4.0,4.0"]) == 2
    assert cli.run([*options, "--bpw", "four"]) == 2
    assert not (tmp_path / "out-4bpw").exists()
