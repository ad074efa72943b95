"""`commands.check`: every fault of a folder in one go, each with its kind, and none in a sound one."""

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from quantkit import cli
from quantkit.commands import convert, inspect
from quantkit.commands.check import CheckReport, run
from quantkit.commands.quantize import run as run_quantize
from quantkit.errors import QuantkitError, RequestError
from quantkit.progress import Silent
from quantkit.runtime.load import load
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import CheckSettings, InspectSettings, QuantizeSettings

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 12345\n"


def checked(folder: Path) -> CheckReport:
    return run(CheckSettings(folder), Silent())


def messages(folder: Path) -> list[str]:
    return [fault.message.replace(str(folder), "F") for fault in checked(folder).faults]


def edit(folder: Path, **changes) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not tiny.ABSENT}))


def settings(folder: Path, **changes) -> None:
    """Of the quantization, in both places."""
    said = json.loads((folder / "quantize_config.json").read_text()) | changes
    (folder / "quantize_config.json").write_text(json.dumps(said))
    edit(folder, quantization_config=said)


def change(folder: Path, alter: Callable[[dict], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    alter(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model")


@pytest.fixture(scope="module")
def gptq_original(tmp_path_factory) -> Path:
    source = tiny.write_model(tmp_path_factory.mktemp("source") / "model", "Qwen2ForCausalLM")
    out = source.parent / "gptq"
    run_quantize(QuantizeSettings(str(source), out, group_size=32, effort="nearest", evaluate=False), Silent())
    return out


@pytest.fixture
def gptq(gptq_original: Path, tmp_path: Path) -> Path:
    out = tmp_path / "gptq"
    out.mkdir()
    for file in gptq_original.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    return out


# Sound folders


def test_weights_cut_short_are_not_told_as_settings_without_weights(gptq: Path) -> None:
    file = gptq / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    (fault,) = [message for message in messages(gptq) if "tokenizer" not in message]
    assert "is cut short" in fault


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_is_sound(family: str, tmp_path: Path) -> None:
    report = checked(tiny.write_model(tmp_path / "model", family, shards=3))
    assert report.faults == () and report.exit_code == 0
    assert report.verdicts[-1].consumer == "quantkit" and report.verdicts[-1].loads


def test_a_quantized_folder_is_sound(gptq: Path) -> None:
    assert messages(gptq) == []


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_optional_files_are_optional(name: str, model: Path) -> None:
    (model / name).unlink()
    assert messages(model) == []


@pytest.mark.parametrize("eos", [2, [2, 4], None])
def test_stop_tokens_in_every_spelling(eos, model: Path) -> None:
    edit(model, eos_token_id=eos)
    assert messages(model) == []


@pytest.mark.parametrize("kept", ["config.json", "quantize_config.json"])
def test_settings_in_one_place_are_enough(kept: str, gptq: Path) -> None:
    if kept == "config.json":
        (gptq / "quantize_config.json").unlink()
    else:
        edit(gptq, quantization_config=tiny.ABSENT)
    assert messages(gptq) == []


def test_an_index_that_names_no_file_of_the_folder_hides_no_fault(tmp_path: Path) -> None:
    """As ExLlamaV2 leaves it: it is put aside, and the weights themselves are looked at."""
    folder = tiny.write_model(tmp_path / "model")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00009.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert messages(folder) == []
    (folder / "model.safetensors").write_bytes(b"PK\x03\x04")
    [told] = messages(folder)
    assert "is a zip archive" in told


# All in one go


def test_many_faults_of_a_folder_are_told_together(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model", shards=4)
    (folder / "model-00001-of-00004.safetensors").write_text(LFS)
    (folder / "model-00002-of-00004.safetensors").write_bytes(b"\xff" * 200)
    (folder / "model-00003-of-00004.safetensors").unlink()
    (folder / "model-00003-of-00004.safetensors").symlink_to("blobs/gone")
    edit(folder, hidden_act="tanh", rms_norm_eps=tiny.ABSENT, use_bias=True)
    (folder / "tokenizer.json").write_text(LFS)
    told = messages(folder)
    assert len(told) == 7, told
    for part in (
        "00001-of-00004.safetensors` is a git-LFS pointer",
        "00002-of-00004.safetensors` is not a safetensors file",
        "dangling link `F/model-00003-of-00004.safetensors`",
        "`hidden_act` is 'tanh'",
        "`rms_norm_eps` is missing",
        "`use_bias` is True",
        "F/tokenizer.json` is a git-LFS pointer",
    ):
        assert sum(part in message for message in told) == 1, (part, told)
    assert checked(folder).exit_code == 10
    assert not any(verdict.loads for verdict in checked(folder).verdicts)


def test_missing_misshapen_and_foreign_tensors_are_told_one_by_one(model: Path) -> None:
    def alter(tensors: dict) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        del tensors["model.layers.1.input_layernorm.weight"]
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 96)
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(32, 64, dtype=torch.int32)
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors["model.norm.weight"][3] = float("nan")

    change(model, alter)
    told = messages(model)
    assert len(told) == 6
    for part in (
        "`model.layers.0.mlp.up_proj.weight` is not in `F`",
        "`model.layers.1.input_layernorm.weight` is not in `F`",
        "`model.layers.1.mlp.down_proj.weight` in `F/model.safetensors` has shape [64, 96], its config.json asks for",
        "`model.layers.0.self_attn.k_proj.weight` in `F/model.safetensors` is stored as int32",
        "`model.layers.7.mlp.up_proj.weight` in `F/model.safetensors` belongs to no part",
        "`model.norm.weight` in `F/model.safetensors` holds NaN",
    ):
        assert any(part in message for message in told), (part, told)


# The index


def test_an_index_that_lies(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model", shards=2)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index["weight_map"]["model.embed_tokens.weight"] = "../secret.safetensors"
    file.write_text(json.dumps(index))
    told = messages(folder)
    assert any("`../secret.safetensors`, which leaves its folder" in message for message in told)
    assert any("`model.norm.weight` is not in `F/model-00001" in message for message in told)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model", shards=2)
    tensors = load_file(folder / "model-00002-of-00002.safetensors")
    tensors["model.embed_tokens.weight"] = torch.zeros(320, 64)
    save_file(tensors, folder / "model-00002-of-00002.safetensors")
    assert any("`model.embed_tokens.weight` is in both" in message for message in messages(folder))


# GPTQ


@pytest.mark.parametrize(
    ("name", "damage", "part"),
    [
        (
            "nan scale",
            lambda t: t["scales"].__setitem__((0, 0), float("nan")),
            ".scales` in `F/model.safetensors` holds",
        ),
        ("infinite scale", lambda t: t["scales"].__setitem__((0, 0), float("inf")), ".scales` in `F/model"),
        ("group beyond", lambda t: t["g_idx"].__setitem__(5, 9), "g_idx` names group 9, but there are 2 groups"),
        ("group far below", lambda t: t["g_idx"].__setitem__(5, -9), "g_idx` names group -9"),
        ("v2 words under v1", lambda t: t["qzeros"].fill_(-0x77777778), "its words follow `gptq_v2`"),
    ],
)
def test_values_of_gptq(name: str, damage: Callable, part: str, gptq: Path) -> None:
    module = "model.layers.1.mlp.gate_proj"

    def alter(tensors: dict) -> None:
        damage({suffix: tensors[f"{module}.{suffix}"] for suffix in ("qweight", "qzeros", "scales", "g_idx")})

    change(gptq, alter)
    (told,) = messages(gptq)
    assert module in told and part in told
    assert checked(gptq).exit_code == 11


@pytest.mark.parametrize(
    ("key", "value", "other"), [("bits", 8, "`bits` is 4, not 8"), ("group_size", 64, "is 32, not 64")]
)
def test_settings_that_the_shapes_contradict(key: str, value: int, other: str, gptq: Path) -> None:
    settings(gptq, **{key: value})
    report = checked(gptq)
    assert {fault.exit_code for fault in report.faults} == {11}
    named = {fault.message.split("`")[1].rpartition(".")[0] for fault in report.faults}
    assert len(named) == 14  # every linear, not the first
    assert any(other in (fault.hint or "") for fault in report.faults)


def test_settings_that_contradict_each_other(gptq: Path) -> None:
    said = json.loads((gptq / "quantize_config.json").read_text())
    (gptq / "quantize_config.json").write_text(json.dumps({**said, "bits": 8}))
    assert any("`bits` of the quantization is 4" in message for message in messages(gptq))


def test_zero_scales_and_free_zero_points_are_notes(gptq: Path) -> None:
    def alter(tensors: dict) -> None:
        tensors["model.layers.0.mlp.up_proj.scales"][0, :3] = 0
        tensors["model.layers.0.mlp.up_proj.qzeros"][0, 0] = 0x12345678

    change(gptq, alter)
    report = checked(gptq)
    assert report.faults == ()
    assert any("up_proj.scales`: 3 of 256 are zero" in note for note in report.notes)
    assert any("up_proj.qzeros`: zero points" in note and "`sym` is true" in note for note in report.notes)


def test_a_bias_that_got_lost(gptq: Path) -> None:
    change(gptq, lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.bias"))
    assert any("model.layers.0.self_attn.q_proj.bias" in message for message in messages(gptq))


@pytest.mark.parametrize(("suffix", "forms"), [("weight", "dense and GPTQ"), ("q_weight", "GPTQ and EXL2")])
def test_a_linear_in_two_forms(suffix: str, forms: str, gptq: Path, tmp_path: Path) -> None:
    """Told here, and refused by all who would read one of them."""
    name = "model.layers.0.mlp.up_proj"
    change(gptq, lambda tensors: tensors.update({f"{name}.{suffix}": torch.zeros(128, 64)}))
    what = f"`{name}` in `F` is both {forms}: "
    assert any(what in message for message in messages(gptq))
    readers: list[Callable[[], object]] = [
        lambda: load(gptq),
        lambda: inspect.run(InspectSettings(str(gptq)), Silent()),
        lambda: convert.convert("gptq-to-hf", gptq, tmp_path / "hf", progress=Silent()),
        lambda: convert.convert("gptq-to-gptq-v2", gptq, tmp_path / "v2", progress=Silent()),
    ]
    for read in readers:
        with pytest.raises(QuantkitError, match=f"`{name}` in .* is both {forms}: |tensors belong to no part"):
            read()


def test_a_rule_that_says_dense(gptq: Path) -> None:
    settings(gptq, dynamic={"-:.*up_proj": {}})
    assert any("a rule of `dynamic` says that it is dense" in message for message in messages(gptq))


@pytest.mark.parametrize(
    "changes", [{"format": "gptq_p", "checkpoint_format": "gptq_p"}, {"bits": 5}, {"pack_dtype": "int16"}]
)
def test_settings_that_cannot_be_read(changes: dict, gptq: Path) -> None:
    settings(gptq, **changes)
    report = checked(gptq)
    assert report.exit_code == 11 and not report.verdicts[-1].loads


# Head and tokenizer


def test_a_head_that_contradicts_the_tie(tmp_path: Path) -> None:
    apart = tiny.write_model(tmp_path / "apart")
    edit(apart, tie_word_embeddings=True)
    assert any("`tie_word_embeddings` is true" in message for message in messages(apart))
    without = tiny.write_model(tmp_path / "without", tie_word_embeddings=True)
    edit(without, tie_word_embeddings=False)
    assert messages(without) == ["`lm_head.weight` is not in `F`"]


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model", vocab_size=64, eos_token_id=[2, 90])
    told = messages(folder)
    assert any("ids up to 275, the model knows 64" in message for message in told)
    assert any("`eos_token_id` in `F/config.json` is 90, but the model knows 64" in message for message in told)


@pytest.mark.parametrize("index", [2**31, 2**40])
def test_an_end_beyond_any_vocabulary(index: int, model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": index}))
    assert any(f"a stop token of `F` has id {index}" in message for message in messages(model))


def test_an_end_that_the_tokenizer_lacks(model: Path) -> None:
    edit(model, eos_token_id=300)
    assert any("is 300, but the tokenizer has no such id" in message for message in messages(model))


def test_no_tokenizer_and_a_bad_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message")
    assert any("does not compile" in message for message in messages(model))
    (model / "tokenizer.json").unlink()
    assert any("has no `tokenizer.json`" in message for message in messages(model))


# Not a folder, not a known model


def test_no_folder(tmp_path: Path) -> None:
    report = checked(tmp_path / "nothing")
    assert report.exit_code == 10 and len(report.faults) == 1
    assert all(verdict.loads is None for verdict in report.verdicts)


def test_an_unknown_family_says_nothing_about_the_others(model: Path) -> None:
    edit(model, architectures=["MambaForCausalLM"], model_type="mamba")
    report = checked(model)
    assert report.exit_code == 10
    assert [verdict.loads for verdict in report.verdicts] == [None] * 6 + [False]


def test_a_json_bomb_is_a_fault(model: Path) -> None:
    (model / "config.json").write_text("[" * 100_000)
    assert any("is not a valid JSON object" in message for message in messages(model))


# The command


def test_the_command(model: Path, capsys) -> None:
    assert cli.run(["check", str(model)]) == 0
    assert "no faults" in capsys.readouterr().out
    (model / "tokenizer.json").unlink()
    assert cli.run(["check", str(model), "--json"]) == 10
    said = json.loads(capsys.readouterr().out)
    assert said["sound"] is False and said["exit_code"] == 10
    assert [fault["kind"] for fault in said["faults"]] == ["CheckpointError"] and said["faults"][0]["hint"]
    assert [each["consumer"] for each in said["consumers"]][-2:] == ["exllamav2", "quantkit"]


# Whatever loading refuses, check tells; and it never fails itself


def _damage_tensors(draw: random.Random, folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    name = draw.choice(sorted(tensors))
    tensor = tensors[name]
    kind = draw.choice(["drop", "rename", "dtype", "flat", "crop", "turn", "empty", "nan", "random"])
    if kind == "drop":
        del tensors[name]
    elif kind == "rename":
        tensors[name + "x"] = tensors.pop(name)
    elif kind == "dtype":
        tensors[name] = tensor.to(draw.choice([torch.int64, torch.float64, torch.int32, torch.bool, torch.float16]))
    elif kind == "flat":
        tensors[name] = tensor.flatten()[:-1].clone()
    elif kind == "crop":
        tensors[name] = tensor[: max(1, tensor.shape[0] // 2)].clone()
    elif kind == "turn":
        tensors[name] = tensor.t().contiguous() if tensor.dim() == 2 else tensor[None].clone()
    elif kind == "empty":
        tensors[name] = tensor[:0].clone()
    elif kind == "nan" and tensor.is_floating_point():
        tensor.view(-1)[draw.randrange(tensor.numel())] = float("nan")
    elif not tensor.is_floating_point():
        tensor.view(-1)[draw.randrange(tensor.numel())] = draw.randrange(-(2**31), 2**31)
    save_file(tensors, folder / "model.safetensors")
    return f"{kind} {name}"


def _damage_json(draw: random.Random, folder: Path) -> str:
    file = folder / draw.choice(["config.json", "quantize_config.json", "tokenizer_config.json", "generation_config.json"])
    said = json.loads(file.read_text())
    key = draw.choice(sorted(said))
    value = draw.choice([tiny.ABSENT, None, -1, 0, 7, 2**40, "x", [], {}, True, 1.5, float("nan"), [[1]], {"a": None}])
    if value is tiny.ABSENT:
        del said[key]
    else:
        said[key] = value
    if file.name == "quantize_config.json" and draw.random() < 0.7:
        edit(folder, quantization_config=said)
    file.write_text(json.dumps(said))
    return f"{file.name}: {key} = {value}"


def _damage_bytes(draw: random.Random, folder: Path) -> str:
    file = folder / draw.choice(["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
    raw = bytearray(file.read_bytes())
    place = draw.randrange(min(len(raw), 4000))
    if draw.random() < 0.3:
        del raw[place:]
    else:
        raw[place] ^= 1 << draw.randrange(8)
    file.write_bytes(raw)
    return f"{file.name} at {place}"


@pytest.mark.parametrize("seed", range(60))
def test_whatever_loading_refuses_is_told(seed: int, gptq: Path) -> None:
    draw = random.Random(seed)
    damages = [draw.choice([_damage_tensors, _damage_json, _damage_bytes])(draw, gptq)]
    report = checked(gptq)
    assert json.dumps(report.as_json(), allow_nan=False) and len(report.verdicts) == 7
    refused = [_refusal(load, gptq), _refusal(_open_tokenizer, gptq)]
    assert report.faults or refused == [None, None], (damages, refused)
    assert not report.verdicts[-1].loads or refused[0] is None, (damages, refused)


def _open_tokenizer(folder: Path) -> None:
    with contextlib.suppress(RequestError):  # there is no template, as is their right
        Tokenizer.open(folder).template()


def _refusal(step: Callable, folder: Path) -> str | None:
    try:
        step(folder)
    except QuantkitError as error:
        return error.message
    return None
