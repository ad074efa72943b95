"""Job: the finished steps of a command, each with what it found and the tensors it made.

    with Job(folder) as job:
        job.begin(facts, restart=False)                 # JobError where the folder is of other settings
        if not job.has("block 3"):
            with job.step("block 3") as step:
                step.add("weight", tensor)              # as often as there are tensors
                step.finish({"error": 0.01})            # on the disk when this returns; killed before, it never was
        value, tensors = job.value("block 3"), job.tensors("block 3")

Tensors come first, then one line of the journal, which makes the step count. A process that ends, however it ends,
loses what it has not finished; the next one with equal facts goes on behind it. `complete` ends the job, and the folder
goes. One that was completed but not removed is begun anew.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from quantkit.checkpoint.durable import sync_folder
from quantkit.checkpoint.header import TORCH_DTYPES, Header, read_header
from quantkit.checkpoint.receipt import digest_of
from quantkit.checkpoint.regular import open_regular, read_into
from quantkit.checkpoint.shard import ShardWriter
from quantkit.checkpoint.writer import HINTS
from quantkit.errors import CheckpointError, JobError
from quantkit.job.folder import JOURNAL, JobFolder
from quantkit.job.interruption import uninterrupted
from quantkit.job.journal import Journal

KIND, VERSION = "quantkit job", 1

Facts = Mapping[str, str | int | float | bool | None]
"""What the result depends on, by names that a person understands."""


class Job:
    """The job in the folder `path`, which is made. Use it in a `with` block.

    Raises JobError when another process has it, when it is no folder of a job, or when it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._written():
            self._folder = JobFolder(path)
            try:
                self._journal = Journal(self._folder.file(JOURNAL))
            except BaseException:
                self._folder.release()
                raise
        self._steps = {record["step"]: record for record in self._journal.records if "step" in record}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is finished stays; a folder with nothing finished goes."""
        if not self._steps and self.path.exists():
            with suppress(OSError):
                self._folder.remove()
        self._journal.close()
        self._folder.release()

    @property
    def facts(self) -> Facts | None:
        """Those it was begun with; None for a new one, or one of another version of this folder's format."""
        header = self._header
        return header["facts"] if header and header["version"] == VERSION else None

    @property
    def hints(self) -> Mapping[str, Any]:
        """What `begin` was given to remember."""
        return {} if self.facts is None or self._header is None else self._header["hints"]

    @property
    def finished(self) -> int:
        """Steps that are done."""
        return len(self._steps)

    def begin(self, facts: Facts, *, hints: Mapping[str, Any] | None = None, restart: bool = False) -> None:
        """Goes on with a job of these facts, or begins it. Raises JobError, naming what differs, for one of others.

        hints    to be remembered, without being compared
        restart  what is there goes first
        """
        header = self._header
        completed = any("completed" in record for record in self._journal.records)
        if header is not None and not completed and not restart:
            if header["version"] != VERSION:
                raise JobError(
                    f"`{self.path}` is of version {header['version']} of job folders, this program has {VERSION}",
                    hint="finish it with the program that began it, or start over with `--restart`",
                )
            if differences := differing(header["facts"], facts):
                raise JobError(
                    f"`{self.path}` was begun with other settings: {'; '.join(differences)}",
                    hint="use those, start over with `--restart`, or choose another folder with `--job`",
                )
            return
        with self._written(), uninterrupted():
            # The journal first: killed in between, what is left belongs to no step.
            self._journal.clear()
            self._steps.clear()
            self._folder.empty()
            self._journal.append(
                {"kind": KIND, "version": VERSION, "facts": dict(facts), "hints": dict(hints or {})}
            )
            sync_folder(self.path)
            sync_folder(self.path.parent)

    def has(self, step: str) -> bool:
        return step in self._steps

    def value(self, step: str) -> Any:
        """What a finished step found."""
        return self._steps[step]["value"]

    def homes(self, step: str) -> dict[str, Header]:
        """The header of the file that has them for each tensor of a finished step, for those who read it themselves:
        without comparing what they read with what was written. Raises JobError for a file that cannot be read."""
        names = self._steps[step]["tensors"]
        try:
            return dict.fromkeys(names, read_header(self._folder.file(_file(step)))) if names else {}
        except CheckpointError as error:
            raise self._damaged(step, error.message) from error

    def values(self) -> Iterator[Any]:
        """What each finished step found, in the order in which they were finished."""
        return (record["value"] for record in self._steps.values())

    def tensors(self, step: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a finished step in the order they were added, read one by one.

        Raises JobError for a file that is missing or not as it was written.
        """
        yield from self._read(step, self._steps[step]["tensors"])

    def tensor(self, step: str, name: str) -> Tensor:
        """One tensor of a finished step. Raises as `tensors` does, KeyError for a name that the step has not added."""
        return next(tensor for _, tensor in self._read(step, {name: self._steps[step]["tensors"][name]}))

    def _read(self, step: str, digests: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        if not digests:
            return
        try:
            header = read_header(self._folder.file(_file(step)))
            for name, digest in digests.items():
                entry = header.entries[name]
                data = torch.empty(entry.size_bytes, dtype=torch.uint8)
                with open_regular(header.path) as (descriptor, _):
                    read_into(descriptor, data.numpy().data, entry.start)
                tensor = data.view(TORCH_DTYPES[entry.dtype]).reshape(entry.shape)
                if digest_of(tensor) != digest:
                    raise self._damaged(step, f"tensor `{name}` is not what was written")
                yield name, tensor
        except KeyError as error:
            raise self._damaged(step, f"there is no tensor {error}") from error
        except CheckpointError as error:
            raise self._damaged(step, error.message) from error

    @contextmanager
    def step(self, name: str) -> Iterator["Step"]:
        """A step to be finished. Left in another way than after `finish`, it never was.

        Raises JobError where the disk takes no more.
        """
        step = Step(name, self._folder.file(_file(name) + ".part"))
        try:
            with self._written():
                yield step
                if step.value is not None:
                    self._commit(step)
        finally:
            step.abandon()

    def states(self, name: str) -> Path:
        """A folder for hidden states that exists. Raises JobError where there is none."""
        return self._folder.subfolder(_states(name))

    def new_states(self, name: str) -> Path:
        """An empty folder for hidden states."""
        with self._written():
            return self._folder.new_subfolder(_states(name))

    def keep_states(self, *names: str) -> None:
        """All other folders with hidden states go."""
        with self._written():
            self._folder.keep_subfolders(*map(_states, names))

    def complete(self) -> None:
        """The result stands: the folder goes."""
        with self._written(), uninterrupted():
            self._journal.append({"completed": True})
            self._steps.clear()
            self._folder.remove()

    @property
    def _header(self) -> dict[str, Any] | None:
        if not self._journal.records:
            return None
        header = self._journal.records[0]
        if header.get("kind") != KIND or not isinstance(header.get("version"), int):
            raise JobError(f"`{self._journal.path}` is no journal of a job", hint="choose another folder with `--job`")
        return header

    def _commit(self, step: "Step") -> None:
        with uninterrupted():
            part, file = step.close(), self._folder.file(_file(step.name))
            if part is not None:
                part.replace(file)
                sync_folder(self.path)
            record = {"step": step.name, "value": step.value, "tensors": step.digests}
            self._journal.append(record)
            self._steps[step.name] = record

    def _damaged(self, step: str, reason: str) -> JobError:
        return JobError(f"`{step}` in `{self.path}` is damaged: {reason}", hint="start over with `--restart`")

    @contextmanager
    def _written(self) -> Iterator[None]:
        """The system's own errors get words and a hint."""
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self.path.is_dir():
                raise JobError(
                    f"`{self.path}` is gone: somebody has removed or moved it while the job was at work",
                    hint="the same command begins again; with `--job` it goes on where the folder is now",
                ) from error
            hint = HINTS.get(error.errno or 0, "choose another place with `-o`").replace("`-o`", "`--job`")
            raise JobError(
                f"`{self.path}` cannot be written: {error.strerror or error}",
                hint=f"{hint}; the same command goes on with whatever is finished",
            ) from error


class Step:
    """One step while it is made. `value` is None until `finish`."""

    def __init__(self, name: str, part: Path) -> None:
        self.name = name
        self.value: Any = None
        self.digests: dict[str, str] = {}
        self._part = part
        self._shard: ShardWriter | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """One tensor, of any device; it may be changed or dropped afterwards."""
        if self._shard is None:
            self._part.unlink(missing_ok=True)
            self._shard = ShardWriter(self._part)
        self._shard.add(name, tensor)
        self.digests[name] = digest_of(tensor)

    def finish(self, value: Any) -> None:
        """What the step found, as JSON, None excepted. It counts when the `with` block has been left."""
        assert value is not None
        self.value = value

    def close(self) -> Path | None:
        """The complete file; None where there are no tensors."""
        if self._shard is None:
            return None
        self._shard.close()  # where it fails, `abandon` still has a file to let go of
        self._shard = None
        return self._part

    def abandon(self) -> None:
        if self._shard is not None:
            self._shard.abandon()
        with suppress(OSError):
            self._part.unlink(missing_ok=True)


def differing(before: Facts, now: Facts) -> list[str]:
    """In words, what differs."""
    return [
        f"{name} was {_shown(before.get(name))}, is {_shown(now.get(name))}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def _shown(value: object) -> str:
    if value is None:
        return "not given"
    text = str(value)
    return f"`{text[:12]}…`" if len(text) == 64 else f"`{text}`"


def _file(step: str) -> str:
    return f"step-{step.replace(' ', '-')}.safetensors"


def _states(name: str) -> str:
    return f"states-{name.replace(' ', '-')}"
