"""One folder, many processes: who may write, what the dead left, and what no output may touch."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from quantkit.checkpoint.output_folder import OutputFolder
from quantkit.errors import CheckpointError


def claim(path: Path, *, overwrite: bool = False) -> OutputFolder:
    folder = OutputFolder(path, sources=(), overwrite=overwrite)
    folder.claim()
    return folder


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_nothing_is_visible_under_its_name_before_it_is_complete(tmp_path: Path) -> None:
    folder = claim(tmp_path / "new" / "out")
    (folder.working / "a").write_text("a")
    assert names(tmp_path) == ["new", "new/.out.partial", "new/.out.partial/a"]
    folder.put_in_place()
    assert names(tmp_path) == ["new", "new/out", "new/out/a"]
    folder.abandon()
    assert names(tmp_path) == ["new", "new/out", "new/out/a"]


def test_abandoning_takes_the_parents_that_were_made_along(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    folder = claim(tmp_path / "there" / "new" / "deep" / "out")
    (folder.working / "inner").mkdir()
    folder.abandon()
    assert names(tmp_path) == ["there"]


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/out")
    folder = claim(tmp_path / "out")
    (folder.working / "a").write_text("a")
    folder.put_in_place()
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "out" / "a").read_text() == "a"


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    left = tmp_path / ".out.partial"
    (left / "inner" / "deep").mkdir(parents=True)
    (left / "shard-1").write_text("half")
    (left / "link").symlink_to(tmp_path / "precious")
    (left / "folder-link").symlink_to(tmp_path)
    folder = claim(tmp_path / "out")
    assert names(folder.working) == []
    assert (tmp_path / "precious").read_text() == "mine"
    folder.abandon()


def test_what_a_killed_process_took_aside_comes_back(tmp_path: Path) -> None:
    (tmp_path / ".out.replaced").mkdir()
    (tmp_path / ".out.replaced" / "old").write_text("old")
    claim(tmp_path / "out", overwrite=True).abandon()
    assert names(tmp_path) == ["out", "out/old"]


def test_what_a_killed_process_had_replaced_already_goes(tmp_path: Path) -> None:
    for name in ("out", ".out.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    claim(tmp_path / "out", overwrite=True).abandon()
    assert names(tmp_path) == ["out", "out/file"]
    assert (tmp_path / "out" / "file").read_text() == "out"


def test_a_link_in_the_place_of_the_working_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("mine")
    (tmp_path / ".out.partial").symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match=r"\.out\.partial` is a link or a file, where") as caught:
        claim(tmp_path / "out")
    assert caught.value.hint.endswith(f"`rm {tmp_path / '.out.partial'}`")
    assert names(tmp_path) == [".out.partial", "elsewhere", "elsewhere/precious"]


def test_only_one_process_at_a_time(tmp_path: Path) -> None:
    first = claim(tmp_path / "out")
    with pytest.raises(CheckpointError, match="another process is writing") as caught:
        claim(tmp_path / "out")
    assert caught.value.hint
    first.abandon()
    claim(tmp_path / "out").abandon()
    assert names(tmp_path) == []


def test_a_result_that_is_finished_meanwhile_is_not_taken_for_a_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process renames its folder after it was opened here, and before it is locked."""
    first = claim(tmp_path / "out")
    (first.working / "result").write_text("theirs")
    lock = fcntl.flock

    def finish_then_lock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.put_in_place()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", finish_then_lock)
    second = OutputFolder(tmp_path / "out", sources=(), overwrite=False)
    with pytest.raises(CheckpointError, match="is not empty"):
        second.claim()
    second.abandon()
    assert names(tmp_path) == ["out", "out/result"]


def test_a_disk_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    folder = claim(tmp_path / "out")
    folder.put_in_place()
    assert names(tmp_path) == ["out"]


def test_files_that_appear_meanwhile_are_not_replaced(tmp_path: Path) -> None:
    folder = claim(tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").write_text("theirs")
    with pytest.raises(CheckpointError, match="is not empty"):
        folder.put_in_place()
    folder.abandon()
    assert names(tmp_path) == ["out", "out/theirs"]


def test_the_new_folder_has_the_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = claim(tmp_path / "out")
        folder.put_in_place()
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_the_root_of_all_folders_is_refused() -> None:
    with pytest.raises(CheckpointError, match="`/` cannot be an output folder") as caught:
        OutputFolder(Path("/"), sources=(), overwrite=True)
    assert caught.value.hint


def test_the_home_of_nobody_is_a_name_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert OutputFolder(Path("~no such user/out"), sources=(), overwrite=False).path == tmp_path / "~no such user/out"
