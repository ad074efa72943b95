"""A job: what was finished is there again, and nothing else; one process at a time; no link is followed."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantkit.errors import JobError
from quantkit.job import job as jobs
from quantkit.job.job import Job

FACTS = {"model": "a" * 64, "bits": 4, "act_order": False, "bpw": None}
WEIGHT = torch.arange(24, dtype=torch.float16).reshape(4, 6)
ODD = torch.tensor([3], dtype=torch.int32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "out.job"


def begun(folder: Path, **changes: object) -> Job:
    job = Job(folder)
    try:
        job.begin({**FACTS, **changes})
    except BaseException:
        job.__exit__(None, None, None)
        raise
    return job


def finish(job: Job, name: str) -> None:
    with job.step(name) as step:
        step.add("odd", ODD)
        step.add("weight", WEIGHT)
        step.finish({"error": 0.1})


@pytest.fixture
def half(folder: Path) -> Path:
    """Of a job with two finished steps."""
    with begun(folder) as job:
        finish(job, "block 0")
        with job.step("block 1") as step:
            step.finish([1, 2.5])
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_finished_steps_are_there_again(half: Path) -> None:
    with begun(half) as job:
        assert job.has("block 0") and job.has("block 1") and not job.has("block 2")
        assert job.value("block 0") == {"error": 0.1} and job.value("block 1") == [1, 2.5]
        found = dict(job.tensors("block 0"))
        assert list(found) == ["odd", "weight"]
        assert torch.equal(found["weight"], WEIGHT) and torch.equal(found["odd"], ODD)
        assert list(job.tensors("block 1")) == []


def test_a_step_that_is_not_finished_leaves_nothing(folder: Path) -> None:
    with begun(folder) as job:
        finish(job, "block 0")
        with pytest.raises(ZeroDivisionError), job.step("block 1") as step:
            step.add("weight", WEIGHT)
            raise ZeroDivisionError
        with job.step("block 2") as step:
            step.add("weight", WEIGHT)
        assert job.finished == 1
    assert names(folder) == ["journal.jsonl", "step-block-0.safetensors"]


def test_a_job_with_nothing_finished_leaves_no_folder(folder: Path) -> None:
    with begun(folder) as job:
        job.new_states("a 0")
    assert not folder.exists()


def test_a_completed_job_leaves_no_folder(half: Path) -> None:
    with begun(half) as job:
        job.complete()
    assert not half.exists()


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_what_a_kill_left_of_a_completed_job_is_discarded(half: Path, removed: int, monkeypatch) -> None:
    """The folder is removed file by file, the journal last."""
    monkeypatch.setattr(jobs.JobFolder, "remove", lambda self: None)
    with begun(half) as job:
        job.complete()
    monkeypatch.undo()
    for name in ["step-block-0.safetensors", "journal.jsonl"][:removed]:
        (half / name).unlink()
    with begun(half, bits=3) as job:
        assert job.finished == 0


def test_other_facts_are_refused_by_name_and_a_restart_forgets(half: Path) -> None:
    expected = r"model was `aaaaaaaaaaaa…`, is `bbbbbbbbbbbb…`; bits was `4`, is `3`; new was not given, is `1`"
    with pytest.raises(JobError, match=expected) as caught:
        begun(half, model="b" * 64, bits=3, new=1)
    assert "--restart" in caught.value.hint and "--job" in caught.value.hint
    with Job(half) as job:
        assert job.finished == 2
        job.begin({**FACTS, "bits": 3}, restart=True)
        assert job.finished == 0
        finish(job, "block 0")
    assert names(half) == ["journal.jsonl", "step-block-0.safetensors"]
    with Job(half) as job:
        assert job.facts == {**FACTS, "bits": 3}


def test_a_folder_of_another_version_is_refused(half: Path, monkeypatch) -> None:
    monkeypatch.setattr(jobs, "VERSION", jobs.VERSION + 1)
    with pytest.raises(JobError, match="is of version 1 of job folders, this program has 2") as caught:
        begun(half)
    assert "--restart" in caught.value.hint
    with Job(half) as job:
        job.begin(FACTS, restart=True)
        assert job.finished == 0


def test_hints_are_remembered_and_not_compared(folder: Path) -> None:
    with Job(folder) as job:
        assert job.hints == {} and job.facts is None
        job.begin(FACTS, hints={"stamps": {"a": [1]}})
        finish(job, "block 0")
    with Job(folder) as job:
        assert job.hints == {"stamps": {"a": [1]}}
        job.begin(FACTS, hints={"stamps": {}})


def test_a_moved_job_goes_on(half: Path, tmp_path: Path) -> None:
    half.rename(tmp_path / "elsewhere")
    with begun(tmp_path / "elsewhere") as job:
        assert torch.equal(dict(job.tensors("block 0"))["weight"], WEIGHT)


# One process


def test_a_second_job_in_the_folder_is_refused(half: Path) -> None:
    with begun(half) as job:
        with pytest.raises(JobError, match="another process works in") as caught:
            Job(half)
        assert caught.value.hint
        assert job.finished == 2
    with begun(half) as job:
        assert job.finished == 2


def test_the_lock_dies_with_its_process(half: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from quantkit.job.job import Job\n"
        f"job = Job(Path({str(half)!r})); print(job.finished, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("2\n", -9)
    with begun(half) as job:
        assert job.finished == 2


def test_a_disk_without_locks_is_no_obstacle(half: Path, monkeypatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with begun(half) as job:
        assert job.finished == 2


# Not trusted


def test_folders_of_others_are_refused_and_stay(folder: Path) -> None:
    folder.mkdir()
    (folder / "precious.txt").write_text("mine")
    with pytest.raises(JobError, match=r"holds `precious.txt`, which is no part of a job"):
        Job(folder)
    (folder / "precious.txt").rename(folder / "journal.jsonl")
    with pytest.raises(JobError, match="is no journal"):
        Job(folder).begin(FACTS, restart=True)
    assert (folder / "journal.jsonl").read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_link_or_file_in_place_of_the_folder_is_refused(folder: Path, kind: str) -> None:
    (folder.parent / "elsewhere").mkdir()
    if kind == "link":
        folder.symlink_to("elsewhere")
    else:
        folder.write_text("mine")
    with pytest.raises(JobError, match=rf"is a {kind}, where the folder of this job should be") as caught:
        Job(folder)
    assert caught.value.hint
    assert names(folder.parent / "elsewhere") == []


def test_no_planted_link_is_written_through_or_read(half: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    (half / "step-block-2.safetensors.part").symlink_to(elsewhere / "precious")
    (half / "states-a-0").symlink_to(elsewhere)
    with begun(half) as job, pytest.raises(JobError, match="is not a regular file"), job.step("block 2"):
        pass
    (half / "step-block-2.safetensors.part").unlink()
    with begun(half) as job:
        with pytest.raises(JobError, match="is not a folder with hidden states"):
            job.states("a 0")
        made = job.new_states("a 0")
        assert made.is_dir() and not made.is_symlink()
        (half / "step-block-0.safetensors").rename(elsewhere / "block")
        (half / "step-block-0.safetensors").symlink_to(elsewhere / "block")
        with pytest.raises(JobError, match="is not a regular file"):
            list(job.tensors("block 0"))
        (half / "states-b-0").symlink_to(elsewhere)
        job.keep_states()
        job.complete()
    assert names(elsewhere) == ["block", "precious"] and (elsewhere / "precious").read_text() == "mine"


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "other"])
def test_a_damaged_step_is_an_error(half: Path, damage: str) -> None:
    file = half / "step-block-0.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-3] ^= 16
    if damage == "cut":
        del content[-5:]
    file.write_bytes(content.replace(b'"odd"', b'"odf"') if damage == "other" else content)
    if damage == "gone":
        file.unlink()
    with begun(half) as job, pytest.raises(JobError, match=r"`block 0` in `.*out.job` is damaged") as caught:
        list(job.tensors("block 0"))
    assert "--restart" in caught.value.hint


# The disk


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace", "open"])
def test_a_step_that_the_disk_refuses_can_be_done_again(half: Path, monkeypatch, number: int, call: str) -> None:
    """At every call of its kind in turn, until the step gets by without it."""
    target = (Path, "replace") if call == "replace" else (os, call)
    allowed = 0
    while not _finished(half, monkeypatch, target, allowed, OSError(number, os.strerror(number))):
        assert not [name for name in names(half) if name.endswith(".part")]
        assert not open_files(half), "a deleted file keeps its space as long as it is open"
        allowed += 1
    assert allowed >= 1
    with begun(half) as job:
        assert job.finished == 3
        assert torch.equal(dict(job.tensors("block 2"))["weight"], WEIGHT)


def open_files(folder: Path) -> list[str]:
    """What this process holds open there, deleted files too."""
    links = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return [path for path in links if path.startswith(f"{folder}/")]


def _finished(folder: Path, monkeypatch, target: tuple, allowed: int, failure: OSError) -> bool:
    """Whether a step gets by with so many calls; the next one fails."""
    real, seen = getattr(*target), []

    def fail(*arguments: object, **named: object) -> object:
        seen.append(arguments)
        if len(seen) > allowed:
            raise failure
        return real(*arguments, **named)

    with begun(folder) as job:
        monkeypatch.setattr(*target, fail)
        try:
            with job.step("block 2") as step:
                step.add("weight", WEIGHT)
                step.finish({"error": 0.2})
        except JobError as error:
            assert failure.strerror in error.message and str(folder) in error.message
            assert "the same command goes on with whatever is finished" in error.hint
        finally:
            monkeypatch.undo()
        return job.has("block 2")


def test_a_place_that_cannot_be_made_has_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=r"`.*file/job` cannot be written") as caught:
        Job(tmp_path / "file" / "job")
    assert "--job" in caught.value.hint


def test_homes_say_which_file_has_a_tensor(tmp_path: Path) -> None:
    with begun(tmp_path / "job") as job:
        with job.step("block 2") as step:
            step.add("weight", WEIGHT)
            step.finish({"error": 0.2})
        with job.step("block 3") as step:
            step.finish({"error": 0.3})
        (home,) = job.homes("block 2").values()
        assert home.path.parent == tmp_path / "job" and home.entries["weight"].shape == tuple(WEIGHT.shape)
        assert job.homes("block 3") == {}
        home.path.write_bytes(b"no header")
        with pytest.raises(JobError, match=r"`block 2` in .* is damaged"):
            job.homes("block 2")
