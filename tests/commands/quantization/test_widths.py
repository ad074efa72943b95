"""`--effort best` with a target that reads several widths: each linear gets the one that its damage is worth."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.quantization.outlook import foresee
from quantkit.commands.quantization.redo_report import RedoReport
from quantkit.commands.quantization.report import QuantizeReport
from quantkit.commands.quantization.resumption import Finished
from quantkit.commands.quantization.widths import width_rules
from quantkit.commands.quantize import run
from quantkit.consumers import verdicts
from quantkit.inventory import take
from quantkit.models.architecture import block_of
from quantkit.plan import kind_of
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}
FUSED = ({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, {"mlp.gate_proj", "mlp.up_proj"})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("wide") / "model", dtype="float16", **SHAPE)


def settings_for(model: Path, out: Path, **options) -> QuantizeSettings:
    own = {"bits": 3, "group_size": 64, "effort": "best", "samples": 8, "length": 32, "evaluate": False, **options}
    return QuantizeSettings(str(model), out, **own)


def widths_of(report: QuantizeReport) -> dict[str, int]:
    return {linear.name: int(linear.bits) for linear in report.linears}


@pytest.fixture(scope="module")
def alike(model: Path, tmp_path_factory) -> QuantizeReport:
    return run(settings_for(model, tmp_path_factory.mktemp("alike") / "out"), Silent())


@pytest.fixture(scope="module")
def mixed(model: Path, tmp_path_factory) -> QuantizeReport:
    out = tmp_path_factory.mktemp("mixed") / "out"
    return run(settings_for(model, out, target="gptqmodel"), Silent())


def test_widths_differ_and_take_no_more_than_alike(alike: QuantizeReport, mixed: QuantizeReport) -> None:
    assert set(widths_of(alike).values()) == {3}
    assert len(set(widths_of(mixed).values())) > 1
    assert mixed.plan.stored_bits <= alike.plan.stored_bits
    assert mixed.plan.stored_bits > 0.9 * alike.plan.stored_bits


def test_the_file_says_each_width_and_is_read_by_it(mixed: QuantizeReport) -> None:
    config = json.loads((mixed.out / "config.json").read_text())["quantization_config"]
    checkpoint = open_checkpoint(mixed.out)
    for name, bits in widths_of(mixed).items():
        rows, packed = checkpoint.linear(name).in_features, checkpoint.info(f"{name}.qweight").shape[0]
        assert packed * 32 == rows * bits
    assert config["bits"] == 3
    assert all(set(changes) == {"bits"} for changes in config["dynamic"].values())
    found = {verdict.consumer: verdict.loads for verdict in verdicts(take(checkpoint))}
    assert found["GPTQModel"]
    assert not found["transformers"]


def test_linears_that_are_run_as_one_keep_one_width(model: Path, tmp_path: Path) -> None:
    report = run(settings_for(model, tmp_path / "out", target="vllm"), Silent())
    widths = widths_of(report)
    assert len(set(widths.values())) > 1
    for block in range(SHAPE["num_hidden_layers"]):
        for fused in FUSED:
            own = {bits for name, bits in widths.items() if block_of(name) == block and kind_of(name) in fused}
            assert len(own) == 1
    assert {verdict.consumer: verdict.loads for verdict in verdicts(take(open_checkpoint(report.out)))}["vLLM plain"]


def test_a_rule_of_the_users_stays(model: Path, tmp_path: Path) -> None:
    rule = r".*\.1\.mlp\.down_proj:bits=8"
    report = run(settings_for(model, tmp_path / "out", target="gptqmodel", rule=(rule,)), Silent())
    assert widths_of(report)["model.layers.1.mlp.down_proj"] == 8
    assert report.settings["rule"][0] == rule


@pytest.mark.parametrize(
    "options",
    [{"target": None}, {"target": "transformers"}, {"target": "any", "bits": 4}, {"target": "gptqmodel", "bits": 2}],
    ids=["no target", "a reader of one width", "any", "nothing to give away"],
)
def test_without_a_choice_all_keep_one_width(model: Path, tmp_path: Path, options: dict) -> None:
    report = run(settings_for(model, tmp_path / "out", **options), Silent())
    assert set(widths_of(report).values()) == {options.get("bits", 3)}


def test_the_same_command_again_has_nothing_to_do(model: Path, mixed: QuantizeReport) -> None:
    again = run(settings_for(model, mixed.out, target="gptqmodel"), Silent())
    assert isinstance(again, Finished)
    assert again.as_json()["bits"] == 3


def test_a_part_is_redone_in_the_widths_it_has(model: Path, tmp_path: Path) -> None:
    settings = settings_for(model, tmp_path / "out", target="gptqmodel", effort="best")
    before = widths_of(run(settings, Silent()))
    odd = next(name for name, bits in before.items() if bits != 3)
    settings = QuantizeSettings(str(model), tmp_path / "out", redo=f"{odd}$", evaluate=False)
    report = run(settings, Silent())
    assert isinstance(report, RedoReport)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.info(f"{odd}.qweight").shape[0] * 32 == checkpoint.linear(odd).in_features * before[odd]


def test_what_is_foreseen_is_a_guess_with_these_bits(model: Path, tmp_path: Path, alike: QuantizeReport) -> None:
    outlook = foresee(settings_for(model, tmp_path / "out", target="gptqmodel"), Silent())
    assert outlook.foretold
    assert outlook.plan.bits_per_weight == alike.plan.bits_per_weight
    plain = foresee(replace(settings_for(model, tmp_path / "out")), Silent())
    assert not plain.foretold


def test_a_rule_matches_what_others_call_the_linears_that_they_run_as_one() -> None:
    names = {"model.layers.0.self_attn.q_proj": 8, "model.layers.12.self_attn.q_proj": 8, "model.layers.3.mlp.up_proj": 2}
    first, second = width_rules(names)
    assert first.text == r"^model\.layers\.(?:0|12)\.self_attn\.(?:q_proj|qkv_proj)$:bits=8"
    assert first.matches("model.layers.12.self_attn.qkv_proj")
    assert not first.matches("model.layers.1.self_attn.q_proj")
    assert second.text == r"^model\.layers\.(?:3)\.mlp\.up_proj$:bits=2"
