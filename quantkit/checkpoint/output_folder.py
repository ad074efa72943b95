"""OutputFolder: a folder that appears whole or not at all.

Files are made in a hidden folder beside it, `.NAME.partial`, which takes its place in one rename after the last byte
has reached the disk. A lock tells a process that is at work from one that was killed: what the latter left behind is
cleared by the next one for the same place. A folder that is replaced steps aside to `.NAME.replaced` for the moment
of that rename, and returns should it fail.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from quantkit.checkpoint.durable import sync_folder
from quantkit.checkpoint.folder import TEMPLATE_FOLDER
from quantkit.checkpoint.owned_folder import empty, own
from quantkit.errors import CheckpointError, in_shell

# Folders that a model may have: named chat templates, and what a download leaves beside it.
MODEL_FOLDERS = (TEMPLATE_FOLDER, ".cache")


class OutputFolder:
    """`path` is where it will be, `working` where its files are made. `claim` comes first, then one of the others.

    sources    the folders that are being read, which must stay as they are: none may be inside the other
    overwrite  `path` may be a folder with files
    Raises CheckpointError for the root of the file system, which has no neighbours.
    """

    def __init__(self, path: Path, *, sources: Sequence[Path], overwrite: bool) -> None:
        # Not Path.expanduser, which fails for a user who does not exist.
        self.path = Path(os.path.realpath(os.path.expanduser(path)))  # noqa: PTH111
        if not self.path.name:
            raise CheckpointError(f"`{self.path}` cannot be an output folder", hint="choose a folder in it with `-o`")
        self.working = self.path.with_name(f".{self.path.name}.partial")
        self._replaced = self.path.with_name(f".{self.path.name}.replaced")
        self._sources = sources
        self._overwrite = overwrite
        self._lock: int | None = None
        self._new_parents: list[Path] = []

    def claim(self) -> None:
        """Makes the working folder. Raises CheckpointError when the place must not be written, OSError if it cannot."""
        _check_place(self.path, self._sources)
        for folder in reversed(self.path.parents):
            if not folder.exists():
                folder.mkdir()
                self._new_parents.append(folder)
        self._lock = _claim(self.working)
        if self._replaced.exists() and not self.path.exists():
            self._replaced.rename(self.path)
        shutil.rmtree(self._replaced, ignore_errors=True)
        _check_free(self.path, self._overwrite)

    def put_in_place(self) -> None:
        """The working folder becomes `path`: one rename when that is absent or empty, two when it is replaced."""
        sync_folder(self.working)
        try:
            if self.path.exists() and any(self.path.iterdir()):
                _check_free(self.path, self._overwrite)
                self.path.rename(self._replaced)
            self.working.rename(self.path)
            sync_folder(self.path.parent)
        except BaseException:
            if not self.working.exists():
                self.path.rename(self.working)
            if self._replaced.exists():
                self._replaced.rename(self.path)
            raise
        self._release()
        self._new_parents.clear()
        shutil.rmtree(self._replaced, ignore_errors=True)

    def abandon(self) -> None:
        """Removes all that `claim` made and all that is in it. Does nothing after `put_in_place`."""
        if self._lock is not None:
            shutil.rmtree(self.working, ignore_errors=True)
            self._release()
        for folder in reversed(self._new_parents):
            with suppress(OSError):
                folder.rmdir()

    def _release(self) -> None:
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None


def _check_place(path: Path, sources: Sequence[Path]) -> None:
    """Raises CheckpointError for a place that no output may have, whatever is there now."""
    for source in map(Path, map(os.path.realpath, sources)):
        if path == source or path.is_relative_to(source) or source.is_relative_to(path):
            raise CheckpointError(
                f"the output `{path}` and the model `{source}` must not be the same folder or one inside the other",
                hint="choose another folder with `-o`",
            )
    for kind, found in (("the current folder", path == Path.cwd()), ("a mount point", os.path.ismount(path))):
        if found:
            raise CheckpointError(
                f"`{path}` is {kind}, whose place no other folder can take", hint="choose a folder in it with `-o`"
            )
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"`{path}` is a file", hint="choose another name with `-o`")


def _check_free(path: Path, overwrite: bool) -> None:
    """Raises CheckpointError for a folder with files that may not be replaced, or with folders that no model has."""
    inside = sorted(path.iterdir()) if path.exists() else []
    if inside and not overwrite:
        raise CheckpointError(
            f"`{path}` is not empty: {len(inside)} files, the first is `{inside[0].name}`",
            hint="use `--overwrite` to replace it as a whole, or choose another folder with `-o`",
        )
    foreign = [item for item in inside if item.is_dir() and item.name not in MODEL_FOLDERS]
    if foreign:
        raise CheckpointError(
            f"`{path}` holds the folder `{foreign[0].name}`: it is more than a model, and is not replaced",
            hint="choose another folder with `-o`, or remove that one yourself",
        )


def _claim(folder: Path) -> int:
    """Makes a folder, or takes over and empties what a killed process left. Returns the descriptor that locks it.

    Raises CheckpointError when a process that lives has it.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(
            f"`{folder}` is a link or a file, where what is unfinished is to be written",
            hint=f"look at it, and remove it: `rm {in_shell(folder)}`",
        )
    descriptor = own(folder)
    if descriptor is None:
        raise CheckpointError(
            f"another process is writing `{folder}`", hint="wait until it has finished, or choose another `-o`"
        )
    try:
        empty(folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
