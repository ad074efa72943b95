"""What a conversion says of itself in its result, so that the same command knows it again and does nothing."""

import json
import os
from collections.abc import Iterable
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from quantkit.checkpoint.durable import sync_folder, write_file
from quantkit.checkpoint.folder import RESULT_FILE, read_json
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.checkpoint.regular import read_chunks
from quantkit.commands.conversion.folder import written_in
from quantkit.commands.conversion.report import ConvertReport
from quantkit.commands.quantization.resumption import KIND, VERSION, finished_before
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.job.identity import programs
from quantkit.job.job import Facts, differing
from quantkit.progress import NOBODY, Progress
from quantkit.settings import ConvertSettings

SAME_WHATEVER = ("source", "out", "overwrite", "evaluate", "job", "restart", "made_by")
KEY = "conversion"
AGAIN = "use `--overwrite` to replace it as a whole, or choose another OUT"


def conversion_facts(settings: ConvertSettings, progress: Progress = NOBODY) -> Facts:
    """All that the bytes of the result depend on. Inputs are told by the content of their files."""
    facts: dict[str, str | int | float | bool | None] = {
        "command": f"convert {settings.route}",
        **programs(),
        "input": _digest(settings.source, progress),
    }
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name in SAME_WHATEVER:
            continue
        if field.name in ("original", "calibration", "measurement") and value is not None and Path(value).exists():
            value = _digest(Path(value), progress)
        elif field.name == "adapters":
            value = " ".join(f"{_digest(Path(each.partition('=')[0]))}={each.partition('=')[2]}" for each in value)
        facts[field.name] = value if value is None or isinstance(value, str | int | float | bool) else str(value)
    return facts


def finished_conversion(
    settings: ConvertSettings, facts: Facts, progress: Progress = NOBODY
) -> ConvertReport | None:
    """What was made before by the same command from the same input; None where it is to be made.

    Raises CheckpointError for the result of another command, or one that was changed, that must not be replaced.
    """
    made = _read(settings.out)
    if made is None or settings.restart:
        return None
    differences = differing(made[KEY]["facts"], facts)
    files = made[KEY]["files"]
    if not differences and files is not None and files != _digest(settings.out, progress, weights=True):
        differences = ["its tensors were changed afterwards"]
    if not differences and files is None:  # a writer with digests of its own
        before = made["facts"]
        if finished_before(settings.out, made, before, overwrite=settings.overwrite, progress=progress) is None:
            return None
    if not differences:
        way = "finished before by this command, from this input: nothing to do; to do it again, `--overwrite`"
        return ConvertReport(settings, way=way, written=written_in(open_checkpoint(settings.out)), seconds=0.0)
    if settings.overwrite:
        return None
    raise CheckpointError(f"`{settings.out}` is another result: {'; '.join(differences)}", hint=AGAIN)


def stamp(out: Path, facts: Facts, progress: Progress = NOBODY) -> None:
    """Notes in a complete result what made it, unless that was written with it."""
    if not out.is_dir() or _read(out) is not None:
        return
    content = {"kind": KIND, "version": VERSION, "facts": dict(facts), "tensors": None, "bits_per_weight": None}
    content[KEY] = {"facts": dict(facts), "files": _digest(out, progress, weights=True)}
    part = out / f".{RESULT_FILE}.part"
    try:
        part.unlink(missing_ok=True)
        write_file(part, json.dumps(content, indent=2).encode())
        part.replace(out / RESULT_FILE)
        sync_folder(out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(
            f"`{out}` is complete, but `{RESULT_FILE}` cannot be written there: {error.strerror}",
            hint="free some space",
        ) from error


def _read(out: Path) -> dict[str, Any] | None:
    try:
        found = read_json(Path(os.path.expanduser(out)) / RESULT_FILE)  # noqa: PTH111 - as OUT is read
    except QuantkitError:
        return None
    own = found.get(KEY)
    valid = found.get("kind") == KIND and found.get("version") == VERSION
    return found if valid and isinstance(own, dict) and isinstance(own.get("facts"), dict) and "files" in own else None


def _digest(path: Path, progress: Progress = NOBODY, *, weights: bool = False) -> str:
    """Of a file, or of the names and contents of all files of a folder, or of its weights alone; the text itself for a
    name that is no path."""
    whole = sha256()
    if not path.exists():
        return str(path)
    files = [file for file in _files(path) if not weights or file.suffix == ".safetensors"]
    megabytes = sum(-(-file.stat().st_size // 2**20) for file in files)
    with progress.task(f"read {path.name}, MiB", total=megabytes) as task:
        for file in files:
            content = sha256()
            for chunk in read_chunks(file):
                content.update(chunk)
                task.advance()
            name = "" if path.is_file() else str(file.relative_to(path))
            whole.update(f"{name}\0".encode("utf-8", "surrogateescape") + content.digest())
    return whole.hexdigest()


def _files(path: Path) -> Iterable[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != RESULT_FILE)
