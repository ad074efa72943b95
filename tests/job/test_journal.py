"""The journal: whatever of it reached the disk is read, what did not is cut off, damage is named."""

import errno
import os
from pathlib import Path

import pytest

from quantkit.errors import JobError
from quantkit.job.journal import Journal

RECORDS = [{"step": "a", "value": 0.1}, {"step": "ü\n", "value": [1, None]}, {"step": "c", "value": {}}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    journal = Journal(tmp_path / "j")
    for record in RECORDS:
        journal.append(record)
    journal.close()
    return tmp_path / "j"


def read(path: Path) -> list:
    journal = Journal(path)
    journal.close()
    return journal.records


def test_records_come_back_in_order(path: Path) -> None:
    assert read(path) == RECORDS


def test_a_file_cut_anywhere_keeps_all_whole_records_and_goes_on(path: Path) -> None:
    whole = path.read_bytes()
    ends = [position + 1 for position, byte in enumerate(whole) if byte == 0x0A]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        journal = Journal(path)
        kept = sum(end <= size for end in ends)
        assert journal.records == RECORDS[:kept]
        journal.append({"step": "new"})
        journal.close()
        assert read(path) == [*RECORDS[:kept], {"step": "new"}]


@pytest.mark.parametrize("line", [0, 1])
def test_damage_before_whole_records_is_an_error(path: Path, line: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    for position in range(0, len(lines[line]) - 1, 3):
        damaged = bytearray(lines[line])
        damaged[position] ^= 1
        path.write_bytes(b"".join([*lines[:line], bytes(damaged), *lines[line + 1 :]]))
        with pytest.raises(JobError, match=rf"line {line + 1} of the journal|is no journal"):
            Journal(path)


@pytest.mark.parametrize("content", [b"my notes\n", b"{}\n", b"00000000 {}\n"])
def test_a_file_of_others_is_refused_and_stays(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "j").write_bytes(content)
    with pytest.raises(JobError, match="is no journal"):
        Journal(tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == content


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine\n")
    (tmp_path / "j").symlink_to("mine")
    with pytest.raises(OSError, match="symbolic links"):
        Journal(tmp_path / "j")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(JobError, match="is no journal"):
        Journal(tmp_path / "pipe")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_record_that_fails_was_never_there(path: Path, monkeypatch, number: int, call: str) -> None:
    journal = Journal(path)
    real, before = getattr(os, call), path.read_bytes()

    def fail(descriptor: int, *rest: object) -> int:
        if call == "pwrite":
            real(descriptor, rest[0][:7], rest[1])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        journal.append({"step": "lost"})
    monkeypatch.undo()
    assert path.read_bytes() == before
    journal.append({"step": "d"})
    journal.close()
    assert read(path) == [*RECORDS, {"step": "d"}]


def test_short_writes_are_gone_on_with(path: Path, monkeypatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, data[:3], offset))
    journal = Journal(path)
    journal.append({"step": "in pieces"})
    journal.close()
    assert read(path) == [*RECORDS, {"step": "in pieces"}]


def test_a_cleared_journal_is_empty(path: Path) -> None:
    journal = Journal(path)
    journal.clear()
    journal.append({"step": "first"})
    journal.close()
    assert read(path) == [{"step": "first"}]
