"""`quantkit measurement show`: tables of a file, and pictures."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quantkit import cli
from quantkit.commands.show_measurement import run
from quantkit.errors import PlanError, UsageError
from quantkit.measurement import Candidate, Check, MeasuredLinear, Measurement, damage_near
from quantkit.progress import Silent
from quantkit.settings import ShowMeasurementSettings

KINDS = {"self_attn.q_proj": (64, 64), "mlp.down_proj": (128, 64)}


def measured(**changes) -> Measurement:
    linears = [
        MeasuredLinear(
            f"model.layers.{block}.{kind}",
            *shape,
            tuple(
                Candidate(f"{bits}@64", (bits * shape[0] + 300) * shape[1], 4.0**-bits, (block + 1) * 4.0**-bits)
                for bits in (2, 3, 4, 5, 6, 8)
            ),
        )
        for block in range(3)
        for kind, shape in KINDS.items()
    ]
    text = {"source": "bundled", "rows": 8, "length": 64}
    checks = (Check(0, 3.2, 0.01, 0.0125, 512), Check(2, 3.2, 0.03, 0.02, 512))
    return replace(Measurement("f" * 64, 64, 64 * 320, text, tuple(linears), checks), **changes)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    measured().save(tmp_path / "m.json")
    return tmp_path / "m.json"


def test_a_file_is_shown_as_it_was_measured(file: Path) -> None:
    report = run(ShowMeasurementSettings(file), Silent())
    assert report.measurement == measured()
    assert [row[0] for row in report.layer_rows()] == ["block 0", "block 1", "block 2"]
    assert report.check_rows() == [
        ["block 0", "3.20", "512", "0.01000", "0.01250", "0.80"],
        ["block 2", "3.20", "512", "0.03000", "0.02000", "1.50"],
    ]
    bits = [row[1:] for row in report.kind_rows()]
    assert len(bits) == 2 and all(len(row) == 6 for row in bits)


def test_damage_is_that_of_the_nearest_layouts() -> None:
    choices = measured().choices_by_block()[1]
    nearest = [min(linear.candidates, key=lambda each: abs(each.bits / linear.weights - 9)) for (linear,) in choices]
    assert damage_near(choices, 9) == sum(candidate.damage for candidate in nearest)


@pytest.mark.parametrize(("name", "magic"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG"), ("a.pdf", b"%PDF")])
def test_pictures_are_drawn(name: str, magic: bytes, file: Path, tmp_path: Path) -> None:
    run(ShowMeasurementSettings(file, tmp_path / name), Silent())
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_the_same_file_gives_the_same_picture_with_the_checks_in_it(file: Path, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        run(ShowMeasurementSettings(file, tmp_path / name), Silent())
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    measured(checks=()).save(file)
    run(ShowMeasurementSettings(file, tmp_path / "without.svg"), Silent())
    assert (tmp_path / "without.svg").read_bytes() != (tmp_path / "a.svg").read_bytes()


def test_what_was_measured_together_is_drawn_as_one(tmp_path: Path) -> None:
    names = [tuple(f"model.layers.{block}.{kind}" for kind in KINDS) for block in range(3)]
    measured(together=tuple(names), checks=(), unit="shares").save(tmp_path / "m.json")
    report = run(ShowMeasurementSettings(tmp_path / "m.json", tmp_path / "a.svg"), Silent())
    assert report.kind_rows() == [] and len(report.measurement.choices) == 3
    assert next(title for title, _, _ in report.tables()) == "damage by block, shares"


@pytest.mark.parametrize(
    ("together", "words"),
    [
        ([["model.layers.0.self_attn.q_proj", "model.layers.9.mlp.up_proj"]], "measured together with linears that"),
        ([["model.layers.0.self_attn.q_proj"], ["model.layers.0.self_attn.q_proj"]], "has a linear twice"),
    ],
)
def test_partners_that_make_no_sense_are_refused(together: list, words: str, file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"together": together}))
    with pytest.raises(PlanError, match=words):
        Measurement.load(file)


def test_a_picture_that_cannot_be_drawn_is_refused_first(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"`a\.jpg` names no kind of picture"):
        run(ShowMeasurementSettings(tmp_path / "absent.json", tmp_path / "a.jpg"), Silent())
    with pytest.raises(PlanError, match="cannot be written"):
        run(ShowMeasurementSettings(file, tmp_path / "absent" / "a.svg"), Silent())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="`--plot` needs `matplotlib`, which is not installed") as caught:
        run(ShowMeasurementSettings(file, tmp_path / "a.svg"), Silent())
    assert caught.value.hint == "pip install 'quantkit[plots]'"
    assert not (tmp_path / "a.svg").exists()


def test_the_command_shows_tables_or_json(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["measurement", "show", str(file), "--plot", str(tmp_path / "a.svg")]) == 0
    assert "mlp.down_proj" in capsys.readouterr().out
    assert cli.run(["measurement", "show", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checks"][0]["seen"] == 0.0125
    assert cli.run(["measurement", "show", str(tmp_path / "absent.json")]) == 12
