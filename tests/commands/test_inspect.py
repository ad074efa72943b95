"""`commands.inspect`: every byte in a part, bits per weight as they are, whatever the format."""

import json
from pathlib import Path

import pytest
import tiny

from quantkit import cli
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.inspect import run
from quantkit.commands.quantize import run as run_quantize
from quantkit.errors import CheckpointError, UnsupportedModel
from quantkit.progress import Silent
from quantkit.settings import InspectSettings, QuantizeSettings

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "data" / "configs").glob("*.json"))


def inspected(path: Path):
    return run(InspectSettings(str(path)), Silent())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_tensor_is_in_one_part(family: str, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", family)
    report = inspected(model)
    checkpoint = open_checkpoint(model)
    assert report.family == family and report.method == "unquantized"
    assert sum(part.size_bytes for part in report.parts) == checkpoint.stored_bytes == 4 * report.parameters
    assert report.size_bytes == sum(file.stat().st_size for file in checkpoint.path.glob("*.safetensors"))
    names = {part.name for part in report.parts}
    assert {"embedding", "attention", "norms", "head"} <= names and "other" not in names
    assert ("routers" in names) == ("experts" in names) == (family == "MixtralForCausalLM" or "Moe" in family)
    biases = sum(
        info.shape[0] for name in checkpoint.names() if name.endswith(".bias") for info in [checkpoint.info(name)]
    )
    assert sum(part.weights for part in report.parts) + biases == report.parameters
    assert all(verdict.loads for verdict in report.verdicts if verdict.consumer in ("quantkit", "transformers"))


def test_bits_per_weight_are_those_of_quantize(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", "Qwen3MoeForCausalLM", num_hidden_layers=2)
    settings = {"group_size": 32, "effort": "nearest", "evaluate": False}
    written = run_quantize(QuantizeSettings(str(source), tmp_path / "out", **settings), Silent())
    report = inspected(tmp_path / "out")
    assert report.linears.bits_per_weight == pytest.approx(written.plan.bits_per_weight)
    assert report.size_bytes == written.size_bytes
    assert report.method == "gptq" and report.settings == "4 bits, group size 32, sym, gptq"
    by_name = {part.name: part for part in report.parts}
    assert by_name["experts"].stored_as == "gptq 4 bits/32"
    assert by_name["head"].stored_as == "dense 32 bits"
    assert by_name["routers"].bits_per_weight == 32


def test_exl2_of_another_writer() -> None:
    report = inspected(ROOT / "golden" / "exl2" / "llama-3.3bpw")
    assert report.method == "exl2" and "3.3 bits asked for" in report.settings
    assert 3.2 < report.linears.bits_per_weight < 3.4
    assert [verdict.consumer for verdict in report.verdicts if verdict.loads] == ["exllamav2", "quantkit"]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_config_is_enough(file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(file.read_bytes())
    report = inspected(tmp_path)
    assert report.method == "no weights here" and report.verdicts == ()
    biases = report.parameters - sum(part.weights for part in report.parts)
    assert 0 <= biases < 0.001 * report.parameters
    assert report.rows() and report.part_rows() and json.dumps(report.as_json(), allow_nan=False)


def test_tokenizer_and_template(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    facts = inspected(model).tokenizer
    assert facts.vocabulary == 276 and facts.template == "tokenizer_config.json" and facts.eos == ("</s>", "<|im_end|>")
    (model / "tokenizer.json").unlink()
    report = inspected(model)
    assert report.tokenizer is None and any("has no `tokenizer.json`" in note for note in report.notes)


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        inspected(tmp_path / "nothing")
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(UnsupportedModel):
        inspected(tmp_path)


def test_the_command(tmp_path: Path, capsys) -> None:
    model = tiny.write_model(tmp_path / "model")
    assert cli.run(["inspect", str(model)]) == 0
    assert "who can load it" in capsys.readouterr().out
    assert cli.run(["inspect", str(model), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["family"] == "LlamaForCausalLM" and said["config"]["layers"] == 2
    assert {part["name"] for part in said["parts"]} == {"embedding", "attention", "mlp", "norms", "head"}
