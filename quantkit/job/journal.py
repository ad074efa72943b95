"""Journal: a file of records that grows at its end and survives whatever ends the process that writes it.

A record is a line: the CRC-32 of its JSON as eight hex digits, a space, the JSON. It counts from the moment its bytes
are on the disk. A last line that is not whole was being written when the process died, and is cut off; a line that is
not whole with whole ones behind it is damage, and an error.
"""

import json
import os
import re
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantkit.checkpoint.durable import write_at
from quantkit.checkpoint.regular import read_at
from quantkit.errors import JobError

MOST_BYTES = 1 << 30
BEGUN = re.compile(rb"[0-9a-f]{1,8}|[0-9a-f]{8} [^\n]*")
"""What a first record may look like that was being written."""


class Journal:
    """The records of one file, which is made where there is none. The caller lets no other process write to it."""

    def __init__(self, path: Path) -> None:
        """Raises JobError for a file that is no journal or is damaged, OSError where it cannot be read or written."""
        self.path = path
        # O_NOFOLLOW: a link in its place would lead the writing elsewhere.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
                raise JobError(f"`{path}` is no journal", hint="choose another folder with `--job`")
            self.records, self._size = _read(bytes(read_at(self._file, status.st_size, 0)), path)
            if self._size < status.st_size:
                os.ftruncate(self._file, self._size)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, record: dict[str, Any]) -> None:
        """One record, on the disk when this returns. Raises OSError; then the file is as it was before."""
        body = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        try:
            write_at(self._file, memoryview(line), self._size)
            os.fsync(self._file)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)
        self.records.append(record)

    def clear(self) -> None:
        """Forgets every record."""
        os.ftruncate(self._file, 0)
        os.fsync(self._file)
        self._size = 0
        self.records.clear()

    def close(self) -> None:
        os.close(self._file)


def _read(content: bytes, path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records, and where the last one ends."""
    records: list[dict[str, Any]] = []
    end, lines = 0, content.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        record = _parse(line)
        if record is None:
            if any(_parse(later) is not None for later in lines[number:]):
                raise JobError(
                    f"line {number} of the journal `{path}` is damaged", hint="start over with `--restart`"
                )
            if not records and not BEGUN.fullmatch(line):
                raise JobError(f"`{path}` is no journal", hint="choose another folder with `--job`")
            break
        records.append(record)
        end += len(line)
    return records, end


def _parse(line: bytes) -> dict[str, Any] | None:
    """None for a line that is not whole."""
    digits, body = line[:8], line[9:-1]
    if not line.endswith(b"\n") or line[8:9] != b" " or digits != b"%08x" % zlib.crc32(body):
        return None
    try:
        record = json.loads(body)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
