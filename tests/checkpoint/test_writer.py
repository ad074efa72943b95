"""Folders that appear whole or not at all, in bytes that every reader of safetensors takes."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantkit.checkpoint.folder import INDEX
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.errors import CheckpointError

TENSORS = {
    "odd": torch.arange(3, dtype=torch.float16),
    "a.weight": torch.randn(40, 30, generator=torch.Generator().manual_seed(0)),
    "flag": torch.tensor([True, False, True]),
    "b.weight": torch.arange(20, dtype=torch.int64),
    "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
    "none": torch.empty(0, 7),
    "words": torch.arange(5, dtype=torch.int32),
}


def write(out: Path, tensors: dict[str, Tensor] = TENSORS, side_files: tuple[Path, ...] = (), **options: Any) -> list[Path]:
    with CheckpointWriter(out, **options) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        return writer.finish({"model_type": "test"}, side_files)


def read_with_the_library(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What is written


@pytest.mark.parametrize("shard_bytes", [2**30, 50_000])
def test_a_copy_has_the_same_tensors_and_side_files(tmp_path: Path, shard_bytes: int) -> None:
    source = open_checkpoint(tiny.write_model(tmp_path / "in", "Qwen2ForCausalLM", dtype="bfloat16"))
    (source.path / "additional_chat_templates").mkdir()
    (source.path / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    with CheckpointWriter(tmp_path / "out", source=source.path, shard_bytes=shard_bytes) as writer:
        for name in source.names():
            writer.add(name, source.tensor(name))
        files = writer.finish(source.config, source.side_files(), {"quantize_config.json": {"bits": 4}})
    copy = open_checkpoint(tmp_path / "out")
    assert copy.config == source.config
    assert copy.quantization == {"bits": 4}
    assert copy.notes == ()
    assert sorted(copy.names()) == sorted(source.names())
    by_library = read_with_the_library(copy.path)
    for name in source.names():
        assert torch.equal(copy.tensor(name), source.tensor(name))
        assert torch.equal(by_library[name], source.tensor(name))
    names = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "additional_chat_templates/tools.jinja"}
    assert {name: contents(copy.path)[name] for name in names} == {name: contents(source.path)[name] for name in names}
    assert sorted(files) == sorted(path for path in copy.path.rglob("*") if path.is_file())
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = open_checkpoint(tiny.write_model(tmp_path / "in"))
    tensors = {name: source.tensor(name) for name in reversed(source.names())}
    with CheckpointWriter(tmp_path / "out", shard_bytes=100_000) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish(source.config, source.side_files())
    assert (tmp_path / "out" / INDEX).exists()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        ours, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits for name in ("out", "in"))
    assert torch.equal(ours, theirs)


def test_a_tensor_may_change_after_it_was_added(tmp_path: Path) -> None:
    tensors = {"held": torch.ones(3, dtype=torch.float16), "written": torch.ones(4)}
    with CheckpointWriter(tmp_path / "out") as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
            tensor.zero_()
        writer.finish({})
    assert all(bool(tensor.all()) for tensor in read_with_the_library(tmp_path / "out").values())


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((1000,), float(number)) for number in range(10)} | {"large": torch.ones(5000)}
    write(tmp_path / "out", tensors, shard_bytes=10_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{number:05d}-of-00006.safetensors" for number in range(1, 7)]
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert sizes == [8000, 8000, 8000, 8000, 8000, 20_000]
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 60_000}
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}


def test_a_shard_closes_when_its_header_is_full(tmp_path: Path) -> None:
    name = "x" * 20_000
    write(tmp_path / "out", {f"{name}{number}": torch.ones(2) for number in range(100)})
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    assert len(open_checkpoint(tmp_path / "out").names()) == 100


@pytest.mark.parametrize("shard_bytes", [2**30, 3000])
def test_equal_tensors_give_equal_bytes(tmp_path: Path, shard_bytes: int) -> None:
    first, second = (contents(write(tmp_path / name, shard_bytes=shard_bytes)[0].parent) for name in ("a", "b"))
    assert first == second


def test_memory_does_not_grow_with_what_is_written(tmp_path: Path) -> None:
    """320 MB through one writer, in two shards; the process may grow by the tensor in hand and little more."""
    script = f"""
import resource, sys
import torch
from pathlib import Path
from quantkit.checkpoint.writer import CheckpointWriter

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

with CheckpointWriter(Path({str(tmp_path / "out")!r}), shard_bytes=160 * 2**20) as writer:
    writer.add("first", torch.ones(2**20))
    before = peak()
    for number in range(40):
        writer.add(f"t{{number}}", torch.full((2**21,), float(number)))
    writer.finish({{}})
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) > 320 * 2**20
    assert int(done.stdout) < 40 * 2**20


# What is refused


def refusal(out: Path, **options: Any) -> CheckpointError:
    """Refused at the door, before anything is made."""
    before = sorted(out.parent.rglob("*"))
    with pytest.raises(CheckpointError) as caught, CheckpointWriter(out, **options):
        pytest.fail("must not be entered")
    assert sorted(out.parent.rglob("*")) == before
    assert caught.value.hint
    return caught.value


def test_a_folder_with_files_needs_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    error = refusal(tmp_path / "out")
    assert error.message == f"`{tmp_path / 'out'}` is not empty: 1 files, the first is `notes.txt`"
    assert "--overwrite" in str(error.hint)
    write(tmp_path / "out", overwrite=True)
    assert set(contents(tmp_path / "out")) == {"config.json", "model.safetensors"}


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    assert set(contents(tmp_path / "out")) == {"config.json", "model.safetensors"}


def test_a_folder_that_is_more_than_a_model_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out" / "src").mkdir(parents=True)
    assert "holds the folder `src`: it is more than a model" in refusal(tmp_path / "out", overwrite=True).message


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert refusal(tmp_path / "out", overwrite=True).message == f"`{tmp_path / 'out'}` is a file"


def test_neither_folder_may_hold_the_other(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "models" / "tiny")
    (tmp_path / "link").symlink_to(source)
    for out in (source, source / "out", source.parent, tmp_path / "link", tmp_path / "link" / "out"):
        error = refusal(out, source=source, overwrite=True)
        assert "must not be the same folder or one inside the other" in error.message
    refusal(source, source=tmp_path / "link", overwrite=True)


def test_the_current_folder_and_mount_points_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is the current folder" in refusal(Path()).message
    with pytest.raises(CheckpointError, match="is a mount point"), CheckpointWriter(Path("/proc"), overwrite=True):
        pass


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="`/proc/out` cannot be written: ") as caught, CheckpointWriter(Path("/proc/out")):
        pass
    assert caught.value.hint


def test_two_writers_of_one_place(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        assert "another process is writing" in refusal(tmp_path / "out").message
        writer.add("a", torch.ones(2))
        writer.finish({})
    assert "is not empty" in refusal(tmp_path / "out").message


@pytest.mark.parametrize("name", ["a", "__metadata__"])
def test_a_name_that_cannot_be_written_again(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"a tensor `{name}`"), CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a", torch.ones(2))
        writer.add(name, torch.ones(2))
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_the_format_lacks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor `a` is torch\.complex64"), CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a", torch.ones(2, dtype=torch.complex64))
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensors were written"):
        write(tmp_path / "out", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", INDEX])
def test_weights_are_no_side_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match="is no side file"):
        write(tmp_path / "out", side_files=(tmp_path / name,))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_side_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.txt` cannot be read: No such file"):
        write(tmp_path / "out", side_files=(tmp_path / "gone.txt",))
    assert list(tmp_path.iterdir()) == []


# All or nothing


def test_a_check_that_fails_keeps_the_folder_from_appearing(tmp_path: Path) -> None:
    def check(folder: Path) -> None:
        assert open_checkpoint(folder).names() == ["a"]
        raise CheckpointError("not what was meant")

    write(tmp_path / "out", {"old": torch.ones(2)})
    old = contents(tmp_path)
    with pytest.raises(CheckpointError, match="not what was meant"), CheckpointWriter(tmp_path / "out", overwrite=True) as writer:
        writer.add("a", torch.ones(2))
        writer.finish({}, check=check)
    assert contents(tmp_path) == old


def test_leaving_early_leaves_nothing(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "new" / "deep" / "out") as writer:
        writer.add("a", torch.ones(2))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a", torch.ones(2))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_the_old_folder_is_there_until_the_new_one_is(tmp_path: Path) -> None:
    write(tmp_path / "out", {"old": torch.ones(2)})
    old = contents(tmp_path / "out")
    with CheckpointWriter(tmp_path / "out", overwrite=True) as writer:
        writer.add("new", torch.ones(2))
        assert contents(tmp_path / "out") == old
        writer.finish({})
    assert open_checkpoint(tmp_path / "out").names() == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_limit_on_the_size_of_files_is_an_error_with_a_hint(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot be written: File too large") as caught:
            write(tmp_path / "out", {"a": torch.ones(2**20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "`ulimit -f`" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


CALLS = ("mkdir", "open", "pwrite", "ftruncate", "fsync", "rename")


def disturb(monkeypatch: pytest.MonkeyPatch, strike: Callable[[int], None]) -> list[str]:
    """Every call that changes the disk is counted, and `strike` is told its number first. Returns the calls."""
    made: list[str] = []

    def disturbed(call: str) -> Callable[..., Any]:
        original = getattr(os, call)

        def wrapper(*arguments: Any, **options: Any) -> Any:
            writes = call != "open" or arguments[1] & os.O_CREAT
            if writes:
                made.append(call)
                strike(len(made))
            return original(*arguments, **options)

        return wrapper

    for call in CALLS:
        monkeypatch.setattr(os, call, disturbed(call))
    return made


def scene(folder: Path, replaces: bool) -> Callable[[], object]:
    """A place for a model of several shards and a side file, with an old model in it or not; and the work to do."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    if replaces:
        write(folder / "out", {"old": torch.ones(2)})
    side_files = (folder / "tokenizer.json",)
    return lambda: write(folder / "out", side_files=side_files, overwrite=replaces, shard_bytes=3000)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_failure_at_any_call_leaves_all_as_it_was(tmp_path: Path, code: int, replaces: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        calls = disturb(patch, lambda number: None)
        scene(tmp_path / "undisturbed", replaces)()
    assert len(calls) > 15
    assert set(calls) == set(CALLS)
    for failing in range(1, len(calls) + 1):
        folder = tmp_path / f"failing-{failing}"
        work = scene(folder, replaces)
        before = contents(folder)

        def fail(number: int, failing: int = failing) -> None:
            if number == failing:
                raise OSError(code, os.strerror(code))

        with pytest.MonkeyPatch.context() as patch:
            made = disturb(patch, fail)
            try:
                work()
            except CheckpointError as error:
                assert f"`{folder / 'out'}` cannot be written: {os.strerror(code)}" == error.message
                assert error.hint
                assert contents(folder) == before
                assert not list(folder.glob(".*"))
            else:
                assert len(made) < failing, f"call {failing} ({made[failing - 1]}) failed and nobody noticed"


@pytest.mark.parametrize("replaces", [False, True])
def test_a_process_killed_at_any_call_leaves_no_half_folder(tmp_path: Path, replaces: bool) -> None:
    """Either what was there, or the new folder, and in the one moment between the two neither; the next run mends all."""
    with pytest.MonkeyPatch.context() as patch:
        work = scene(tmp_path / "undisturbed", replaces)
        calls = disturb(patch, lambda number: None)
        work()
    complete = contents(tmp_path / "undisturbed")
    absent = 0
    for deadly in range(1, len(calls) + 1):
        folder = tmp_path / f"killed-{deadly}"
        work = scene(folder, replaces)
        before = contents(folder)
        child = os.fork()
        if child == 0:
            with pytest.MonkeyPatch.context() as patch:
                disturb(patch, lambda number, deadly=deadly: os._exit(9) if number == deadly else None)
                work()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        visible = {name: content for name, content in contents(folder).items() if not name.startswith(".")}
        if replaces and not (folder / "out").exists():
            absent += 1
        else:
            assert visible in (before, complete)
        if replaces or not (folder / "out").exists():
            work()
        assert contents(folder) == complete
        assert not list(folder.glob(".*"))
    assert absent == int(replaces)


def test_bytes_are_those_of_the_first_day(tmp_path: Path) -> None:
    """A change of the bytes is a decision, not an accident."""
    write(tmp_path / "out", {"a.weight": torch.arange(6, dtype=torch.float16).reshape(2, 3), "b": torch.ones(2)})
    raw = (tmp_path / "out" / "model.safetensors").read_bytes()
    header = (
        b'{"__metadata__":{"format":"pt"},'
        b'"a.weight":{"dtype":"F16","shape":[2,3],"data_offsets":[8,20]},'
        b'"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    )
    room = -(-len(header) // 8) * 8
    data = torch.ones(2).numpy().tobytes() + torch.arange(6, dtype=torch.float16).numpy().tobytes()
    assert raw == room.to_bytes(8, "little") + header.ljust(room) + data
    assert (tmp_path / "out" / "config.json").read_bytes() == b'{\n  "model_type": "test"\n}\n'
