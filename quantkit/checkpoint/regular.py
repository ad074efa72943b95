"""Regular files, read by position: opened without waiting, whole across short reads, faults named with the file."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.errors import CheckpointError

LFS_OPENING = b"version https://git-lfs.github.com/spec"
LFS_HINT = "run `git lfs install && git lfs pull` in that folder"


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor for reading and what the file system says of it. Never waits on a pipe or a device.

    Raises CheckpointError when the file is missing or no regular file, and for any OSError of the block.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"`{path}` is not a regular file", hint="give a folder with the files of a model")
            yield descriptor, status
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error.strerror}", hint=_system_hint(error)) from error


def read_into(descriptor: int, target: memoryview, start: int) -> int:
    """Fills `target` from byte `start` of the file on; returns how much of it the file had."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], start + done)
        if count == 0:
            break
        done += count
    return done


def read_at(descriptor: int, size_bytes: int, start: int) -> bytearray:
    """The bytes of a file from `start` on: `size_bytes` of them, fewer only at its end."""
    data = bytearray(size_bytes)
    del data[read_into(descriptor, memoryview(data), start) :]
    return data


def read_chunks(path: Path) -> Iterator[bytearray]:
    """The bytes of a file in pieces of a megabyte. Raises CheckpointError as `open_regular` does."""
    with open_regular(path) as (descriptor, status):
        for start in range(0, status.st_size, 2**20):
            yield read_at(descriptor, 2**20, start)


def refuse_pointer(path: Path, opening: bytes | bytearray) -> None:
    """Raises CheckpointError where a file, by its first bytes, is what git-LFS leaves in place of the real one."""
    if opening.startswith(LFS_OPENING):
        raise CheckpointError(f"`{path}` is a git-LFS pointer, not the file it points to", hint=LFS_HINT)


def file_stamp(status: os.stat_result) -> tuple[int, ...]:
    """Size, time of change and identity: equal stamps mean the same content."""
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


def _system_hint(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "fetch the missing file, or the whole model, again"
    if isinstance(error, PermissionError):
        return "make it readable: `chmod u+r FILE`"
    return "copy the model to another disk and try again"
