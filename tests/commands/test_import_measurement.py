"""`quantkit measurement import`: files as ExLlamaV2 writes them, their bits counted here in another way."""

import json
from math import ceil
from pathlib import Path

import pytest
import tiny

from quantkit import cli
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.import_measurement import run
from quantkit.commands.quantize import run as quantize
from quantkit.errors import PlanError
from quantkit.formats import exl2_layout, exl2_mix
from quantkit.measurement import Measurement
from quantkit.mix_plan import plan_mixes
from quantkit.progress import Silent
from quantkit.settings import ImportMeasurementSettings, QuantizeSettings

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# Settings as (bits, size, share): the same for all linears of a block but the last.
OPTIONS = [
    ([(3, 64, 0.05), (2, 64, 0.95)], [(6, 32, 0.05), (3, 64, 0.2), (2, 64, 0.75)], 0.91),
    ([(4, 128, 0.1), (3, 128, 0.9)], [(4, 64, 0.1), (3, 64, 0.9)], 0.95),
    ([(5, 32, 0.1), (4, 32, 0.9)], [(8, 32, 0.05), (4, 128, 0.95)], 0.98),
    ([(6, 32, 1)], [(8, 128, 1)], 0.995),
]


def groups(rows: int, setting: list[tuple]) -> list[tuple[int, int]]:
    """(bits, rows) of each group: whole ones, rounded up, of each width, and the last cut where the rows end."""
    found = []
    for bits, size, share in setting:
        for _ in range(ceil(min(rows * share, rows - sum(each for _, each in found)) / size)):
            found.append((bits, min(size, rows - sum(each for _, each in found))))
    return found


def stored_bits(rows: int, columns: int, setting: list[tuple]) -> int:
    columns = -(-columns // 32) * 32
    return sum(bits * each * columns + 48 + 4 * columns for bits, each in groups(rows, setting)) + 32 * rows


def theirs(shapes: dict[str, dict[str, tuple[int, int]]]) -> dict:
    """Block → linear → (inputs, outputs), as a `measurement.json`."""
    measurement: dict = {}
    for number, (block, linears) in enumerate(shapes.items()):
        measurement[block] = []
        for first, last, accuracy in OPTIONS:
            option: dict = {"accuracy": accuracy - 0.01 * number, "total_bits": 0}
            for linear, (rows, columns) in linears.items():
                setting = last if linear == list(linears)[-1] else first
                option["total_bits"] += stored_bits(rows, columns, setting)
                bits, sizes, shares = zip(*setting, strict=True)
                option[linear.rpartition(".")[2]] = {
                    "group_size": {str(width): size for width, size in zip(bits, sizes, strict=True)},
                    "bits": list(bits),
                    "bits_prop": list(shares),
                    "scale_bits": 4,
                }
            measurement[block].append(option)
    measurement |= {"model.norm.norm": None, "lm_head.linear": None}
    return {"measurement": measurement, "last_module_idx": 6}


def llama_shapes(hidden: int = 128, wide: int = 256, blocks: int = 2) -> dict[str, dict[str, tuple[int, int]]]:
    shapes: dict[str, dict[str, tuple[int, int]]] = {}
    for block in range(blocks):
        sides = {"q_proj": hidden, "k_proj": hidden // 2, "v_proj": hidden // 2, "o_proj": hidden}
        shapes[f"model.layers.{block}.self_attn"] = {name: (hidden, side) for name, side in sides.items()}
        shapes[f"model.layers.{block}.mlp"] = dict.fromkeys(MLP[:2], (hidden, wide)) | {"down_proj": (wide, hidden)}
    return shapes


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    return tiny.write_model(folder, hidden_size=128, intermediate_size=256, dtype="bfloat16")


def write(folder: Path, value: object) -> Path:
    (folder / "theirs.json").write_text(json.dumps(value))
    return folder / "theirs.json"


def test_every_option_is_there_with_its_very_groups(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path, theirs(llama_shapes()))
    report = run(ImportMeasurementSettings(file, str(model), tmp_path / "m.json"), Silent())
    found = Measurement.load(tmp_path / "m.json")
    assert found == report.measurement and report.as_json()["remarks"]
    assert [linear.name for linear in found.linears] == open_checkpoint(model).linears()
    assert len(found.together) == 4 and found.unit != "" and "KL" not in found.unit
    for linear in found.linears:
        own = [last if linear.name.endswith(("o_proj", "down_proj")) else first for first, last, _ in OPTIONS]
        for candidate, setting in zip(linear.candidates, own, strict=True):
            layout = exl2_layout.mixed(linear.in_features, exl2_mix.read(candidate.mix))
            assert [(group.bits, group.rows) for group in layout.groups] == groups(linear.in_features, setting)
            assert candidate.bits == stored_bits(linear.in_features, linear.out_features, setting)
    for number, choice in enumerate(found.choices):
        for place, (*_, accuracy) in enumerate(OPTIONS):
            damage = sum(linear.candidates[place].damage for linear in choice)
            assert damage == pytest.approx((1 - accuracy + 0.01 * number) ** 2)


@pytest.mark.parametrize("bpw", [3.5, 4.5, 6.0])
def test_blocks_are_planned_as_a_whole(bpw: float, model: Path, tmp_path: Path) -> None:
    file = write(tmp_path, theirs(llama_shapes()))
    found = run(ImportMeasurementSettings(file, str(model), tmp_path / "m.json"), Silent()).measurement
    plan, allocation = plan_mixes(found, bpw, head_bits=6)
    assert allocation.bits <= bpw * found.weights
    for choice in found.choices:
        places = [
            {n for n, candidate in enumerate(linear.candidates) if candidate.mix == plan.linears[linear.name]}
            for linear in choice
        ]
        assert set.intersection(*places)
    assert [row[0] for row in report_rows(tmp_path)] == ["block 0", "block 1"]


def report_rows(folder: Path) -> list[list[str]]:
    from quantkit.commands.measuring.report import MeasureReport

    report = MeasureReport(folder / "m.json", Measurement.load(folder / "m.json"))
    assert report.kind_rows() == []
    return report.layer_rows()


def test_experts_share_a_setting(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", "MixtralForCausalLM")
    shapes = llama_shapes(64, 128)
    for block in range(2):
        del shapes[f"model.layers.{block}.mlp"]
        shapes[f"model.layers.{block}.block_sparse_moe"] = {
            f"experts.{expert}.{name}": (128, 64) if name == "w2" else (64, 128)
            for name in ("w1", "w3", "w2")
            for expert in range(4)
        }
    value = theirs(shapes)
    for block in range(2):
        # In `theirs` only the very last linear has the last setting; here that of all w2.
        for option in value["measurement"][f"model.layers.{block}.block_sparse_moe"]:
            setting = list(zip(*(option["w2"][key] for key in ("bits", "bits_prop")), strict=True))
            full = [(bits, option["w2"]["group_size"][str(bits)], share) for bits, share in setting]
            wrong = list(zip(*(option["w1"][key] for key in ("bits", "bits_prop")), strict=True))
            first = [(bits, option["w1"]["group_size"][str(bits)], share) for bits, share in wrong]
            option["total_bits"] += 3 * (stored_bits(128, 64, full) - stored_bits(128, 64, first))
    found = run(ImportMeasurementSettings(write(tmp_path, value), str(source), tmp_path / "m.json"), Silent()).measurement
    assert [len(names) for names in found.together] == [4, 4, 12, 12]
    downs = {linear.candidates[0].mix for linear in found.linears if linear.name.endswith("w2")}
    assert len(downs) == 1 and downs != {linear.candidates[0].mix for linear in found.linears if linear.name.endswith("w1")}


def test_a_model_is_quantized_with_it(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path, theirs(llama_shapes()))
    run(ImportMeasurementSettings(file, str(model), tmp_path / "m.json"), Silent())
    choice = QuantizeSettings(
        str(model), tmp_path / "out", format="exl2", bpw=4.5, measurement=tmp_path / "m.json", samples=4, length=64,
        effort="fast", evaluate=False,
    )
    report = quantize(choice, Silent())
    assert 3.5 < report.bits_per_weight <= 4.5


def change(path: list, value: object):
    def apply(theirs: dict) -> None:
        for key in path[:-1]:
            theirs = theirs[key]
        if value is None:
            del theirs[path[-1]]
        else:
            theirs[path[-1]] = value

    return apply


FIRST = ["measurement", "model.layers.0.self_attn"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (change([*FIRST, 1, "total_bits"], 5), r"option 1 of `model\.layers\.0\.self_attn` .* is of another model: it takes 5 bits"),
        (change(FIRST, None), r"does not measure `model\.layers\.0\.self_attn\.q_proj`"),
        (change(["measurement", "model.layers.9.mlp"], [{}]), r"measures `model\.layers\.9\.mlp`, which this model has not"),
        (change([*FIRST, 0, "v_proj"], None), "cannot be read: no key 'v_proj'"),
        (change([*FIRST, 0, "accuracy"], -0.5), "expected an accuracy from 0 to 1"),
        (change([*FIRST, 0, "accuracy"], float("nan")), "expected an accuracy from 0 to 1"),
        (change([*FIRST, 3, "q_proj", "bits_prop"], [0.5]), "leave 64 of 128 rows over"),
        (change(FIRST, {"attn": [], "mlp": []}), "is no list of options"),
        (change(["measurement"], None), "is no measurement of ExLlamaV2"),
    ],
)
def test_what_does_not_fit_is_refused(edit, words: str, model: Path, tmp_path: Path) -> None:
    value = theirs(llama_shapes())
    edit(value)
    with pytest.raises(PlanError, match=words) as caught:
        run(ImportMeasurementSettings(write(tmp_path, value), str(model), tmp_path / "m.json"), Silent())
    assert caught.value.hint
    assert not (tmp_path / "m.json").exists()


def test_the_command_imports_and_plan_says_how(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, theirs(llama_shapes()))
    out = str(tmp_path / "m.json")
    assert cli.run(["plan", str(file), "--bpw", "4", "-o", str(tmp_path / "p.json")]) == 12
    assert f"quantkit measurement import {file} MODEL" in capsys.readouterr().err
    assert cli.run(["measurement", "import", str(file), str(model), "-o", out]) == 0
    assert "no KL divergence" in " ".join(capsys.readouterr().out.split())
    assert cli.run(["plan", out, "--bpw", "4.5", "-o", str(tmp_path / "p.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unit"].startswith("squared error")
    assert cli.run(["measurement", "import", str(file), str(tmp_path / "no"), "-o", out]) != 0
