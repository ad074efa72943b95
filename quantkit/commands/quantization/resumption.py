"""What a command compares before it goes on with a job, or says that its result is there already."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from quantkit.checkpoint.folder import RESULT_FILE, read_json
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.checkpoint.receipt import Receipt
from quantkit.commands.quantization.job import Subject
from quantkit.commands.quantization.report import Damage
from quantkit.errors import CheckpointError, JobError, QuantkitError, in_shell
from quantkit.job.identity import ModelIdentity, digest_of_text, programs
from quantkit.job.job import Facts, differing
from quantkit.progress import NOBODY, Progress
from quantkit.settings import MeasureSettings, QuantizeSettings

KIND, VERSION = "quantkit result", 1
CHANGED = "its tensors were changed afterwards"
SAME_BYTES_WHATEVER = (
    *("model", "out", "job", "restart", "overwrite", "strict", "evaluate", "judged", "device", "dtype"),
    *("max_memory", "asked"),
)
"""Settings that do not change what is written, or that are among the facts in another form."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A result that this command made before, measured now where that was still to be done.

    known  what a report of its making would say under `--json`, as far as that is known; the rest of it is None
    """

    out: Path
    bits_per_weight: float
    size_bytes: int
    damage: Damage | None = None
    known: Mapping[str, Any] = field(default_factory=dict)

    def rows(self) -> list[list[str]]:
        """Name and figure, for people."""
        left = "nothing to do" if self.damage is None else "only its damage was to be measured"
        unmeasured = ["to measure its damage", f"`quantkit eval compare MODEL {in_shell(self.out)}`"]
        return [
            ["finished before", f"by this command, from this model: {left}"],
            ["bits per weight, linears", f"{self.bits_per_weight:.3f}"],
            ["size", f"{self.size_bytes / 2**20:.1f} MiB"],
            *([unmeasured] if self.damage is None else self.damage.rows()),
            ["to do it again", "`--restart`"],
        ]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of each table for people."""
        return [(str(self.out), ["", ""], self.rows())]

    def as_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "finished_before": True,
            **self.known,
            "bits_per_weight": self.bits_per_weight,
            "size_bytes": self.size_bytes,
            "evaluation": None if self.damage is None else self.damage.as_json(),
        }


def facts_of(
    command: str, settings: QuantizeSettings | MeasureSettings, subject: Subject, model: ModelIdentity
) -> Facts:
    """All that the bytes of a result depend on."""
    facts: dict[str, str | int | float | bool | None] = {
        "command": command,
        **programs(),
        "model": model.weights,
        "model's files": model.files,
        "text": digest_of_text(subject.rows),
        "device": subject.placement.device,
        "dtype": subject.placement.dtype_name,
    }
    for option in fields(settings):
        if option.name not in SAME_BYTES_WHATEVER:
            facts[option.name] = as_fact(getattr(settings, option.name))
    return facts


def as_fact(value: Any) -> str | int | float | bool | None:
    """The value of a setting: of a file its content, as a digest; None where it cannot be read, which its reader will
    say."""
    if isinstance(value, Path):
        return _digest(value)
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def job_place(job: Path | None, out: Path, source: Path) -> Path:
    """Where the job folder is: `OUT.job`, or what was asked for. Raises JobError for a place in model or result."""
    if job is None:
        return out.with_name(f"{out.name}.job")
    place = Path(os.path.realpath(os.path.expanduser(job)))  # noqa: PTH111 - as `-o` is read
    for taken in (out, Path(os.path.realpath(source))):
        if place == taken or place.is_relative_to(taken) or taken.is_relative_to(place):
            raise JobError(
                f"the job `{place}` and `{taken}` must not be the same folder or one inside the other",
                hint="choose another folder with `--job`",
            )
    return place


def result_document(
    facts: Facts,
    receipt: Receipt,
    bits_per_weight: float,
    made_by: Facts | None = None,
    redone: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """What a result says of itself, in `RESULT_FILE`: nothing that differs from run to run. `redone`: what was solved
    anew since, one entry for each time, the first one first."""
    return {
        "kind": KIND,
        "version": VERSION,
        "facts": dict(facts),
        "tensors": receipt.digest(),
        "bits_per_weight": bits_per_weight,
        **({} if made_by is None else {"conversion": {"facts": dict(made_by), "files": None}}),
        **({"redone": list(redone)} if redone else {}),
    }


def read_result(folder: Path) -> dict[str, Any] | None:
    """What `result_document` gave; None where there is none, or nothing that can be read."""
    try:
        found = read_json(Path(os.path.expanduser(folder)) / RESULT_FILE)  # noqa: PTH111 - as `-o` is read
    except QuantkitError:
        return None
    valid = found.get("kind") == KIND and found.get("version") == VERSION and isinstance(found.get("facts"), dict)
    return found if valid else None


def finished_before(
    out: Path, made: dict[str, Any], facts: Facts, *, overwrite: bool, progress: Progress = NOBODY
) -> Finished | None:
    """The result in `out` if it is that of these facts; None if it may be replaced. `made` is what it says of itself.

    Raises CheckpointError for another one, or one that has been changed, that must not be.
    """
    differences = [*differing(made["facts"], facts), *in_words(redone(made))]
    if not differences:
        try:
            checkpoint = open_checkpoint(out)
            if receipt_of(checkpoint, progress).digest() == made["tensors"]:
                return as_finished(checkpoint, made)
            differences = [CHANGED]
        except CheckpointError as error:
            if overwrite:
                return None
            raise CheckpointError(
                f"`{out}` was made by this command, but is damaged now: {error.message}",
                hint="use `--overwrite` to make it again, or choose another folder with `-o`",
            ) from error
    if overwrite:
        return None
    raise CheckpointError(
        f"`{out}` is another result: {'; '.join(differences)}",
        hint="use `--overwrite` to replace it as a whole, or choose another folder with `-o`",
    )


def receipt_of(checkpoint: Checkpoint, progress: Progress = NOBODY) -> Receipt:
    """Reads all that is there."""
    receipt = Receipt()
    with progress.task("read what is there", total=len(checkpoint.names())) as task:
        for name in checkpoint.names():
            receipt.add(name, checkpoint.tensor(name))
            task.advance(note=name)
    return receipt


def as_finished(checkpoint: Checkpoint, made: Mapping[str, Any]) -> Finished:
    files = {header.path for header in checkpoint.homes.values()}
    return Finished(checkpoint.path, float(made["bits_per_weight"]), sum(file.stat().st_size for file in files))


def redone(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was solved anew in a result since it was made, by its record: entries with `facts` and the number of
    `linears`."""
    found = made.get("redone", [])
    entries = found if isinstance(found, list) else []
    return [one for one in entries if isinstance(one, dict) and isinstance(one.get("facts"), dict)]


def in_words(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """What a record says was solved anew."""
    return [
        f"what matches `{one['facts'].get('redo')}` was redone with effort `{one['facts'].get('effort')}`"
        for one in entries
    ]


def _digest(path: Path) -> str | None:
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
