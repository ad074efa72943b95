"""CheckpointWriter: a model folder, written as its tensors arrive, that appears whole or not at all.

    with CheckpointWriter(out, source=checkpoint.path) as writer:
        writer.add(name, tensor)                             # as often as there are tensors, in any order
        writer.finish(checkpoint.config, checkpoint.side_files())

Tensors go to the disk as they come, into shards of bounded size. Equal tensors in equal order give equal bytes.
Leaving the block in any other way than after `finish` leaves nothing behind; see `output_folder` for how.
"""

import errno
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from quantkit.checkpoint.durable import copy_file, sync_folder, write_file
from quantkit.checkpoint.folder import INDEX, is_side_file
from quantkit.checkpoint.header import shown
from quantkit.checkpoint.output_folder import OutputFolder
from quantkit.checkpoint.shard import ShardWriter
from quantkit.errors import CheckpointError

SHARD_BYTES = 4 * 2**30

HINTS = {
    errno.ENOSPC: "free some space there, or choose another disk with `-o`",
    errno.EDQUOT: "your quota there is used up: free some space, or choose another disk with `-o`",
    errno.EFBIG: "that disk, or your `ulimit -f`, takes no file of this size: choose another disk with `-o`",
    errno.EIO: "the disk reports a fault, see `dmesg`: choose another one with `-o`",
    errno.EROFS: "that disk is read-only: choose another one with `-o`",
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
        self._folder = OutputFolder(out, sources=() if source is None else (source,), overwrite=overwrite)
        self._shard_bytes = shard_bytes
        self._shard: ShardWriter | None = None
        self._shard_count = 0
        self._shard_of: dict[str, int] = {}
        self._total_bytes = 0

    @property
    def path(self) -> Path:
        """Where the folder will be: absolute, links followed."""
        return self._folder.path

    def __enter__(self) -> Self:
        """Raises CheckpointError when `out` cannot or must not be written, before any work is done for it."""
        with self._all_or_nothing():
            self._folder.claim()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
                self._shard = ShardWriter(self._folder.working / _working_name(self._shard_count))
            self._shard.add(name, tensor)
        self._shard_of[name] = self._shard_count
        self._total_bytes += tensor.numel() * tensor.element_size()

    def finish(
        self,
        config: Mapping[str, Any],
        side_files: Iterable[Path] = (),
        extra_json: Mapping[str, Mapping[str, Any]] | None = None,
        check: Callable[[Path], None] | None = None,
    ) -> list[Path]:
        """Writes what is not weights and puts the folder in its place. Returns its files.

        side_files  copied under their own names, a folder with its files; see `Checkpoint.side_files`
        extra_json  file name → content of files that are made anew; these win over side files of the same name
        check       called with the complete folder before it takes its place; what it raises keeps it from that
        Raises CheckpointError; then nothing is left, and a folder that was there before is as it was.
        """
        documents = {"config.json": config, **(extra_json or {})}
        with self._all_or_nothing():
            if not self._shard_of:
                raise CheckpointError(f"no tensors were written for `{self._folder.path}`")
            if self._shard is not None:
                self._close_shard()
            documents |= self._name_shards()
            for name, content in documents.items():
                write_file(self._folder.working / name, (json.dumps(content, indent=2) + "\n").encode())
            for file in side_files:
                if file.name not in documents:
                    _copy(file, self._folder.working)
            if check is not None:
                check(self._folder.working)
            self._folder.put_in_place()
        return sorted(path for path in self._folder.path.rglob("*") if path.is_file())

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
            (self._folder.working / _working_name(number)).rename(self._folder.working / name)
        if count == 1:
            return {}
        weight_map = {name: names[number] for name, number in sorted(self._shard_of.items())}
        return {INDEX: {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}}

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Whatever fails inside takes the unfinished folder with it; the system's own errors get words and a hint."""
        try:
            yield
        except OSError as error:
            self._abandon()
            raise CheckpointError(
                f"`{self._folder.path}` cannot be written: {error.strerror or error}",
                hint=HINTS.get(error.errno or 0, "choose another place with `-o`"),
            ) from error
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None
        self._folder.abandon()


def _working_name(number: int) -> str:
    return f"shard-{number}"


def _copy(source: Path, folder: Path) -> None:
    """A side file, or a folder of them, into `folder`."""
    if not source.is_dir():
        if not is_side_file(source.name):
            raise CheckpointError(f"`{source}` is no side file: weights and their index are not copied")
        copy_file(source, folder / source.name)
        return
    (folder / source.name).mkdir()
    for path in sorted(source.iterdir()):
        if path.is_file():
            _copy(path, folder / source.name)
    sync_folder(folder / source.name)
