"""`quantkit convert`: a table for people, one JSON object for machines, one error with a hint."""

import json

import pytest
import tiny_gguf

from quantkit import cli
from quantkit.commands.conversion.routes import ROUTES


def test_json_is_one_object_and_nothing_else(tmp_path, capsys) -> None:
    source = tiny_gguf.write_model(tmp_path / "tiny.gguf", weights="Q4_1").path
    assert cli.run(["convert", "gguf-to-hf", str(source), str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["route"] == "gguf-to-hf"
    assert report["architecture"] == "LlamaForCausalLM"
    assert report["types"] == {"Q4_1": 16, "F32": 5}
    assert report["tensors"] == 21
    assert report["tokenizer"] == "byte-level BPE, gpt-2, 276 tokens"


def test_a_table_and_overwrite(tmp_path, capsys) -> None:
    arguments = ["convert", "gguf-to-hf", str(tiny_gguf.write_model(tmp_path / "tiny.gguf").path), str(tmp_path / "out")]
    assert cli.run(arguments) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert cli.run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["way"].startswith("finished before")
    (tmp_path / "out" / "quantkit.json").unlink()
    assert cli.run(arguments) == 10
    assert cli.run([*arguments, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [(b"GGUF\x03\0\0\0", 10, "ends inside its header"), (b"PK\x03\x04", 10, "no GGUF file"), (None, 10, "cannot be read")],
)
def test_bad_input_is_one_error_with_a_hint(content, code, message, tmp_path, capsys) -> None:
    source = tmp_path / "bad.gguf"
    if content is not None:
        source.write_bytes(content)
    assert cli.run(["convert", "gguf-to-hf", str(source), str(tmp_path / "out"), "--json"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert lines[1].startswith("hint: ")
    assert not (tmp_path / "out").exists()


def test_the_routes_as_json(capsys) -> None:
    assert cli.run(["convert", "--list", "--json"]) == 0
    routes = json.loads(capsys.readouterr().out)["routes"]
    assert [route["route"] for route in routes] == [route.name for route in ROUTES]
    assert all({"summary", "weights", "calibration", "settings"} < route.keys() for route in routes)
    assert cli.run(["convert", "--json"]) == 2
    assert "quantkit convert --list --json" in capsys.readouterr().err


def test_help_of_a_batch_names_its_table(capsys) -> None:
    assert cli.run(["convert", "batch", "--help"]) == 0
    assert "[[job]]" in capsys.readouterr().out


def test_without_a_route_the_help_lists_them(capsys) -> None:
    assert cli.run(["convert", "--help"]) == 0
    assert "gguf-to-hf" in capsys.readouterr().out
    assert cli.run(["convert", "gguf-to-nothing", "a", "b"]) == 2
