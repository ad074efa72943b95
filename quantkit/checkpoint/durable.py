"""Bytes that are on the disk when the call returns: new files, copies, folders. Errors are those of the system."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.checkpoint.regular import read_chunks


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """All of `data`, from byte `offset` of the file on. Not yet synced."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """The descriptor of a file that was not there, synced when the block ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """A new file with this content."""
    with new_file(path) as descriptor:
        write_at(descriptor, memoryview(data), 0)


def copy_file(source: Path, target: Path) -> None:
    """A new file with the content of another; links are followed. CheckpointError when `source` cannot be read."""
    with new_file(target) as descriptor:
        written = 0
        for chunk in read_chunks(source):
            write_at(descriptor, memoryview(chunk), written)
            written += len(chunk)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not know what it means to sync a folder.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
