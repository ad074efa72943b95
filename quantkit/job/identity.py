"""What a result depends on besides settings: the model, the text, and the programs that calculate."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.fingerprint import fingerprint
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.regular import file_stamp, read_chunks
from quantkit.progress import NOBODY, Progress
from quantkit.version import VERSION


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """
    weights  `fingerprint` of the tensors
    files    of config.json and of all files that go along into the result
    stamps   size, times and place of each weight file by name: while they stay, so does `weights`
    """

    weights: str
    files: str
    stamps: dict[str, list[int]]


def identify(
    checkpoint: Checkpoint, known: Mapping[str, Any] | None = None, progress: Progress = NOBODY
) -> ModelIdentity:
    """Reads every tensor, unless `known`, what an earlier call gave as `remembered`, is of files that have not been
    touched since. Raises CheckpointError where a file cannot be read."""
    files = sorted({header.path for header in checkpoint.homes.values()})
    stamps = {file.name: _stamp(file) for file in files}
    known = known or {}
    weights = str(known["weights"]) if known.get("stamps") == stamps else fingerprint(checkpoint, progress)
    return ModelIdentity(weights, _digest_of_files(checkpoint), stamps)


def remembered(identity: ModelIdentity) -> dict[str, Any]:
    """What a later `identify` has to know."""
    return {"weights": identity.weights, "stamps": identity.stamps}


def digest_of_text(rows: Tensor) -> str:
    """Of token ids, int64 `[rows, length]`."""
    return sha256(f"{list(rows.shape)}".encode() + rows.contiguous().numpy().tobytes()).hexdigest()


def programs() -> dict[str, str]:
    """Versions that may round differently, or write something else; and the instructions that this processor has, on
    which the order of sums depends."""
    return {"quantkit": VERSION, "torch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability()}


def _stamp(file: Path) -> list[int]:
    found = os.stat(file)  # noqa: PTH116 - follows the links of the hub's cache
    return [*file_stamp(found), found.st_ctime_ns]


def _digest_of_files(checkpoint: Checkpoint) -> str:
    whole = sha256()
    found = [checkpoint.path / "config.json", *checkpoint.side_files()]
    inner = [path for folder in found if folder.is_dir() for path in sorted(folder.iterdir()) if path.is_file()]
    for file in (*(path for path in found if path.is_file()), *inner):
        content = sha256()
        for chunk in read_chunks(file):
            content.update(chunk)
        whole.update(f"{file.relative_to(checkpoint.path)}\0".encode("utf-8", "surrogateescape") + content.digest())
    return whole.hexdigest()
