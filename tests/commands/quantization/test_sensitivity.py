"""What a backward pass has found, kept in a job and read from it."""

from pathlib import Path

import pytest
import tiny
import torch

from quantkit.calibration import sensitivity
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.quantization.job import Subject, open_subject
from quantkit.commands.quantization.sensitivity import STEP, RunOnce, run_backward
from quantkit.job.job import Job
from quantkit.models.architecture import block_of
from quantkit.progress import Silent
from quantkit.runtime.placement import Placement
from quantkit.settings import QuantizeSettings


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    model = tiny.write_model(tmp_path / "model", num_hidden_layers=3)
    settings = QuantizeSettings(str(model), tmp_path / "out", samples=4, length=32)
    return open_subject(open_checkpoint(model), settings, Placement.choose("cpu", "fp32"))


def in_memory(subject: Subject) -> sensitivity.Sensitivity:
    place = subject.checkpoint, subject.config, subject.architecture, subject.backward_rows
    return sensitivity.measure(*place, seed=0, dtype=torch.float32, device="cpu", folder=None, progress=Silent())


def require_same(found: sensitivity.Sensitivity, expected: sensitivity.Sensitivity) -> None:
    assert found.tokens == expected.tokens
    assert list(found.covariances) == list(expected.covariances) == list(expected.outputs)
    for name, chunks in expected.covariances.items():
        assert len(chunks) == len(found.covariances[name])
        assert all(map(torch.equal, found.covariances[name], chunks))
        assert torch.equal(found.outputs[name], expected.outputs[name])
    for name, stage in expected.stages.items():
        assert torch.equal(found.stages[name].weights, stage.weights)


def test_a_job_gives_back_what_was_found_a_block_at_a_time(subject: Subject, tmp_path: Path, monkeypatch) -> None:
    expected = in_memory(subject)
    with Job(tmp_path / "job") as job:
        job.begin({})
        require_same(run_backward(subject, job, 0, Silent()).found, expected)
    monkeypatch.setattr(sensitivity, "measure", None)  # it must not be run again
    with Job(tmp_path / "job") as job:
        job.begin({})
        found = run_backward(subject, job, 0, Silent()).found
        require_same(found, expected)
        read = []
        monkeypatch.setattr(job, "tensor", lambda step, name: (read.append(name), Job.tensor(job, step, name))[1])
        for name in found.covariances:
            found.covariances[name]
        assert read == ["covariances 0", "covariances 1", "covariances 2"]


def test_several_jobs_share_one_pass_that_outlives_the_first(subject: Subject, tmp_path: Path, monkeypatch) -> None:
    backward, expected = RunOnce(), in_memory(subject)
    with Job(tmp_path / "one") as job:
        job.begin({})
        backward(subject, job, 0, Silent())
        job.complete()
    monkeypatch.setattr(sensitivity, "measure", None)
    with Job(tmp_path / "two") as job:
        job.begin({})
        require_same(backward(subject, job, 0, Silent()).found, expected)
        blocks = job.value(STEP)["covariances"]
        assert [{block_of(name) for name in block} for block in blocks] == [{2}, {1}, {0}]
