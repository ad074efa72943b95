"""`commands.plan` on measurement files: what is chosen, written and refused."""

import json
import random
from pathlib import Path

import pytest

from quantkit import cli
from quantkit.commands.plan import run
from quantkit.errors import FormatError, PlanError, UsageError
from quantkit.formats import exl2_layout, exl2_mix
from quantkit.measurement import Candidate, MeasuredLinear, Measurement
from quantkit.mix_plan import MixPlan, plan_mixes
from quantkit.progress import Silent
from quantkit.settings import PlanSettings

SHAPES = {"self_attn.q_proj": (576, 576), "self_attn.k_proj": (576, 192), "mlp.down_proj": (1536, 576)}


def measured(blocks: int = 6, dense: bool = False) -> Measurement:
    draw = random.Random(1)
    linears = []
    for block in range(blocks):
        for kind, (rows, columns) in SHAPES.items():
            level = 10 ** draw.uniform(-1, 1)
            candidates = []
            for mix in exl2_mix.CANDIDATES:
                bits = exl2_layout.stored_bits(exl2_layout.mixed(rows, exl2_mix.read(mix)), columns, False)
                error = 4 ** -(bits / rows / columns)
                candidates.append(Candidate(mix, bits, error, level * error))
            linears.append(MeasuredLinear(f"model.layers.{block}.{kind}", rows, columns, tuple(candidates)))
    if dense:
        linears.append(MeasuredLinear("model.layers.0.mlp.up_proj", 100, 64, (), 100 * 64 * 16, "100 is no multiple"))
    return Measurement("f" * 64, 576, 576 * 1000, {"source": "bundled"}, tuple(linears))


def bits_of(plan: MixPlan, measurement: Measurement) -> int:
    """Counted anew from the mixes alone."""
    return sum(
        exl2_layout.stored_bits(
            exl2_layout.mixed(linear.in_features, exl2_mix.read(plan.linears[linear.name])), linear.out_features, False
        )
        if linear.name in plan.linears
        else linear.dense_bits
        for linear in measurement.linears
    )


@pytest.mark.parametrize("bpw", [2.5, 3.0, 4.0, 5.0, 6.5])
def test_a_plan_is_just_below_its_target(bpw: float, tmp_path: Path) -> None:
    measurement = measured(dense=True)
    measurement.save(tmp_path / "m.json")
    report = run(PlanSettings(tmp_path / "m.json", bpw, tmp_path / "p.json"), Silent())
    plan = MixPlan.load(tmp_path / "p.json")
    assert plan == report.plan
    assert 0.995 * bpw < bits_of(plan, measurement) / measurement.weights <= bpw
    assert report.bits_per_weight == bits_of(plan, measurement) / measurement.weights
    assert report.allocation.damage <= 1.01 * report.allocation.bound
    assert plan.dense == {"model.layers.0.mlp.up_proj": "100 is no multiple"}


def test_sensitive_linears_get_more_bits() -> None:
    plan, _ = plan_mixes(measured(), 4.0, head_bits=6)
    by_name = {linear.name: linear for linear in measured().linears}
    levels = {name: by_name[name].candidates[0].damage / by_name[name].candidates[0].error for name in by_name}
    widest = {name: exl2_mix.CANDIDATES.index(mix) for name, mix in plan.linears.items()}
    assert widest[max(levels, key=levels.__getitem__)] > widest[min(levels, key=levels.__getitem__)]


def test_the_head_counts_when_asked() -> None:
    measurement = measured()
    head = exl2_layout.stored_bits(exl2_layout.mixed(576, exl2_mix.read(exl2_mix.HEAD[6])), 1000, False)
    plan, _ = plan_mixes(measurement, 4.0, head_bits=6, include_head=True)
    total = bits_of(plan, measurement) + head
    assert 0.995 * 4 < total / (measurement.weights + measurement.head_weights) <= 4
    assert bits_of(plan, measurement) < bits_of(plan_mixes(measurement, 4.0, head_bits=6)[0], measurement)


@pytest.mark.parametrize("bpw", [1.5, 9.0])
def test_targets_out_of_reach_are_refused_and_nothing_is_written(bpw: float, tmp_path: Path) -> None:
    measured().save(tmp_path / "m.json")
    with pytest.raises(PlanError, match="out of reach") as caught:
        run(PlanSettings(tmp_path / "m.json", bpw, tmp_path / "p.json"), Silent())
    assert "--bpw" in (caught.value.hint or "")
    assert not (tmp_path / "p.json").exists()


def test_a_head_width_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="a head of 7 bits"):
        plan_mixes(measured(), 4.0, head_bits=7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "other"}, "is no quantkit measurement"),
        ({"version": 9}, "expected version 1 of a quantkit measurement, found 9"),
        ({"linears": []}, "measures no linear"),
        ({"linears": [{"name": "a"}]}, "no key 'candidates'"),
        ({"head_weights": None}, "damaged measurement"),
    ],
)
def test_files_that_are_no_measurement_are_refused(change: dict, words: str, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(measured().as_json() | change))
    with pytest.raises(PlanError, match=words):
        Measurement.load(tmp_path / "m.json")


def test_a_measurement_is_read_as_it_was_written(tmp_path: Path) -> None:
    measurement = measured(dense=True)
    measurement.save(tmp_path / "m.json")
    assert Measurement.load(tmp_path / "m.json") == measurement
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]


def test_linears_that_stay_dense_are_listed_with_what_can_be_done(tmp_path: Path) -> None:
    """Here 100 · 64 weights at 16 bits beside the others: by hand."""
    measured(dense=True).save(tmp_path / "m.json")
    report = run(PlanSettings(tmp_path / "m.json", 4.0, tmp_path / "p.json"), Silent())
    others = report.weights - 6400
    fair = (4.0 * others + 16 * 6400) / report.weights
    assert fair <= report.proposal < fair + 0.01
    listed, advice = (row[0] for row in report.dense_rows())
    assert listed.startswith("`mlp.up_proj` (1×): 100 is no multiple; ") and f"--bpw {report.proposal:g}" in advice
    assert report.tables()[0][0] == "left dense" and report.as_json()["proposed_target"] == report.proposal
    better = run(PlanSettings(tmp_path / "m.json", report.proposal, tmp_path / "p.json"), Silent())
    assert 3.99 <= (better.allocation.bits - 16 * 6400) / others < 4.02
    (tmp_path / "p.json").unlink()
    with pytest.raises(FormatError, match=r"`model.layers.0.mlp.up_proj` cannot be quantized: 100 is no multiple"):
        run(PlanSettings(tmp_path / "m.json", 4.0, tmp_path / "p.json", strict=True), Silent())
    assert not (tmp_path / "p.json").exists()
    measured().save(tmp_path / "whole.json")
    whole = run(PlanSettings(tmp_path / "whole.json", 4.0, tmp_path / "p.json", strict=True), Silent())
    assert whole.dense_rows() == [] and whole.as_json()["proposed_target"] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"include_head": "false"}, '`include_head` is "false", expected true or false'),
        ({"head_bits": "6"}, '`head_bits` is "6", expected a number'),
        ({"head_bits": 7}, "a head of 7 bits"),
        ({"target": True}, "`target` is true, expected a number"),
        ({"target": -1}, "expected bits per weight above 0"),
        ({"linears": {}}, "quantizes no linear"),
        ({"linears": ["a"]}, "`linears`: expected an object"),
        ({"dense": {"a": None}}, "`dense`: expected an object of names and texts"),
        ({"heads": 6}, "unknown key `heads`"),
        ({"version": 2}, "expected version 1 of a quantkit plan, found 2"),
    ],
)
def test_each_value_of_an_edited_plan_is_looked_at(change: dict, words: str, tmp_path: Path) -> None:
    plan_mixes(measured(), 4.0, head_bits=6)[0].save(tmp_path / "p.json")
    value = json.loads((tmp_path / "p.json").read_text())
    (tmp_path / "p.json").write_text(json.dumps(value | change))
    with pytest.raises(PlanError, match=words):
        MixPlan.load(tmp_path / "p.json")


def test_a_linear_that_an_edit_names_twice_is_refused(tmp_path: Path) -> None:
    plan_mixes(measured(), 4.0, head_bits=6)[0].save(tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    name = '"model.layers.0.mlp.down_proj": '
    (tmp_path / "p.json").write_text(text.replace(name, f'{name}"8@128",\n  {name}', 1))
    with pytest.raises(PlanError, match=r"it has `model.layers.0.mlp.down_proj` twice in one object"):
        MixPlan.load(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("mix", "words"), [("4@64:50% 5@64:50%", "descending"), ("4 bits", "no mix of widths"), (4, "`linears`: expected an object of names and texts")]
)
def test_an_edit_that_makes_no_sense_is_refused(mix: object, words: str, tmp_path: Path) -> None:
    plan_mixes(measured(), 4.0, head_bits=6)[0].save(tmp_path / "p.json")
    value = json.loads((tmp_path / "p.json").read_text())
    value["linears"]["model.layers.0.mlp.down_proj"] = mix
    (tmp_path / "p.json").write_text(json.dumps(value))
    with pytest.raises(PlanError, match=words):
        MixPlan.load(tmp_path / "p.json")


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured().save(tmp_path / "m.json")
    options = ["plan", str(tmp_path / "m.json"), "--bpw", "4", "-o", str(tmp_path / "p.json")]
    assert cli.run(options) == 0
    assert "mlp.down_proj" in capsys.readouterr().out
    assert cli.run([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["linears"] == MixPlan.load(tmp_path / "p.json").linears
    assert found["bits_per_weight"] <= 4
    assert cli.run(["plan", str(tmp_path / "absent.json"), "--bpw", "4", "-o", str(tmp_path / "p.json")]) == 12
