"""What the disk is asked for, against what is written there."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import tiny

from quantkit.commands import quantize as command
from quantkit.commands.quantization.needs import DiskNeeds, require_space
from quantkit.errors import CheckpointError
from quantkit.job.job import Job
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings

Usage = namedtuple("Usage", "total used free")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("effort", ["nearest", "fast"])
def test_disk_needs_are_what_is_written(effort: str, tmp_path: Path, monkeypatch) -> None:
    model = tiny.write_model(tmp_path / "model", hidden_size=256, intermediate_size=512, dtype="bfloat16")
    asked, most = [], [0]
    keep = Job.keep_states

    def look(job: Job, *names: str) -> None:
        most[0] = max(most[0], size_of(job.path))
        keep(job, *names)

    monkeypatch.setattr(Job, "keep_states", look)
    monkeypatch.setattr(command, "require_space", lambda needs, out, job: asked.append(needs))
    text = {} if effort == "nearest" else {"samples": 16, "length": 128}
    settings = QuantizeSettings(str(model), tmp_path / "out", group_size=32, effort=effort, evaluate=False, **text)
    command.run(settings, Silent())
    (needs,) = asked
    assert needs.result == pytest.approx(size_of(tmp_path / "out"), rel=0.02)
    assert 0.95 * needs.job < most[0] < 1.02 * needs.job


def test_a_full_disk_is_refused_before_work(tmp_path: Path, monkeypatch) -> None:
    needs = DiskNeeds(result=70 << 20, job=50 << 20)
    out, job = tmp_path / "out", tmp_path / "out.job"
    for free, allowed in ((121 << 20, True), (119 << 20, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: Usage(1 << 40, 0, free))
        if allowed:
            require_space(needs, out, job)
        else:
            with pytest.raises(CheckpointError, match=r"`.*out` and its job need 120 MiB, and 119 MiB are free") as caught:
                require_space(needs, out, job)
            assert "--job" in caught.value.hint
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 300_000))
    with pytest.raises(CheckpointError, match="need 391 KiB, and 292 KiB are free"):  # no rounding to "need 1 and 0 are free"
        require_space(DiskNeeds(result=200_000, job=200_000), out, job)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 119 << 20))
    job.mkdir()
    (job / "step-quantize-0.safetensors").write_bytes(bytes(2 << 20))
    require_space(needs, out, job)
