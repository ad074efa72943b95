"""Which files are a model's weights, and what is said where they are not what they should be."""

import json
from pathlib import Path

import pytest
import raw_safetensors as raw

from quantkit.checkpoint.folder import INDEX, MAX_CONFIG_BYTES, find_weights, is_side_file, read_json, side_files
from quantkit.errors import CheckpointError


def place(folder: Path, *names: str) -> Path:
    """Empty but valid weight files of these names."""
    folder.mkdir(exist_ok=True)
    for name in names:
        raw.write(folder / name, {})
    return folder


def place_index(folder: Path, *names: str) -> None:
    weight_map = {f"tensor.{number}": name for number, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def found(folder: Path) -> list[str]:
    return [file.name for file in find_weights(folder).files]


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        find_weights(folder)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "output.safetensors", "other.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "model-00001-of-00002.safetensors"], ["model.safetensors"]),
        (
            ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors", "output.safetensors"],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        (["output.safetensors", "adapter.safetensors"], ["output.safetensors"]),
        (
            ["output-00001-of-00002.safetensors", "output-00002-of-00002.safetensors", "adapter.safetensors"],
            ["output-00001-of-00002.safetensors", "output-00002-of-00002.safetensors"],
        ),
        (["b.safetensors", "a.safetensors"], ["a.safetensors", "b.safetensors"]),
    ],
)
def test_the_first_rule_that_fits_decides(tmp_path: Path, names: list[str], chosen: list[str]) -> None:
    assert found(place(tmp_path, *names)) == chosen


def test_an_index_decides_before_all_names(tmp_path: Path) -> None:
    place(tmp_path, "model.safetensors", "output.safetensors", "x.safetensors", "y.safetensors")
    place_index(tmp_path, "y.safetensors", "x.safetensors", "y.safetensors")
    weights = find_weights(tmp_path)
    assert [file.name for file in weights.files] == ["x.safetensors", "y.safetensors"]
    assert weights.weight_map is not None
    assert weights.weight_map["tensor.0"] == tmp_path / "y.safetensors"
    assert weights.notes == ()


def test_an_index_of_another_model_is_left_aside_and_said_so(tmp_path: Path) -> None:
    place(tmp_path, "output.safetensors")
    place_index(tmp_path, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weights = find_weights(tmp_path)
    assert [file.name for file in weights.files] == ["output.safetensors"]
    assert weights.weight_map is None
    assert weights.notes == (f"`{INDEX}` names no file of this folder and is left aside",)


def test_shards_of_the_index_that_are_absent_are_named_together(tmp_path: Path) -> None:
    place(tmp_path, "model-00002-of-00003.safetensors")
    place_index(tmp_path, *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)))
    message = refusal(tmp_path).message
    assert f"`{tmp_path}/model-00001-of-00003.safetensors`, `{tmp_path}/model-00003-of-00003.safetensors`" in message
    assert f"named in `{tmp_path}/{INDEX}`" in message


def test_an_index_without_any_shard_is_not_left_aside_for_other_files(tmp_path: Path) -> None:
    place(tmp_path, "adapter_model.safetensors")
    place_index(tmp_path, "model-00001-of-00001.safetensors")
    assert "missing: " in refusal(tmp_path).message


def test_an_index_is_believed_beside_shards_of_another_set(tmp_path: Path) -> None:
    place(tmp_path, "model-00001-of-00001.safetensors", "model-00002-of-00007.safetensors")
    place_index(tmp_path, "model-00001-of-00001.safetensors")
    assert found(tmp_path) == ["model-00001-of-00001.safetensors"]


def test_shards_without_index_tell_by_their_names_which_is_missing(tmp_path: Path) -> None:
    place(tmp_path, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    assert "has 2 of 3 shards: `model-00002-of-00003.safetensors` is missing" in refusal(tmp_path).message


def test_a_count_that_nobody_can_list_is_no_trouble(tmp_path: Path) -> None:
    place(tmp_path, f"model-00001-of-{'9' * 60}.safetensors")
    assert "has 1 of 999" in refusal(tmp_path).message


def test_shards_of_two_sets_are_refused(tmp_path: Path) -> None:
    place(tmp_path, "model-00001-of-00001.safetensors", "model-00001-of-00002.safetensors")
    assert "holds shards of different sets" in refusal(tmp_path).message


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "..", "", "a\\x", "a\0"])
def test_a_shard_name_that_leaves_the_folder(tmp_path: Path, name: str) -> None:
    place(tmp_path / "model", "ok.safetensors")
    place(tmp_path, "x.safetensors")
    place_index(tmp_path / "model", "ok.safetensors", name)
    assert "which leaves its folder" in refusal(tmp_path / "model").message


def test_a_shard_behind_a_linked_folder_that_leads_out(tmp_path: Path) -> None:
    place(tmp_path / "elsewhere", "x.safetensors")
    place(tmp_path / "model")
    (tmp_path / "model" / "sub").symlink_to(tmp_path / "elsewhere")
    place_index(tmp_path / "model", "sub/x.safetensors")
    assert "names the shard `sub/x.safetensors`, which leaves its folder" in refusal(tmp_path / "model").message


def test_a_shard_in_a_folder_of_its_own(tmp_path: Path) -> None:
    place(tmp_path / "sub", "x.safetensors")
    place_index(tmp_path, "sub/x.safetensors")
    assert find_weights(tmp_path).files == (tmp_path / "sub" / "x.safetensors",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "has no `weight_map` from tensor names to files"),
        ('{"weight_map": {"a": 1}}', "has no `weight_map` from tensor names to files"),
        ('{"weight_map": ["a"]}', "has no `weight_map` from tensor names to files"),
        ('{"weight_map": {}}', "names no tensors"),
        ('{"weight_map": {"a": "x.bin"}}', "names `x.bin`, which is no safetensors file"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "`a` is there twice"),
        ("[]", "is not a valid JSON object: it is no object"),
        ("{", "is not a valid JSON object"),
    ],
)
def test_an_index_that_cannot_be_used(tmp_path: Path, content: str, message: str) -> None:
    place(tmp_path, "x.safetensors")
    (tmp_path / INDEX).write_text(content)
    error = refusal(tmp_path)
    assert message in error.message
    assert f"`{tmp_path / INDEX}`" in error.message


def test_dangling_links_are_named_together(tmp_path: Path) -> None:
    place(tmp_path, "model-00003-of-00003.safetensors")
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").symlink_to(f"../blobs/{number}")
    (tmp_path / "tokenizer.json").symlink_to("../blobs/3")
    message = refusal(tmp_path).message
    for name, target in (
        ("model-00001-of-00003.safetensors", "../blobs/1"),
        ("model-00002-of-00003.safetensors", "../blobs/2"),
        ("tokenizer.json", "../blobs/3"),
    ):
        assert f"`{tmp_path / name}` → `{target}`" in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.PTH", "model.pt"])
def test_pickles_alone_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02}.")
    error = refusal(tmp_path)
    assert f"has only pickled weights (`{name}`): pickled weights can run code when they are opened" in error.message
    assert "quantkit convert pickle-to-safetensors" in str(error.hint)


def test_gguf_alone_is_told_how_to_convert(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert f"`quantkit convert gguf-to-hf {tmp_path / 'm.gguf'} OUT`" in str(refusal(tmp_path).hint)


@pytest.mark.parametrize("inner", ["Llama-3", "snapshots/0123abcd"])
def test_a_folder_above_the_model_is_told_which_one_to_take(tmp_path: Path, inner: str) -> None:
    (tmp_path / inner).mkdir(parents=True)
    (tmp_path / inner / "config.json").write_text("{}")
    error = refusal(tmp_path)
    assert "holds no safetensors files" in error.message
    assert error.hint == f"did you mean `{tmp_path / inner}`?"


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "holds no safetensors files" in refusal(tmp_path).message


KEPT = [
    "LICENSE",
    "README.md",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "modeling_custom.py",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.txt",
]
LEFT = [
    ".gitattributes",
    "config.json",
    "flax_model.msgpack",
    "model.safetensors",
    "model.safetensors.index.json",
    "optimizer.pt",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "quantize_config.json",
    "tf_model.h5",
    "training_args.bin",
]


def test_all_that_is_not_weights_goes_along(tmp_path: Path) -> None:
    for name in KEPT + LEFT:
        (tmp_path / name).write_text("x")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "onnx").mkdir()
    (tmp_path / "merges.txt").symlink_to("nothing")
    assert [path.name for path in side_files(tmp_path)] == sorted([*KEPT, "additional_chat_templates"])
    assert not any(is_side_file(name) for name in LEFT)


def test_json_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    with pytest.raises(CheckpointError, match=f"at most {MAX_CONFIG_BYTES} are read"):
        read_json(tmp_path / "config.json")


def test_a_pointer_in_place_of_json_is_told_how_to_fetch_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"config\.json` is a git-LFS pointer") as caught:
        read_json(tmp_path / "config.json")
    assert "git lfs pull" in str(caught.value.hint)
