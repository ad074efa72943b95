"""Commands that are killed, interrupted, starved or led astray, and what the same command makes of it then."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from quantkit import cli
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.quantization import end
from quantkit.commands.quantization.resumption import Finished
from quantkit.commands.quantize import run
from quantkit.errors import CheckpointError, JobError, PlanError
from quantkit.job import job as jobs
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings

DRIVER = Path(__file__).parents[1] / "killed.py"
TEXT = ["--samples", "4", "--length", "32"]
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "tie_word_embeddings": True}


def killed(arguments: list[str], folder: Path, kills: object, begin_with: Path | None = None) -> dict:
    """The answer of the driver: see `tests/killed.py`."""
    begin = None if begin_with is None else str(begin_with)
    request = json.dumps({"arguments": arguments, "folder": str(folder), "kills": kills, "begin_with": begin})
    done = subprocess.run(
        [sys.executable, str(DRIVER)], input=request, capture_output=True, text=True, check=False, env=one_thread()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def require_unharmed(found: dict, *, again: int = 0) -> int:
    """How often it was killed. `again` is how the command ends when its result is there."""
    for number, one in enumerate(found["runs"]):
        assert one["same"] and one["code"] == 0, f"run {number}: {one}"
        assert -one["killed"] <= one["redone"] <= 0, f"run {number} did a finished step again: {one}"
        assert one["again"] == again and one["again_steps"] == 0, f"run {number} was not known as finished: {one}"
    return sum(one["killed"] for one in found["runs"])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("source") / "model", dtype="bfloat16", **SHAPE)


def gptq(model: Path) -> list[str]:
    return ["quantize", str(model), "-o", "out", "--group-size", "32", "--no-eval", *TEXT]


def exl2(model: Path) -> list[str]:
    return ["quantize", str(model), "-o", "out", "--format", "exl2", "--bpw", "4.5", "--no-eval", *TEXT]


# Killed


def test_quantize_killed_anywhere_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    found = killed(gptq(model), tmp_path / "work", {"every": 41})
    assert found["steps"] == 5 and set(found["contents"]) >= {"out/model.safetensors", "out/quantkit.json"}
    assert not [name for name in found["contents"] if not name.startswith("out/")]
    assert require_unharmed(found) == len(found["runs"]) >= 6


def test_quantize_with_measuring_killed_anywhere_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    found = killed(exl2(model), tmp_path / "work", {"every": 83})
    assert found["steps"] == 8  # gradients, three blocks measured, three blocks and the head quantized
    assert require_unharmed(found) == len(found["runs"]) >= 3


def test_measure_killed_anywhere_gives_the_same_file(model: Path, tmp_path: Path) -> None:
    found = killed(["measure", str(model), "-o", "m.json", *TEXT], tmp_path / "work", {"every": 41})
    assert list(found["contents"]) == ["m.json"]
    assert require_unharmed(found) == len(found["runs"]) >= 2


@pytest.fixture(scope="module")
def quantized(model: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "gptq"
    run(settings(model, out), Silent())
    return out


def convert(quantized: Path) -> list[str]:
    return ["convert", "gptq-to-exl2", str(quantized), "out", "--bpw", "5", "--no-eval", *TEXT]


def test_convert_killed_anywhere_gives_the_same_bytes(quantized: Path, tmp_path: Path) -> None:
    """Measuring and quantizing are steps of jobs, and the result says which conversion made it."""
    found = killed(convert(quantized), tmp_path / "work", {"every": 113})
    assert not [name for name in found["contents"] if not name.startswith("out/")]
    assert require_unharmed(found) == len(found["runs"]) >= 3


def redo(model: Path) -> list[str]:
    return ["quantize", str(model), "-o", "gptq", "--redo", r".*layers\.1\..*down_proj", "--effort", "default", "--no-eval"]


def test_a_redo_killed_anywhere_gives_the_same_bytes(model: Path, quantized: Path, tmp_path: Path) -> None:
    found = killed(redo(model), tmp_path / "work", {"every": 17}, quantized.parent)
    assert found["steps"] == 4  # gradients, the blocks up to the one of the linear, and tuning
    assert not [name for name in found["contents"] if not name.startswith("gptq/")]
    assert require_unharmed(found) == len(found["runs"]) >= 4


def test_a_redo_goes_on_after_the_disk_was_full(model: Path, quantized: Path, tmp_path: Path) -> None:
    found = killed(redo(model), tmp_path / "work", {"every": 41, "manners": ["full"]}, quantized.parent)
    assert require_unharmed(found) == len(found["runs"]) >= 2


def test_killed_again_and_again(model: Path, tmp_path: Path) -> None:
    kills = [[{"call": call, "manner": manner} for call, manner in ((12, "torn"), (5, "after"), (30, "before"), (8, "torn"))]]
    assert require_unharmed(killed(gptq(model), tmp_path / "work", kills)) == 4


def test_a_disk_that_is_full_for_a_while_costs_no_finished_step(model: Path, tmp_path: Path) -> None:
    found = killed(gptq(model), tmp_path / "work", {"every": 71, "manners": ["full"]})
    assert require_unharmed(found) == len(found["runs"]) >= 3
    codes = {code for one in found["runs"] for code in one["codes"]}
    assert codes <= {JobError.exit_code, CheckpointError.exit_code} and JobError.exit_code in codes


@pytest.mark.proof
def test_two_hundred_kills(model: Path, quantized: Path, tmp_path: Path) -> None:
    """At every call that changes the disk, and at random moments. The figures are in docs/results/resume.md."""
    total = 0
    for name, arguments, every, random_kills, again in (
        ("quantize gptq", gptq(model), 3, 30, 0),
        ("quantize exl2", exl2(model), 5, 30, 0),
        ("measure", ["measure", str(model), "-o", "m.json", *TEXT], 5, 10, 0),
        ("convert gptq-to-exl2", convert(quantized), 7, 10, 0),
        ("quantize --redo", redo(model), 3, 10, 0),
    ):
        for kills in ({"every": every}, {"random": random_kills, "seed": 7}):
            begin_with = quantized.parent if name.endswith("--redo") else None
            found = killed(arguments, tmp_path / "work", kills, begin_with)
            count = require_unharmed(found, again=again)
            total += count
            print(f"{name}, {kills}: {count} killed of {len(found['runs'])} runs, {found['calls']} calls", flush=True)
    assert total >= 200


# Interrupted


def test_ctrl_c_says_how_to_go_on(model: Path, tmp_path: Path) -> None:
    arguments = [*gptq(model), "--samples", "64", "--length", "256"]
    # The suite itself may run where Ctrl-C is ignored, which a child would inherit.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from quantkit.cli import main; main()"
    command = [sys.executable, "-c", heard, *arguments, "--restart"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=one_thread())
    while not list(tmp_path.glob("out.job/step-quantize-0.safetensors")):
        assert process.poll() is None, "it ended before it could be interrupted"
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    words = process.communicate()[1]
    assert process.returncode == 130, words
    assert words.splitlines()[-2] == "error: interrupted"
    assert words.splitlines()[-1].startswith("hint: to go on with whatever is finished: `quantkit quantize ")
    assert "--samples 64" in words.splitlines()[-1] and "--restart" not in words.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["out.job"]


# Finished before, changed, begun anew


def settings(model: Path, out: Path, **options: object) -> QuantizeSettings:
    return QuantizeSettings(str(model), out, group_size=32, samples=4, length=32, effort="fast", evaluate=False, **options)


def test_a_finished_result_is_known(model: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run([*gptq(model), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert cli.run([*gptq(model), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (first["finished_before"], again["finished_before"]) == (False, True) and first.keys() == again.keys()
    unknown = {"errors", "fallbacks", "linears", "remarks", "gradients", "tuning"}
    unknown |= {"seconds", "cpu_seconds", "peak_memory_bytes"}
    unknown |= {f"total_{name}" for name in ("seconds", "cpu_seconds", "peak_memory_bytes")}
    assert {name for name in first if first[name] != again[name]} == unknown | {"finished_before", "experts"}
    assert again["experts"] is None and all(again[name] is None for name in unknown)
    assert cli.run(gptq(model)) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert times == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert cli.run([*gptq(model), "--bits", "3"]) == 10
    assert "bits was `4`, is `3`" in capsys.readouterr().err
    assert cli.run([*gptq(model), "--bits", "3", "--overwrite"]) == 0
    assert cli.run([*gptq(model), "--bits", "3", "--restart"]) == 0
    assert cli.run([*gptq(model), "--restart"]) == 10  # what another command made needs more than that


def test_what_was_made_and_not_measured_is_measured_by_the_same_command(tmp_path: Path, monkeypatch) -> None:
    model = tiny.write_model(tmp_path / "model", max_position_embeddings=1024)
    own = QuantizeSettings(str(model), tmp_path / "out", group_size=32, samples=4, length=32, effort="fast")

    def killed(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("quantkit.commands.quantize.measure_damage", killed)
        with pytest.raises(KeyboardInterrupt):
            run(own, Silent())
    assert (tmp_path / "out" / "model.safetensors").is_file() and (tmp_path / "out.job").is_dir()
    found = run(own, Silent())
    assert found.damage.kl_mean > 0 and found.as_json()["finished_before"] and not (tmp_path / "out.job").exists()
    assert run(own, Silent()).damage is None, "measured before, as far as is known"
    assert run(replace(own, judged=True), Silent()).damage == found.damage


def test_the_same_result_again_has_the_same_bytes(model: Path, tmp_path: Path) -> None:
    run(settings(model, tmp_path / "a"), Silent())
    run(settings(model, tmp_path / "b", overwrite=True, strict=True, job=tmp_path / "elsewhere" / "job"), Silent())
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert list((tmp_path / "elsewhere").iterdir()) == []
    run(settings(model, tmp_path / "a", restart=True), Silent())
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}


def test_a_result_that_was_changed_is_another_one(model: Path, tmp_path: Path) -> None:
    run(settings(model, tmp_path / "out"), Silent())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="its tensors were changed afterwards") as caught:
        run(settings(model, tmp_path / "out"), Silent())
    assert "--overwrite" in caught.value.hint
    assert not isinstance(run(settings(model, tmp_path / "out", overwrite=True), Silent()), Finished)
    assert isinstance(run(settings(model, tmp_path / "out"), Silent()), Finished)


@pytest.fixture
def half(model: Path, tmp_path: Path, monkeypatch) -> Path:
    """The folder of a job of which a block is missing."""
    with monkeypatch.context() as patch:
        commit = jobs.Job._commit

        def once(self: jobs.Job, step: jobs.Step) -> None:
            if step.name == "quantize 1":
                raise KeyboardInterrupt
            commit(self, step)

        patch.setattr(jobs.Job, "_commit", once)
        with pytest.raises(KeyboardInterrupt):
            run(settings(model, tmp_path / "out"), Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["out.job"]
    return tmp_path / "out.job"


def expected(model: Path, tmp_path: Path) -> bytes:
    run(settings(model, tmp_path / "undisturbed"), Silent())
    return (tmp_path / "undisturbed" / "model.safetensors").read_bytes()


def test_other_settings_or_another_model_are_refused_by_name(half: Path, model: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(JobError, match="bits was `4`, is `3`; seed was `0`, is `1`"):
        run(settings(model, tmp_path / "out", bits=3, seed=1), Silent())
    other = shutil.copytree(model, tmp_path / "other")
    (other / "generation_config.json").write_text("{}")
    with pytest.raises(JobError, match="model's files was"):
        run(settings(other, tmp_path / "out"), Silent())
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JobError, match="model was") as caught:
        run(settings(other, tmp_path / "out"), Silent())
    assert "--restart" in caught.value.hint
    assert half.exists()
    run(settings(other, tmp_path / "out", restart=True), Silent())
    assert not half.exists()


def test_another_version_of_a_program_is_refused(half: Path, model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("quantkit.job.identity.VERSION", "9.9.9")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ABACUS")
    words = r"quantkit was `0\.1\.0`, is `9\.9\.9`; processor was `\w+`, is `ABACUS`"
    with pytest.raises(JobError, match=words):
        run(settings(model, tmp_path / "out"), Silent())


def test_a_moved_job_and_a_moved_model_go_on(half: Path, model: Path, tmp_path: Path) -> None:
    shutil.copytree(half, tmp_path / "there" / "out.job")
    shutil.rmtree(half)
    copy = shutil.copytree(model, tmp_path / "copy")
    blocks = [0]

    class Counting(Silent):
        def say(self, line: str) -> None:
            blocks.append(line.startswith("going on with") and "1 of 3 blocks" in line)

    run(settings(copy, tmp_path / "there" / "out"), Counting())
    assert sum(blocks) == 1
    assert (tmp_path / "there" / "out" / "model.safetensors").read_bytes() == expected(model, tmp_path)


def test_two_commands_on_one_job(half: Path, model: Path, tmp_path: Path) -> None:
    with jobs.Job(half):
        with pytest.raises(JobError, match="another process works in"):
            run(settings(model, tmp_path / "out"), Silent())
        with pytest.raises(JobError, match="another process works in"):
            run(settings(model, tmp_path / "second", job=half), Silent())
    run(settings(model, tmp_path / "out"), Silent())


@pytest.mark.parametrize("inside", ["model/job", "out/job", ""])
def test_a_job_in_the_model_or_the_result_is_refused(inside: str, model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "model")
    with pytest.raises(JobError, match="must not be the same folder or one inside the other"):
        run(settings(source, tmp_path / "out", job=tmp_path / inside), Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_job_whose_result_has_vanished_is_begun_anew(model: Path, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(jobs.JobFolder, "remove", lambda self: None)
        run(settings(model, tmp_path / "out"), Silent())
    assert (tmp_path / "out.job" / "journal.jsonl").exists()
    shutil.rmtree(tmp_path / "out")
    report = run(settings(model, tmp_path / "out"), Silent())
    assert not isinstance(report, Finished) and len(report.linears) == 21
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Damaged


@pytest.mark.parametrize("what", ["step-quantize-0.safetensors", "states-quantize-1/hidden-00000.bin"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "link"])
def test_damage_in_a_job_is_an_error_and_a_restart_helps(
    what: str, damage: str, half: Path, model: Path, tmp_path: Path
) -> None:
    file = half / what
    content = bytearray(file.read_bytes())
    file.unlink()
    if damage == "link":
        (tmp_path / "planted").write_bytes(content)
        file.symlink_to(tmp_path / "planted")
    elif damage != "gone":
        content[-9] ^= 1
        file.write_bytes(content if damage == "flip" else content[:-4])
    with pytest.raises(Exception, match=r"out\.job") as caught:
        run(settings(model, tmp_path / "out"), Silent())
    assert caught.type.__name__ in ("JobError", "CalibrationError")
    assert not (tmp_path / "out").exists()
    run(settings(model, tmp_path / "out", restart=True), Silent())
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected(model, tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_finished_result_that_lost_a_file_is_made_again_where_that_is_asked_for(
    file: str, model: Path, tmp_path: Path
) -> None:
    whole = expected(model, tmp_path)
    out = tmp_path / "undisturbed"
    (out / file).unlink()
    with pytest.raises(CheckpointError, match="was made by this command, but is damaged now: ") as caught:
        run(settings(model, out), Silent())
    assert "--overwrite" in str(caught.value.hint)
    run(settings(model, out, overwrite=True), Silent())
    assert (out / "model.safetensors").read_bytes() == whole


def test_a_job_that_is_removed_while_it_works_is_told_so_and_begun_again(model: Path, tmp_path: Path, monkeypatch) -> None:
    write = os.pwrite

    def write_where_nothing_is(descriptor: int, data: bytes, offset: int) -> int:
        if (tmp_path / "out.job" / "step-quantize-0.safetensors").exists():
            shutil.rmtree(tmp_path / "out.job")
        return write(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_where_nothing_is)
        with pytest.raises(JobError, match=r"out\.job` is gone") as caught:
            run(settings(model, tmp_path / "out"), Silent())
    assert "is kept" not in str(caught.value.hint) and "begins again" in str(caught.value.hint)
    run(settings(model, tmp_path / "out"), Silent())
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected(model, tmp_path)


def test_a_result_that_is_removed_before_it_is_measured_is_put_together_again(
    model: Path, tmp_path: Path, monkeypatch
) -> None:
    def removed(out: Path, *_: object) -> None:
        shutil.rmtree(out)
        open_checkpoint(out)

    with monkeypatch.context() as patch:
        patch.setattr(end, "_damage_there", removed)
        with pytest.raises(CheckpointError, match="was complete, and is gone") as caught:
            run(replace(settings(model, tmp_path / "out"), evaluate=True), Silent())
    assert "same command" in str(caught.value.hint) and (tmp_path / "out.job").is_dir()
    run(settings(model, tmp_path / "out"), Silent())
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected(model, tmp_path)


def test_a_link_in_place_of_the_job_is_not_followed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.job").symlink_to("elsewhere")
    with pytest.raises(JobError, match="is a link, where the folder of this job should be"):
        run(settings(model, tmp_path / "out"), Silent())
    assert list((tmp_path / "elsewhere").iterdir()) == []


# measure


def test_a_measurement_is_known_and_another_file_is_not_replaced(model: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["measure", str(model), "-o", "m.json", *TEXT, "--json"]
    assert cli.run(command) == 0
    first = json.loads(capsys.readouterr().out)
    before = (tmp_path / "m.json").stat()
    assert cli.run(command) == 0
    again = json.loads(capsys.readouterr().out)
    assert again.pop("finished_before") is True and first.pop("finished_before") is False
    assert again == first and (tmp_path / "m.json").stat().st_mtime_ns == before.st_mtime_ns
    assert cli.run([*command, "--seed", "1"]) == PlanError.exit_code
    assert "seed was `0`, is `1`" in capsys.readouterr().err
    (tmp_path / "m.json").write_text("mine")
    assert cli.run(command) == PlanError.exit_code
    assert (tmp_path / "m.json").read_text() == "mine"
    assert cli.run([*command, "--overwrite"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]
