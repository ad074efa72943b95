"""`quantkit quantize` as typed: JSON on stdout, and one clear error for each kind of bad input, with nothing left behind."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_model

from quantkit import cli

QUICK = ["--group-size", "32", "--samples", "4", "--length", "32", "--no-eval"]


def quantize(model: Path | str, out: Path, *options: str) -> int:
    return cli.run(["quantize", str(model), "-o", str(out), *QUICK, *options])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def refused(capsys, tmp_path: Path, *parts: str) -> None:
    """The last command said `error:` with these parts and a `hint:`, wrote nothing to stdout and left no folder."""
    captured = capsys.readouterr()
    error, hint = captured.err.splitlines()[-2:]
    assert captured.out == ""
    assert error.startswith("error: "), captured.err
    assert hint.startswith("hint: "), captured.err
    for part in parts:
        assert part in error, error
    assert "Traceback" not in captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) in ([], ["model"], ["model", "text.txt"])


def test_json_is_one_object_and_nothing_else(model: Path, out: Path, capsys) -> None:
    assert quantize(model, out, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "gptq"
    assert report["bits"] == 4
    assert len(report["linears"]) == report["plan"]["quantized"] == 14
    assert report["evaluation"] is None
    assert report["size_bytes"] == sum(file.stat().st_size for file in out.glob("*.safetensors"))


def test_tables_are_on_stdout_and_progress_is_not(model: Path, out: Path, capsys) -> None:
    assert quantize(model, out) == 0
    captured = capsys.readouterr()
    assert "bits per weight, linears" in captured.out
    assert "mlp.down_proj" in captured.out
    assert "peak memory" in captured.out


# Bad weights


def test_missing_shard(tmp_path: Path, out: Path, capsys) -> None:
    model = write_model(tmp_path / "model", shards=3)
    (model / "model-00002-of-00003.safetensors").unlink()
    assert quantize(model, out) == 10
    refused(capsys, tmp_path, "model-00002-of-00003.safetensors")


def test_truncated_shard(model: Path, tmp_path: Path, out: Path, capsys) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert quantize(model, out) == 10
    refused(capsys, tmp_path, "model.safetensors")


def test_git_lfs_pointer(model: Path, tmp_path: Path, out: Path, capsys) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"
    (model / "model.safetensors").write_text(pointer)
    assert quantize(model, out) == 10
    refused(capsys, tmp_path, "git-LFS pointer")


def test_pickle_only(model: Path, tmp_path: Path, out: Path, capsys) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    assert quantize(model, out) == 10
    refused(capsys, tmp_path, "pickle")


def test_no_weights_for_a_linear(model: Path, tmp_path: Path, out: Path, capsys) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert quantize(model, out) == 10
    refused(capsys, tmp_path, "model.layers.1.mlp.up_proj")


def test_shape_that_contradicts_the_config(model: Path, tmp_path: Path, out: Path, capsys) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 64)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert quantize(model, out) == 10
    refused(capsys, tmp_path, "model.layers.1.mlp.up_proj")


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(name: str, value: float, model: Path, tmp_path: Path, out: Path, capsys) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[name].view(-1)[5] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert quantize(model, out) == 10
    refused(capsys, tmp_path, name.removesuffix(".weight"), "model.safetensors")


# Bad config


def edit_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


def test_unknown_architecture(model: Path, tmp_path: Path, out: Path, capsys) -> None:
    edit_config(model, architectures=["MysteryForCausalLM"], model_type="mystery")
    assert quantize(model, out) == 10
    refused(capsys, tmp_path, "MysteryForCausalLM")


def test_unknown_rope_type(model: Path, tmp_path: Path, out: Path, capsys) -> None:
    edit_config(model, rope_scaling={"rope_type": "spiral", "factor": 2.0})
    assert quantize(model, out) == 10
    refused(capsys, tmp_path, "spiral")


def test_already_quantized(model: Path, tmp_path: Path, out: Path, capsys) -> None:
    assert quantize(model, out) == 0
    capsys.readouterr()
    assert quantize(out, tmp_path / "again") == 10
    captured = capsys.readouterr()
    assert "already quantized" in captured.err
    assert not (tmp_path / "again").exists()


# Bad output


def test_output_that_is_not_empty(model: Path, tmp_path: Path, out: Path, capsys) -> None:
    out.mkdir()
    (out / "precious.txt").write_text("keep")
    assert quantize(model, out) == 10
    captured = capsys.readouterr()
    assert "--overwrite" in captured.err.splitlines()[-1]
    assert [path.name for path in out.iterdir()] == ["precious.txt"]
    assert quantize(model, out, "--overwrite") == 0
    assert (out / "config.json").exists()
    assert not (out / "precious.txt").exists()


def test_output_that_is_the_model(model: Path, tmp_path: Path, capsys) -> None:
    before = sorted(path.name for path in model.iterdir())
    assert quantize(model, model, "--overwrite") == 10
    refused(capsys, tmp_path, str(model))
    assert sorted(path.name for path in model.iterdir()) == before


def test_output_that_is_a_file(model: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "text.txt").write_text("keep")
    assert quantize(model, tmp_path / "text.txt", "--overwrite") == 10
    refused(capsys, tmp_path, "text.txt")


def test_output_that_cannot_be_written(model: Path, tmp_path: Path, capsys) -> None:
    """`/proc` takes no folders, not even from root."""
    assert quantize(model, Path("/proc/out")) == 10
    refused(capsys, tmp_path, "/proc/out", "cannot be written")


def test_output_below_a_file(model: Path, tmp_path: Path, capsys) -> None:
    assert quantize(model, model / "config.json" / "out") == 10
    refused(capsys, tmp_path, "config.json")


# Bad calibration


def test_text_too_short(model: Path, tmp_path: Path, out: Path, capsys) -> None:
    (tmp_path / "text.txt").write_text("a few words")
    assert quantize(model, out, "--calibration", str(tmp_path / "text.txt")) == 13
    refused(capsys, tmp_path, "too short", "text.txt")


def test_missing_tokenizer(tmp_path: Path, out: Path, capsys) -> None:
    model = write_model(tmp_path / "model", tokenizer=False)
    assert quantize(model, out) == 10
    refused(capsys, tmp_path, "tokenizer.json")


def test_rows_longer_than_the_model_can_read(tmp_path: Path, out: Path, capsys) -> None:
    model = write_model(tmp_path / "model", max_position_embeddings=16)
    assert quantize(model, out) == 13
    refused(capsys, tmp_path, "32", "16")


def test_tokens_that_the_model_does_not_have(tmp_path: Path, out: Path, capsys) -> None:
    model = write_model(tmp_path / "model", vocab_size=64)
    assert quantize(model, out) == 13
    refused(capsys, tmp_path, "64")


# Bad options


@pytest.mark.parametrize(
    ("options", "code", "part"),
    [
        (["--bits", "5"], 11, "5"),
        (["--group-size", "0"], 11, "group size"),
        (["--group-size", "-2"], 11, "group size -2"),
        (["--format", "exl2"], 2, "exl2"),
        (["--format", "awq"], 2, "awq"),
        (["--dtype", "fp8"], 2, "fp8"),
        (["--device", "tpu"], 15, "tpu"),
        (["--samples", "0"], 2, "samples"),
        (["--checkpoint-format", "gptq_p"], 11, "gptq_p"),
        (["--rule", "q_proj:bits=8"], 2, "matches none of 14 linears"),
        (["--skip", "nothing"], 2, "matches none of 14 linears"),
        (["--untie-head"], 2, "of its own already"),
    ],
)
def test_options_out_of_range(
    options: list[str], code: int, part: str, model: Path, tmp_path: Path, out: Path, capsys
) -> None:
    assert quantize(model, out, *options) == code
    refused(capsys, tmp_path, part)


def test_strict_refuses_a_short_group(model: Path, tmp_path: Path, out: Path, capsys) -> None:
    assert quantize(model, out, "--group-size", "48", "--strict") == 11
    refused(capsys, tmp_path, "self_attn.q_proj", "64 input rows", "48")


def test_strict_refuses_a_dense_linear(tmp_path: Path, out: Path, capsys) -> None:
    model = write_model(tmp_path / "model", intermediate_size=72)
    assert quantize(model, out, "--strict") == 11
    refused(capsys, tmp_path, "mlp.gate_proj", "72")


def test_a_gate_judges_the_damage_and_leaves_the_result(tmp_path, capsys):
    model = write_model(tmp_path / "model", max_position_embeddings=1024)
    words = ["quantize", str(model), "-o", str(tmp_path / "out"), "--group-size", "32", "--effort", "nearest"]
    report = ["--report", str(tmp_path / "report")]
    assert cli.run([*words, "--gate", "kl_mean<1e-9,ppl_ratio<99", *report, "--json"]) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)["evaluation"]["kl_mean"] > 1e-9 and (tmp_path / "out" / "config.json").is_file()
    assert "error: the result fails its gate: kl_mean<1e-09 does not hold" in captured.err
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    assert found["candidates"][0]["label"] == "out" and (tmp_path / "report" / "index.html").is_file()
    assert cli.run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["evaluation"] is None
    assert cli.run([*words, "--gate", "kl_mean<99"]) == 0
    assert "finished before" in capsys.readouterr().out
    assert cli.run([*words, "--gate", "kl_mean<1e-9"]) == 3
    assert "kl_mean<1e-09 does not hold" in capsys.readouterr().err
    assert cli.run([*words, "--gate", "kl_mean<99", "--restart", "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gate", "loss<1"], "knows no figure `loss`"),
        (["--gate", "kl_mean<1", "--no-eval"], "is not measured here"),
        (["--gate", "kl_mean<1", "--dry-run"], "is not measured here"),
    ],
)
def test_a_gate_that_cannot_be_held_is_refused(options, message, model, out, tmp_path, capsys):
    assert cli.run(["quantize", str(model), "-o", str(out), *options]) == 2
    refused(capsys, tmp_path, message)
