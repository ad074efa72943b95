"""Bytes reach the disk whole, whatever the system calls return."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint import durable
from quantkit.errors import CheckpointError

CONTENT = bytes(range(256)) * 40


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, start: whole(file, data[:1000], start))
    durable.write_file(tmp_path / "a", CONTENT)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_new_file_replaces_nothing(tmp_path: Path) -> None:
    durable.write_file(tmp_path / "a", b"first")
    with pytest.raises(FileExistsError):
        durable.write_file(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"


def test_a_copy_follows_links_and_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    (tmp_path / "link").symlink_to("a")
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, targets, start: whole(file, [targets[0][:777]], start))
    durable.copy_file(tmp_path / "link", tmp_path / "b")
    assert not (tmp_path / "b").is_symlink()
    assert (tmp_path / "b").read_bytes() == CONTENT


def test_a_fault_is_told_from_the_side_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(CONTENT)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointError, match=r"/a` cannot be read: Input/output error"):
            durable.copy_file(tmp_path / "a", tmp_path / "b")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="Input/output error"):
            durable.copy_file(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize(("code", "tolerated"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_folders_are_synced_where_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, tolerated: bool
) -> None:
    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    if tolerated:
        durable.sync_folder(tmp_path)
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            durable.sync_folder(tmp_path)
