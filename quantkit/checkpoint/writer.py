"""CheckpointWriter: a model folder that appears whole or not at all.

    with CheckpointWriter(out) as writer:
        writer.add(name, tensor)                     # as often as there are tensors, in any order
        writer.finish(config, side_files)

Everything is written to a hidden folder beside `out`, `.NAME.partial`, which takes the place of `out` in one rename
after the last byte has reached the disk. Leaving the block in any other way removes it; a process that was killed
leaves it behind, and the next writer of the same `out` clears it. Tensors go to the disk as they arrive, into shards
of bounded size; equal tensors in equal order give equal bytes.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from quantkit.checkpoint.folder import INDEX, TEMPLATE_FOLDER, is_side_file
from quantkit.checkpoint.header import open_regular, read_at, shown
from quantkit.checkpoint.shard import ShardWriter, write_at
from quantkit.errors import CheckpointError

SHARD_BYTES = 4 * 2**30
COPY_BYTES = 2**20
# Folders that a model may have: named chat templates, and what a download leaves beside it.
MODEL_FOLDERS = (TEMPLATE_FOLDER, ".cache")

HINTS = {
    errno.ENOSPC: "free some space there, or choose another disk with `-o`",
    errno.EDQUOT: "your quota there is used up: free some space, or choose another disk with `-o`",
    errno.EFBIG: "this disk or limit (`ulimit -f`) takes no file of that size: choose another disk with `-o`",
    errno.EIO: "the disk reports a fault (see `dmesg`): choose another one with `-o`",
    errno.EROFS: "that place is read-only: choose another one with `-o`",
    errno.EACCES: "you may not write there: choose another place with `-o`",
    errno.EPERM: "you may not write there: choose another place with `-o`",
}


class CheckpointWriter:
    """Writes one model folder. Use it in a `with` block; only `finish` makes the folder appear.

    out          the folder to make; its parents are made too
    source       the folder that is being read, which must stay as it is: neither may be inside the other
    overwrite    `out` may be a folder with files, which stays as it is until the new one is complete
    shard_bytes  no shard has more data, unless it is a single tensor
    """

    def __init__(
        self, out: Path, *, source: Path | None = None, overwrite: bool = False, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.out = Path(os.path.realpath(Path(out).expanduser()))
        self._source = source
        self._overwrite = overwrite
        self._shard_bytes = shard_bytes
        self._folder = self.out.with_name(f".{self.out.name}.partial")
        self._replaced = self.out.with_name(f".{self.out.name}.replaced")
        self._lock: int | None = None
        self._new_parents: list[Path] = []
        self._shard: ShardWriter | None = None
        self._shard_count = 0
        self._shard_of: dict[str, int] = {}
        self._total_bytes = 0

    def __enter__(self) -> Self:
        """Raises CheckpointError when `out` cannot or must not be written, before any work is done for it."""
        _check_place(self.out, self._source)
        with self._all_or_nothing():
            self._new_parents = _make_folders(self.out.parent)
            self._lock = _claim(self._folder)
            if self._replaced.exists() and not self.out.exists():
                self._replaced.rename(self.out)
            _check_free(self.out, self._overwrite)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._abandon()

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor, of any device; it may be changed or dropped afterwards.

        Raises CheckpointError for a name given twice, a dtype that the format lacks, or a disk that takes no more.
        """
        if name in self._shard_of or name == "__metadata__":
            raise CheckpointError(f"a tensor {shown(name)} cannot be written, or was already")
        with self._all_or_nothing():
            if self._shard is not None and not self._shard.has_room(name, tensor, self._shard_bytes):
                self._close_shard()
            if self._shard is None:
                self._shard_count += 1
                self._shard = ShardWriter(self._folder / _working_name(self._shard_count))
            self._shard.add(name, tensor)
        self._shard_of[name] = self._shard_count
        self._total_bytes += tensor.numel() * tensor.element_size()

    def finish(
        self,
        config: Mapping[str, Any],
        side_files: Iterable[Path] = (),
        extra_json: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[Path]:
        """Writes what is not weights and puts the folder in its place. Returns its files.

        side_files  copied under their own names, a folder with its files; see `Checkpoint.side_files`
        extra_json  file name → content of files that are made anew; these win over side files of the same name
        Raises CheckpointError; then nothing is left, and a folder that was there before is as it was.
        """
        documents = {"config.json": config, **(extra_json or {})}
        with self._all_or_nothing():
            if not self._shard_of:
                raise CheckpointError(f"no tensors were written for `{self.out}`")
            if self._shard is not None:
                self._close_shard()
            documents |= self._name_shards()
            for name, content in documents.items():
                text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
                write_file(self._folder / name, text.encode())
            for file in side_files:
                if file.name not in documents:
                    _copy(file, self._folder)
            _sync_folder(self._folder)
            self._put_in_place()
        return sorted(path for path in self.out.rglob("*") if path.is_file())

    def _close_shard(self) -> None:
        assert self._shard is not None
        self._shard.close()
        self._shard = None

    def _name_shards(self) -> dict[str, dict[str, Any]]:
        """Gives the shards the names they are known by. Returns their index as a document, where there are several."""
        count = self._shard_count
        names = {number: f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)}
        if count == 1:
            names = {1: "model.safetensors"}
        for number, name in names.items():
            (self._folder / _working_name(number)).rename(self._folder / name)
        if count == 1:
            return {}
        weight_map = {name: names[number] for name, number in sorted(self._shard_of.items())}
        return {INDEX: {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}}

    def _put_in_place(self) -> None:
        """One rename when `out` is absent or empty. Else the old folder steps aside first, and back if that fails."""
        replaces = self.out.exists() and any(self.out.iterdir())
        try:
            if replaces:
                _check_free(self.out, self._overwrite)
                self.out.rename(self._replaced)
            self._folder.rename(self.out)
        except BaseException:
            if replaces and not self.out.exists():
                self._replaced.rename(self.out)
            raise
        _sync_folder(self.out.parent)
        self._release()
        shutil.rmtree(self._replaced, ignore_errors=True)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Whatever fails inside takes the unfinished folder with it; the system's own errors get words and a hint."""
        try:
            yield
        except OSError as error:
            self._abandon()
            raise CheckpointError(
                f"`{self.out}` cannot be written: {error.strerror or error}",
                hint=HINTS.get(error.errno or 0, "choose another place with `-o`"),
            ) from error
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._release()
        for folder in reversed(self._new_parents):
            with suppress(OSError):
                folder.rmdir()

    def _release(self) -> None:
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None


def write_file(path: Path, data: bytes) -> None:
    """A new file with this content, on the disk when this returns."""
    with _new_file(path) as descriptor:
        write_at(descriptor, memoryview(data), 0)


def _working_name(number: int) -> str:
    return f"shard-{number}"


@contextmanager
def _new_file(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy(source: Path, folder: Path) -> None:
    """A side file, or a folder of them, into `folder`: content only, links followed."""
    if source.is_dir():
        (folder / source.name).mkdir()
        for path in sorted(source.iterdir()):
            if path.is_file():
                _copy(path, folder / source.name)
        _sync_folder(folder / source.name)
        return
    if not is_side_file(source.name):
        raise CheckpointError(f"`{source}` is no side file: weights and their index are not copied")
    with open_regular(source) as (read, status), _new_file(folder / source.name) as written:
        for start in range(0, status.st_size, COPY_BYTES):
            write_at(written, memoryview(read_at(read, min(COPY_BYTES, status.st_size - start), start)), start)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folders(folder: Path) -> list[Path]:
    """Makes a folder and its parents; returns those that were not there."""
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    made = []
    for path in reversed(absent):
        path.mkdir()
        made.append(path)
    return made


def _claim(folder: Path) -> int:
    """Makes the working folder and locks it for this process; what a killed process left in it is removed.

    Returns the descriptor that holds the lock. Raises CheckpointError when another process has it.
    """
    while True:
        with suppress(FileExistsError):
            folder.mkdir()
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(
                f"another process is writing `{folder}`", hint="let it finish, or choose another `-o`"
            ) from None
        # The other process may have finished in between: then this is its result, no longer a working folder.
        if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.lstat()):
            break
        os.close(descriptor)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return descriptor


def _check_place(out: Path, source: Path | None) -> None:
    """Raises CheckpointError for an `out` that must not be written, whatever is there."""
    if source is not None:
        source = Path(os.path.realpath(source))
        if out == source or out.is_relative_to(source) or source.is_relative_to(out):
            raise CheckpointError(
                f"the output `{out}` and the model `{source}` must not be the same folder or one inside the other",
                hint="choose another folder with `-o`",
            )
    if os.path.ismount(out) or out == Path.cwd():
        kind = "the current folder" if out == Path.cwd() else "a mount point"
        raise CheckpointError(
            f"`{out}` is {kind}, which no other folder can take the place of", hint=f"use `-o {out / 'model'}`"
        )
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"`{out}` is a file", hint="choose another name with `-o`")


def _check_free(out: Path, overwrite: bool) -> None:
    """Raises CheckpointError for a folder with files that may not be replaced, or with folders that no model has."""
    files = sorted(out.iterdir()) if out.exists() else []
    if files and not overwrite:
        raise CheckpointError(
            f"`{out}` is not empty (`{files[0].name}`, {len(files)} in all)",
            hint="use `--overwrite` to replace it as a whole, or choose another folder with `-o`",
        )
    inner = [path for path in files if path.is_dir() and path.name not in MODEL_FOLDERS]
    if inner:
        raise CheckpointError(
            f"`{out}` holds the folder `{inner[0].name}`, so it is more than a model and is not replaced",
            hint="choose another folder with `-o`, or remove it yourself",
        )
