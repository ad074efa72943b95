"""`--effort default` and `best`: what tuning changes in a result, and that it stays away where it does not pay."""

from pathlib import Path

import pytest
import tiny
import torch

from quantkit.calibration import tuning
from quantkit.calibration.tuning import Tuned
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.quantization import effort
from quantkit.commands.quantization import tuning as tuning_of_results
from quantkit.commands.quantization.report import QuantizeReport
from quantkit.commands.quantize import run
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings

TEXT = {"samples": 8, "length": 64, "dtype": "fp32", "bits": 2, "group_size": 32, "sym": False}


def quantize(model: Path, out: Path, preset: str = "best", **options) -> QuantizeReport:
    settings = QuantizeSettings(str(model), out, **{"effort": preset, "evaluate": False, **TEXT, **options})
    report = run(settings, Silent())
    assert isinstance(report, QuantizeReport)
    return report


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.tensor(name) for name in checkpoint.names()}


def differing(first: Path, second: Path) -> set[str]:
    before, after = tensors(first), tensors(second)
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BATCH_TOKENS", 128)


@pytest.mark.parametrize(
    ("family", "options"),
    [("LlamaForCausalLM", {}), ("Gemma2ForCausalLM", {"act_order": True}), ("Qwen2MoeForCausalLM", {})],
)
def test_only_scales_and_norms_change(family: str, options: dict, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", family)
    quantize(model, tmp_path / "default", "default", **options)
    report = quantize(model, tmp_path / "best", **options)
    assert report.tuning is not None and report.tuning.kept and report.tuning.kl_after < report.tuning.kl_before
    assert len(report.tuning.course) == report.tuning.passes
    changed = differing(tmp_path / "default", tmp_path / "best")
    assert changed and {name.rpartition(".")[2] for name in changed} == {"scales", "weight"}
    assert all("norm" in name for name in changed if name.endswith(".weight"))
    assert report.as_json()["tuning"]["kept"] is True


def test_default_tunes_once_over_the_first_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "TUNED_TOKENS", 4 * 64)
    model = tiny.write_model(tmp_path / "model")
    report = quantize(model, tmp_path / "default", "default")
    assert report.tuning is not None and (report.tuning.passes, report.tuning.tokens) == (1, 4 * 64)
    assert report.tuning.kept and not any("tuned" in remark for remark in report.remarks())


def test_with_a_limit_of_memory_default_is_not_tuned_and_says_so(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    report = quantize(model, tmp_path / "limited", "default", max_memory=8 << 30)
    assert report.tuning is None
    assert any("not tuned" in remark and "--max-memory" in remark for remark in report.remarks())
    assert not any("tuned" in remark for remark in quantize(model, tmp_path / "fast", "fast", max_memory=8 << 30).remarks())


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    for name in ("first", "second"):
        quantize(model, tmp_path / name)
    assert not differing(tmp_path / "first", tmp_path / "second")


def test_what_is_no_gain_on_unseen_text_is_not_kept_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.write_model(tmp_path / "model")
    quantize(model, tmp_path / "limited", "default", max_memory=8 << 30)

    def spoil(original, rounded, *place, **settings) -> Tuned:
        return Tuned({name: 3 * scale for name, scale in rounded.scales.items()}, {}, (0.5,))

    monkeypatch.setattr(tuning_of_results, "tune", spoil)
    report = quantize(model, tmp_path / "best")
    assert not differing(tmp_path / "limited", tmp_path / "best")
    assert any("no gain on unseen text" in remark for remark in report.remarks())
    assert report.as_json()["tuning"]["kept"] is False
    assert any("not kept" in cell for row in report.rows() for cell in row)


def test_gradients_that_a_job_has_kept_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed behind the backward pass: what is read back from the job is what was found."""
    model = tiny.write_model(tmp_path / "model", hidden_size=64, intermediate_size=640)
    quantize(model, tmp_path / "whole", "default")
    from quantkit.commands import quantize as command

    def stop(*given, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(command, "solve_steps", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize(model, tmp_path / "resumed", "default")
    quantize(model, tmp_path / "resumed", "default")
    assert not differing(tmp_path / "whole", tmp_path / "resumed")
