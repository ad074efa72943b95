"""Batches: two good results and one named failure, one measurement for several rates, a file checked as a whole."""

import json
from pathlib import Path

import pytest
import tiny
import tiny_gptq

from quantkit import cli
from quantkit.commands import measure
from quantkit.commands.conversion import damage
from quantkit.commands.conversion.batch import read_jobs, run_batch
from quantkit.errors import UsageError
from quantkit.progress import Silent


@pytest.fixture(autouse=True)
def _little_text(monkeypatch) -> None:
    monkeypatch.setattr(damage, "WINDOWS", 2)
    monkeypatch.setattr(damage, "LENGTH", 64)


def test_a_broken_input_among_three(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_gptq.write_model(tmp_path / "good")
    tiny_gptq.write_model(tmp_path / "broken")
    with (tmp_path / "broken" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    (tmp_path / "jobs.toml").write_text(
        """
        [[job]]
        route = "gptq-to-gptq-v2"
        in = "good"
        out = "out/v2"
        [[job]]
        route = "gptq-to-gptq-v2"
        in = "broken"
        out = "out/broken"
        [[job]]
        route = "gptq-to-hf"
        in = "good"
        out = "out/hf"
        """
    )
    assert cli.run(["convert", "batch", "jobs.toml", "--json"]) == 10
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == 1
    good, failed, other = report["jobs"]
    assert "broken" in failed["error"]
    assert failed["exit_code"] == 10
    assert (good["exact"], other["exact"]) == (7, 7)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["hf", "v2"]


def test_several_rates_share_one_measurement(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.write_model(tmp_path / "model")
    tiny_gptq.write_model(tmp_path / "gptq")
    measured, run = [], measure.run
    monkeypatch.setattr(measure, "run", lambda *arguments: (measured.append(0), run(*arguments))[1])
    (tmp_path / "jobs.toml").write_text(
        """
        [defaults]
        samples = 4
        length = 64
        [[job]]
        route = "gptq-to-exl2"
        in = "gptq"
        out = "exl2"
        bpw = [4.5, 6.0]
        [[job]]
        route = "gptq-to-exl2"
        in = "gptq"
        out = "free"
        bpw = 6.5
        data_free = true
        """
    )
    report = run_batch(Path("jobs.toml"), Silent())
    assert report.exit_code == 0
    assert len(measured) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exl2-4.5bpw", "exl2-6bpw", "free", "gptq", "jobs.toml", "model"]
    damages = [result.damage.kl_mean for result in report.results]
    assert damages[1] < damages[0]
    assert {0, 1} <= report.front() | {2}
    rows = report.tables()[0][2]
    assert rows[0][6] == "*"
    assert [row[3] for row in rows[:2]] == [f"{result.facts['bits_per_weight']:.3f}" for result in report.results[:2]]


WRONG = [
    ("[[job]]\nroute = 'x'\nin = 'a'\nout = 'b'", "no route `x`"),
    ("[[job]]\nroute = 'shard'\nin = 'a'", "needs the texts"),
    ("[[job]]\nroute = 'shard'\nin = 'a'\nout = 'b'\nbpw = 4", "`bpw` has no meaning"),
    ("[[job]]\nroute = 'shard'\nin = 'a'\nout = 'b'\nshard_size = 4", "expected str"),
    ("[defaults]\nspeed = 1\n[[job]]\nroute = 'shard'\nin = 'a'\nout = 'b'", "no route reads"),
    ("[[job]]\nroute = 'shard'\nin = 'a'\nout = 'b'\n" * 2, "more than once"),
    ("jobs = 1", "unknown table `jobs`"),
    ("[defaults]", r"no `\[\[job\]\]`"),
    ("not toml", "is not TOML"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_file_that_is_wrong_anywhere_is_refused_before_work(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_jobs(tmp_path / "jobs.toml")
