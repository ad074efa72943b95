"""`quantkit convert shard` and `unshard`: the same tensors in files of another size."""

import re
import time

from quantkit.checkpoint.folder import QUANTIZATION_FILES, read_json
from quantkit.commands.conversion.folder import open_source, rewriting
from quantkit.commands.conversion.report import ConvertReport
from quantkit.errors import UsageError
from quantkit.progress import Progress
from quantkit.settings import ConvertSettings

UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
ONE_FILE = 2**63
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?b|)", re.IGNORECASE)


def shard(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """Files of at most `settings.shard_size`, unless a single tensor is larger."""
    return _rewrite(settings, progress, size_in_bytes(settings.shard_size))


def unshard(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """One file, or as many as the headers of so many tensors need; a remark says so."""
    return _rewrite(settings, progress, ONE_FILE)


def size_in_bytes(text: str) -> int:
    """`4GiB`, `500MB`, `1000000` → bytes. Raises UsageError for anything else."""
    found = SIZE.fullmatch(text.strip())
    count = int(float(found[1]) * UNITS[found[2].lower()]) if found else 0
    if count < 1:
        raise UsageError(f"`{text}` is no size", hint="use `--shard-size 4GiB`")
    return count


def _rewrite(settings: ConvertSettings, progress: Progress, shard_bytes: int) -> ConvertReport:
    """Raises CheckpointError for a model that cannot be read, GateError for a tensor that was not written as it is."""
    start = time.monotonic()
    source = open_source(settings.source)
    present = [name for name in QUANTIZATION_FILES if (source.path / name).exists()]
    with (
        rewriting(source, settings.out, progress, overwrite=settings.overwrite, shard_bytes=shard_bytes) as new,
        progress.task(settings.route, total=len(source.names())) as task,
    ):
        for name in source.names():
            new.add(name, source.tensor(name))
            task.advance(note=name)
        written = new.finish(source.config, {name: read_json(source.path / name) for name in present})
    files = sorted(path.name for path in settings.out.glob("*.safetensors"))
    several = settings.route == "unshard" and len(files) > 1
    return ConvertReport(
        settings,
        way="exact, tensors as they were",
        written=written,
        seconds=time.monotonic() - start,
        facts={"files": len(files), "files_before": len({source.info(name).file for name in source.names()})},
        remarks=(f"{written.tensors} tensors need {len(files)} files: a header holds no more",) if several else (),
    )
