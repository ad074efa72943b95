"""Presets: what each does, what it costs is in the report, and which do not exist."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from quantkit.calibration import sensitivity
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.quantization import job
from quantkit.commands.quantization.report import QuantizeReport
from quantkit.commands.quantize import run
from quantkit.errors import UsageError
from quantkit.formats.gptq import GptqCodec
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings
from quantkit.solver.gptq import solve

TEXT = {"samples": 8, "length": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("source") / "model", dtype="bfloat16")


def quantize(model: Path, out: Path, effort: str, **options) -> QuantizeReport:
    return run(QuantizeSettings(str(model), out, effort=effort, group_size=32, evaluate=False, **options), Silent())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(left: Path, right: Path) -> bool:
    first, second = weights(left), weights(right)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_nearest_rounds_every_weight_on_its_own(model: Path, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "out", "nearest")
    before, after = open_checkpoint(model), open_checkpoint(tmp_path / "out")
    for name in before.linears():
        codes = solve(before.dense(name).float().T.contiguous(), None, GptqCodec(4, 32)).codes
        assert torch.equal(after.dense(name), codes.dequantize().T.to(torch.float16))
    assert (report.calibration.source, report.calibration.rows) == ("none", 0)
    assert all(linear.tokens == 0 and linear.damping is None for linear in report.linears)
    assert report.gradients is None and report.remarks() == []


def test_presets_differ_and_are_named(model: Path, tmp_path: Path) -> None:
    for effort in ("nearest", "fast", "default"):
        report = quantize(model, tmp_path / effort, effort, **(TEXT if effort != "nearest" else {}))
        assert report.as_json()["effort"] == effort and ["effort", effort] in report.rows()
        assert (report.gradients is not None) == (effort == "default")
    assert not same(tmp_path / "nearest", tmp_path / "fast")
    assert not same(tmp_path / "fast", tmp_path / "default")


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen2MoeForCausalLM"])
def test_default_gives_the_same_bytes_each_time_in_memory_or_not(family: str, tmp_path: Path, monkeypatch) -> None:
    model = tiny.write_model(tmp_path / "model", family)
    first = quantize(model, tmp_path / "first", "default", **TEXT)
    monkeypatch.setattr(job, "SPILL_BYTES", 0)
    quantize(model, tmp_path / "second", "default", **TEXT)
    assert same(tmp_path / "first", tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "model", "second"]
    quantize(model, tmp_path / "third", "default", seed=1, **TEXT)
    assert not same(tmp_path / "first", tmp_path / "third")
    found = first.as_json()["gradients"]
    assert found["tokens"] == 8 * 64 and found["seconds"] > 0 and found["cpu_seconds"] > 0


def test_the_backward_pass_reads_the_first_rows(model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(job, "BACKWARD_TOKENS", 200)
    seen = []
    measure = sensitivity.measure

    def spy(source, config, architecture, rows, **options):
        seen.append(rows)
        return measure(source, config, architecture, rows, **options)

    monkeypatch.setattr(sensitivity, "measure", spy)
    report = quantize(model, tmp_path / "out", "default", **TEXT)
    assert [rows.shape for rows in seen] == [(3, 64)] and report.gradients.tokens == 192
    monkeypatch.setattr(job, "BACKWARD_TOKENS", 10)
    assert quantize(model, tmp_path / "short", "default", **TEXT).gradients.tokens == 64


def test_an_exl2_model_is_measured_and_weighed_in_one_pass(tmp_path: Path, monkeypatch) -> None:
    model = tiny.write_model(tmp_path / "model", hidden_size=128, intermediate_size=256, dtype="bfloat16")
    passes = []
    measure = sensitivity.measure
    monkeypatch.setattr(sensitivity, "measure", lambda *parts, **options: passes.append(1) or measure(*parts, **options))
    options = {"format": "exl2", "bpw": 4.0, "evaluate": False, **TEXT}
    for effort in ("fast", "default"):
        report = run(QuantizeSettings(str(model), tmp_path / effort, effort=effort, **options), Silent())
        assert (report.gradients is None) == (effort == "fast")
    assert len(passes) == 2
    assert not same(tmp_path / "fast", tmp_path / "default")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effort": "best", "format": "exl2", "bpw": 4.0}, "`--effort best` has no meaning with `--format exl2`"),
        ({"effort": "hard"}, "unknown effort `hard`"),
        ({"effort": "nearest", "format": "exl2", "bpw": 4.0}, "`--effort nearest` has no meaning with `--format exl2`"),
        ({"effort": "nearest", "samples": 4}, "`--samples` has no meaning with `--effort nearest`"),
        ({"effort": "nearest", "calibration": "c4"}, "`--calibration` has no meaning with `--effort nearest`"),
    ],
)
def test_what_does_not_exist_is_refused_before_work(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as error:
        run(QuantizeSettings("nowhere", tmp_path / "out", **options), Silent())
    assert error.value.hint
    assert not (tmp_path / "out").exists()


def test_hessians_in_float64_are_the_same_but_for_rounding(model: Path, tmp_path: Path) -> None:
    single = quantize(model, tmp_path / "single", "fast", **TEXT)
    double = quantize(model, tmp_path / "double", "fast", hessian_dtype="fp64", lm_head=True, **TEXT)
    errors = {linear.name: linear.error for linear in single.linears}
    for linear in double.linears[:7]:  # of the first block, whose inputs are equal
        assert linear.error == pytest.approx(errors[linear.name], rel=0.02)
    assert double.linears[-1].name == "lm_head"


def test_hessians_have_a_dtype_that_there_is(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be summed in `bf16`"):
        quantize(model, tmp_path / "out", "fast", hessian_dtype="bf16", **TEXT)
    with pytest.raises(UsageError, match="`--hessian-dtype` has no meaning with `--effort nearest`"):
        quantize(model, tmp_path / "out", "nearest", hessian_dtype="fp64")
    assert list(tmp_path.iterdir()) == []
