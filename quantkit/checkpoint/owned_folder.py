"""A folder that one process has for itself until it ends, however it ends."""

import errno
import fcntl
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


def own(folder: Path) -> int | None:
    """Makes a folder, or takes over one that no living process has. None where one that lives has it.

    Returns the descriptor that locks it; to close it is to let go. Raises OSError: ENOTDIR or ELOOP for a file or a
    link in its place, which is not followed.
    """
    while True:
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            locked = _lock(descriptor)
            # The process that had it may have removed it just now, or given it another name.
            still = locked and folder.exists() and os.path.samestat(os.fstat(descriptor), folder.lstat())
        except BaseException:
            os.close(descriptor)
            raise
        if still:
            return descriptor
        os.close(descriptor)
        if not locked:
            return None


def empty(folder: Path, *, keep: Collection[str] = ()) -> None:
    """Everything in it goes but what has these names."""
    for place in folder.iterdir():
        if place.name not in keep:
            remove(place)


def remove(place: Path) -> None:
    """A file, a link (not what it leads to), or a folder; or nothing."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some network file systems have no locks: there, nothing keeps a second process out.
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True
