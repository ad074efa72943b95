"""`measure --dry-run`: says what will be, and leaves nothing."""

import json
from pathlib import Path

import pytest
import tiny

from quantkit import cli
from quantkit.commands.measure import run
from quantkit.commands.measuring.outlook import foresee
from quantkit.errors import CalibrationError, PlanError
from quantkit.job.job import Job
from quantkit.progress import Silent
from quantkit.settings import MeasureSettings

TEXT = {"samples": 6, "length": 64}


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_what_is_foretold_comes_true(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.write_model(tmp_path / "model", family, dtype="bfloat16", hidden_size=128, intermediate_size=144)
    settings = MeasureSettings(str(model), tmp_path / "m.json", **TEXT)
    foretold = foresee(settings, Silent())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    sizes = []
    leave = Job.keep_states

    def measured(self: Job, *names: str) -> None:
        sizes.append(sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file()))
        leave(self, *names)

    monkeypatch.setattr(Job, "keep_states", measured)
    report = run(settings, Silent())
    assert foretold.candidates == sum(len(linear.candidates) for linear in report.measurement.linears)
    assert max(sizes) <= foretold.disk.job <= 1.25 * max(sizes), (max(sizes), foretold.disk.job)
    assert 0 < foretold.rehearsal.backward_seconds < foretold.rehearsal.seconds


def test_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.write_model(tmp_path / "model", dtype="bfloat16")
    command = ["measure", str(model), "-o", str(tmp_path / "m.json"), "--samples", "4", "--length", "32", "--dry-run"]
    assert cli.run([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["dry_run"] is True and said["linears"] == 14 and said["peak_memory_bytes"] > 0
    assert cli.run(command) == 0
    assert "m.json, not written" in capsys.readouterr().out
    assert cli.run([*command, "--max-memory", "1MiB"]) == CalibrationError.exit_code
    assert "is not enough: at least" in capsys.readouterr().err
    (tmp_path / "m.json").mkdir()
    assert cli.run(command) == PlanError.exit_code
