"""`--dry-run`: says what will be, leaves nothing, and refuses what cannot fit."""

import json
import shutil
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny

from quantkit import cli
from quantkit.commands.quantization import outlook
from quantkit.commands.quantization.outlook import foresee
from quantkit.commands.quantization.rehearsal import peak_memory
from quantkit.errors import CalibrationError, CheckpointError, FormatError
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings

TEXT = {"samples": 4, "length": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    return tiny.write_model(folder, hidden_size=128, intermediate_size=144, dtype="bfloat16")


def settings(model: Path, out: Path, **options) -> QuantizeSettings:
    return QuantizeSettings(str(model), out, **{**TEXT, "evaluate": False, **options})


@pytest.mark.parametrize("effort", ["nearest", "fast", "default"])
def test_what_is_foretold_of_gptq_comes_true(effort: str, model: Path, tmp_path: Path, capsys) -> None:
    text = [] if effort == "nearest" else ["--samples", "4", "--length", "32"]
    command = ["quantize", str(model), "-o", str(tmp_path / "out"), "--effort", effort, *text, "--no-eval", "--json"]
    assert cli.run([*command, "--dry-run"]) == 0
    foretold = json.loads(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []
    assert cli.run(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert foretold["bits_per_weight"] == report["bits_per_weight"] and foretold["plan"] == report["plan"]
    written = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert foretold["result_bytes"] == pytest.approx(written, rel=0.05)
    assert foretold["seconds"] > 0 and foretold["cpu_seconds"] > 0 and (foretold["backward_seconds"] > 0) == (effort == "default")
    assert 0 < foretold["peak_memory_bytes"] < 2 * peak_memory()
    assert any("144" in remark for remark in foretold["remarks"])  # the short last group of `down_proj`


def test_an_exl2_plan_is_guessed_before_it_is_measured(model: Path, tmp_path: Path) -> None:
    outlook = foresee(settings(model, tmp_path / "out", format="exl2", bpw=4.5), Silent())
    assert outlook.foretold and 4.3 < outlook.plan.bits_per_weight <= 4.5
    assert outlook.rehearsal.backward_seconds > 0 and outlook.plan.head is not None
    assert ["linears", "15 to quantize, 0 stay dense"] in outlook.rows()
    assert list(tmp_path.iterdir()) == []


class Bars(Silent):
    """What was done of how much, of each bar."""

    def __init__(self) -> None:
        self.done: dict[str, list[int]] = {}

    @contextmanager
    def task(self, label, total):
        done = self.done[label] = [0, total]

        class Task:
            def advance(self, steps=1, *, note=""):
                done[0] += steps

        yield Task()


@pytest.mark.parametrize("options", [{"effort": "nearest"}, {"effort": "fast"}, {"format": "exl2", "bpw": 4.5}], ids=str)
def test_the_bar_of_a_rehearsal_comes_to_its_end(options: dict, model: Path, tmp_path: Path) -> None:
    text, bars = {} if options.get("effort") == "nearest" else TEXT, Bars()
    foresee(QuantizeSettings(str(model), tmp_path / "out", evaluate=False, **options, **text), bars)
    done, total = bars.done["rehearse a block"]
    assert done == total > 1


def test_what_cannot_be_is_refused(model: Path, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(FormatError):
        foresee(settings(model, tmp_path / "out", strict=True), Silent())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        foresee(settings(model, tmp_path / "out"), Silent())
    with monkeypatch.context() as patch:
        patch.setattr(outlook, "machine_memory", lambda: 1 << 20)
        with pytest.raises(CalibrationError, match="of memory are needed, this machine has 1 MiB") as caught:
            foresee(settings(model, tmp_path / "other", effort="fast"), Silent())
        assert caught.value.hint
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 0, 1000))
    with pytest.raises(CheckpointError, match="and 0 KiB are free there"):
        foresee(settings(model, tmp_path / "other"), Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
