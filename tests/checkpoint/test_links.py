"""Links of a model folder: followed within it and into the hub cache that it lies in, refused elsewhere."""

import os
import subprocess
from pathlib import Path

import pytest
import tiny

from quantkit.checkpoint.adapter import open_adapter
from quantkit.checkpoint.folder import readable
from quantkit.checkpoint.links import leading_out
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.check import check
from quantkit.commands.inspection.blueprint import open_blueprint
from quantkit.errors import CheckpointError

HUB = "models--org--name"


def move_out(file: Path, target: Path) -> Path:
    """The file moved to `target`, and a link to it left in its place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    file.rename(target)
    file.symlink_to(target)
    return file


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    return caught.value


def in_hub(cache: Path) -> Path:
    """A snapshot of links to blobs, as the hub's library lays it out."""
    snapshot = tiny.write_model(cache / HUB / "snapshots" / "0123", shards=3)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        (cache / HUB / "blobs").mkdir(exist_ok=True)
        file.rename(cache / HUB / "blobs" / str(number))
        file.symlink_to(f"../../blobs/{number}")
    return snapshot


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "LICENSE"])
def test_a_file_that_lies_elsewhere_is_named_with_its_end_and_a_command_that_mends_it(tmp_path: Path, name: str) -> None:
    folder = tiny.write_model(tmp_path / "a model")
    (folder / "LICENSE").write_text("free")
    link = move_out(folder / name, tmp_path / "other disk" / "file")
    error = refusal(folder)
    assert error.message == (
        f"a link that leads out of `{folder}`: `{link}` → `{os.path.realpath(tmp_path / 'other disk' / 'file')}`"
    )
    [told] = check(folder).faults
    assert told.message == error.message
    command = str(error.hint).split("`")[1]
    subprocess.run(["sh", "-ec", command], check=True)
    open_checkpoint(folder)
    assert not link.is_symlink()
    assert not (folder / f"{name}.copy").exists()


def test_many_files_that_lie_elsewhere_are_named_together_and_copied_together(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model", shards=3)
    links = [move_out(file, tmp_path / "disk" / file.name) for file in sorted(folder.glob("*-of-*.safetensors"))]
    error = refusal(folder)
    assert all(f"`{link}` → `" in error.message for link in links)
    assert len(check(folder).faults) == 3
    subprocess.run(["sh", "-ec", str(error.hint).split("`")[1]], check=True)
    assert open_checkpoint(f"{folder}.copy").names() == open_checkpoint(tmp_path / "model.copy").names()


def test_nothing_of_what_a_link_leads_to_is_read_or_told(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "quantize_config.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text('{"hunter2": 1')
    os.mkfifo(tmp_path / "pipe")  # reading it would be an error of its own
    (folder / "chat_template.jinja").symlink_to("/proc/self/environ")
    report = check(folder)
    assert sum("leads out of `" in fault.message for fault in report.faults) == 6
    assert "hunter2" not in str(report.as_json())
    assert not any("JSON" in fault.message or "read" in fault.message for fault in report.faults)


@pytest.mark.parametrize("linked", ["the folder", "a file of it"])
def test_named_templates_lie_in_the_folder_too(tmp_path: Path, linked: str) -> None:
    folder = tiny.write_model(tmp_path / "model")
    (tmp_path / "tool.jinja").write_text("x")
    if linked == "the folder":
        (tmp_path / "templates").mkdir()
        (tmp_path / "tool.jinja").rename(tmp_path / "templates" / "tool.jinja")
        (folder / "additional_chat_templates").symlink_to("../templates")
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool.jinja").symlink_to(tmp_path / "tool.jinja")
    assert "additional_chat_templates/tool.jinja` →" in refusal(folder).message


def test_what_is_never_read_may_lie_anywhere(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")
    for name in (".gitattributes", "pytorch_model.bin", "original", "optimizer.pt"):
        (folder / name).symlink_to("/dev" if name == "original" else "/dev/null")
    assert check(folder).faults == ()


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")
    (folder / "inner").mkdir()
    (folder / "model.safetensors").rename(folder / "inner" / "weights")
    (folder / "model.safetensors").symlink_to("inner/there")
    (folder / "inner" / "there").symlink_to(folder / "inner" / "weights")
    assert check(folder).faults == ()


def test_a_link_to_the_whole_folder_is_the_folder(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "disk" / "model", shards=2)
    (tmp_path / "link").symlink_to(folder)
    assert check(tmp_path / "link").faults == ()


@pytest.mark.parametrize("way", ["as it is", "by a link to the snapshot", "by a link to the cache", "blobs of blobs"])
def test_the_hub_cache_is_read(tmp_path: Path, way: str) -> None:
    snapshot = in_hub(tmp_path / "cache")
    if way == "by a link to the snapshot":
        (tmp_path / "model").symlink_to(snapshot)
        snapshot = tmp_path / "model"
    if way == "by a link to the cache":
        (tmp_path / "hub").symlink_to("cache")
        snapshot = tmp_path / "hub" / HUB / "snapshots" / "0123"
    if way == "blobs of blobs":
        move_out(snapshot.parents[1] / "blobs" / "2", snapshot.parents[1] / "blobs" / "moved")
    assert check(snapshot).faults == ()


def test_a_model_in_a_folder_of_a_snapshot_is_read(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / HUB / "snapshots" / "0123" / "4bit")
    for file in sorted(folder.iterdir()):
        (tmp_path / HUB / "blobs").mkdir(exist_ok=True)
        file.rename(tmp_path / HUB / "blobs" / file.name)
        file.symlink_to(f"../../../blobs/{file.name}")
    assert check(folder).faults == ()


@pytest.mark.parametrize("way", ["another repository", "blobs that lead elsewhere", "a blob that leads elsewhere", "no cache"])
def test_the_hub_cache_opens_no_other_way_out(tmp_path: Path, way: str) -> None:
    snapshot = in_hub(tmp_path / "cache")
    blobs = snapshot.parents[1] / "blobs"
    if way == "another repository":
        other = tmp_path / "cache" / "models--org--other" / "blobs" / "0"
        other.parent.mkdir(parents=True)
        (blobs / "0").rename(other)
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(other)
    if way == "blobs that lead elsewhere":
        blobs.rename(tmp_path / "elsewhere")
        blobs.symlink_to(tmp_path / "elsewhere")
    if way == "a blob that leads elsewhere":
        move_out(blobs / "0", tmp_path / "elsewhere" / "0")
    if way == "no cache":
        (tmp_path / "cache" / HUB).rename(tmp_path / "cache" / "name")
        snapshot = tmp_path / "cache" / "name" / "snapshots" / "0123"
    assert "out of `" in refusal(snapshot).message


def test_a_shard_that_an_index_names_in_a_folder_of_its_own_is_looked_at(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model", shards=2)
    (folder / "sub").mkdir()
    for file in sorted(folder.glob("*-of-*.safetensors")):
        move_out(file.rename(folder / "sub" / file.name), tmp_path / "disk" / file.name)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-0", "sub/model-0"))
    assert "sub/model-00001-of-00002.safetensors` →" in refusal(folder).message
    assert len(check(folder).faults) == 2


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_keeps_to_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "adapter").mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "adapter" / file).write_text("{}")
    move_out(tmp_path / "adapter" / name, tmp_path / "elsewhere" / name)
    with pytest.raises(CheckpointError, match=f"a link that leads out of `.*`: `.*{name}`"):
        open_adapter(tmp_path / "adapter")


def test_a_config_without_weights_keeps_to_its_folder(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")
    move_out(folder / "config.json", tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match="leads out of `"):
        open_blueprint(folder)
    assert open_blueprint(tmp_path / "elsewhere.json").parameters > 0


def test_faults_beside_links_are_told_too(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")
    move_out(folder / "generation_config.json", tmp_path / "elsewhere.json")
    (folder / "model.safetensors").write_bytes(b"PK\x03\x04")
    told = [fault.message for fault in check(folder).faults]
    assert sum("leads out" in message for message in told) == 1
    assert sum("zip archive" in message for message in told) == 1


def test_a_file_that_does_not_exist_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to("/nowhere/at/all")
    (tmp_path / "round").symlink_to("round")
    assert leading_out(tmp_path, [tmp_path / "gone", tmp_path / "round", tmp_path / "never"]) == []
    assert readable(tmp_path) == []
