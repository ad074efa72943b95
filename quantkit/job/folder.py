"""JobFolder: a folder that one process has for itself until it ends, however it ends.

Nothing in it is trusted to be what this process put there: links are never followed, neither for writing nor for
reading, and files of other names than a job's make it no job's folder.
"""

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from quantkit.checkpoint.owned_folder import empty, own, remove
from quantkit.errors import JobError

JOURNAL = "journal.jsonl"
OURS = re.compile(rf"{re.escape(JOURNAL)}|step-[a-z0-9-]+\.safetensors(\.part)?|states-[a-z0-9-]+")


class JobFolder:
    """The folder at `path`, locked. Raises JobError when another process has it or when it is no job's folder, OSError
    when it cannot be made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path)
        try:
            self._require_ours()
        except BaseException:
            self.release()
            raise

    def file(self, name: str) -> Path:
        """The place of a file, which may not be a link or a folder. Raises JobError for those."""
        place = self.path / name
        if os.path.lexists(place) and not stat.S_ISREG(place.lstat().st_mode):
            raise JobError(f"`{place}` is not a regular file: it was not put there by a job", hint=self._clean())
        return place

    def subfolder(self, name: str) -> Path:
        """A folder that exists. Raises JobError where something else, or nothing, has its name."""
        place = self.path / name
        if not os.path.lexists(place) or not stat.S_ISDIR(place.lstat().st_mode):
            raise JobError(f"`{place}` is not a folder with hidden states", hint="start over with `--restart`")
        return place

    def new_subfolder(self, name: str) -> Path:
        """An empty folder; whatever has its name goes."""
        place = self.path / name
        remove(place)
        place.mkdir()
        return place

    def keep_subfolders(self, *names: str) -> None:
        """All other folders go."""
        for place in self.path.iterdir():
            if place.name.startswith("states-") and place.name not in names:
                remove(place)

    def empty(self) -> None:
        """Everything goes but the journal."""
        empty(self.path, keep=(JOURNAL,))

    def remove(self) -> None:
        """The folder itself goes, the journal last: what is left by a kill in between is known for what it is."""
        self.empty()
        remove(self.path / JOURNAL)
        with suppress(OSError):
            self.path.rmdir()

    def release(self) -> None:
        os.close(self._lock)

    def _require_ours(self) -> None:
        for place in sorted(self.path.iterdir()):
            if not OURS.fullmatch(place.name):
                raise JobError(
                    f"`{self.path}` holds `{place.name}`, which is no part of a job",
                    hint="choose another folder with `--job`",
                )

    def _clean(self) -> str:
        return f"look at `{self.path}`, remove it, and start over"


def _lock(path: Path) -> int:
    """Makes the folder, or takes over one that no living process has."""
    try:
        descriptor = own(path)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP) or not os.path.lexists(path):
            raise
        what = "a link" if path.is_symlink() else "a file"
        hint = "remove it, or choose a folder with `--job`"
        raise JobError(f"`{path}` is {what}, where the folder of this job should be", hint=hint) from error
    if descriptor is None:
        raise JobError(
            f"another process works in `{path}`",
            hint="wait until it has finished, or choose another folder with `--job`",
        )
    return descriptor
