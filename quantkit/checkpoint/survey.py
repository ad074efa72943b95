"""Survey: everything that is wrong with the files of a model folder, in one go, and what can be read all the same.

`open_checkpoint` stops at the first fault, as it must; here each file is tried by itself. Faults are the errors that
reading would have raised.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from quantkit.checkpoint import folder as folders
from quantkit.checkpoint.header import Header, read_header, shown
from quantkit.checkpoint.quantization import read_quantization
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.errors import CheckpointError, QuantkitError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """`checkpoint` holds what could be read; it is None where there is no folder. With `incomplete` some of its files
    could not be, so that tensors are missing for a reason that is told already."""

    checkpoint: Checkpoint | None
    faults: tuple[QuantkitError, ...]
    notes: tuple[str, ...]
    incomplete: bool = False


def survey(path: Path) -> Survey:
    """All faults of the files: absent and dangling ones, damaged headers, tensors in two files or not where the index
    has them, JSON that is none, quantization settings that contradict each other. Raises nothing."""
    try:
        sound = open_checkpoint(path)
        return Survey(sound, (), sound.notes)
    except QuantkitError as error:
        first = error
    try:
        if not path.is_dir():
            return Survey(None, (first,), ())
        return _look_at_each(path, first)
    except OSError:
        return Survey(None, (first,), ())


def _look_at_each(folder: Path, first: QuantkitError) -> Survey:
    faults: list[QuantkitError] = []

    def attempt(step: Callable[[], T], otherwise: T) -> T:
        try:
            return step()
        except QuantkitError as error:
            faults.append(error)
            return otherwise

    config: dict[str, Any] = attempt(lambda: _config(folder), {})
    quantization = attempt(lambda: read_quantization(folder, config), None)
    index: dict[str, Path] | None = None
    if os.path.lexists(folder / folders.INDEX):
        nowhere: dict[str, Path] = {}
        index = attempt(lambda: _placed(folder, faults), nowhere)
    files = _files(folder, index)
    for link in folders.dangling(folder):
        faults.append(CheckpointError(f"dangling link {link}", hint="the file is gone: download the model again"))
    for file in files:
        if not os.path.lexists(file):
            how = f"named in `{folder / folders.INDEX}`"
            faults.append(CheckpointError(f"missing: `{file}`, {how}", hint="fetch it, or the whole model, again"))
    headers: dict[Path, Header] = {}
    for file in files:
        header = attempt(partial(read_header, file), None) if file.exists() else None
        if header is not None:
            headers[file] = header
    homes = _homes(list(headers.values()), faults)
    for name, place in (index or {}).items():
        elsewhere = homes.get(name)
        if place in headers and (elsewhere is None or elsewhere.path != place):
            where = f"; it is in `{elsewhere.path}`" if elsewhere else ""
            faults.append(
                CheckpointError(
                    f"tensor {shown(name)} is not in `{place}`, where `{folder / folders.INDEX}` has it{where}",
                    hint="fetch the shard and the index again",
                )
            )
    if not any(error.message == first.message for error in faults) and not _is_covered(first, faults):
        faults.insert(0, first)
    incomplete = len(headers) < len(files) or not files or (index is not None and not index)
    return Survey(Checkpoint(folder, config, quantization, homes), tuple(faults), (), incomplete)


def _is_covered(first: QuantkitError, faults: list[QuantkitError]) -> bool:
    """Whether an error that names several files has been told file by file."""
    opening = first.message.split(":")[0].split(" `")[0]
    words = ("missing", "dangling links in the model folder")
    return opening in words and any(error.message.startswith(("missing:", "dangling link")) for error in faults)


def _config(folder: Path) -> dict[str, Any]:
    folders.require([folder / "config.json"], "which describes the model")
    return folders.read_json(folder / "config.json")


def _placed(folder: Path, faults: list[QuantkitError]) -> dict[str, Path]:
    """Tensor → file as the index has it; a place that leaves the folder is a fault, and is left out."""
    said = folders.read_index(folder)
    places: dict[str, Path] = {}
    for file in dict.fromkeys(said.values()):
        try:
            places[file] = folders.shard_place(folder, file)
        except QuantkitError as error:
            faults.append(error)
    return {tensor: places[file] for tensor, file in said.items() if file in places}


def _files(folder: Path, index: dict[str, Path] | None) -> list[Path]:
    if index:
        return sorted(set(index.values()))
    try:
        return list(folders.find_weights(folder).files)
    except QuantkitError:
        return sorted(path for path in folder.glob("*.safetensors") if path.exists())


def _homes(headers: list[Header], faults: list[QuantkitError]) -> dict[str, Header]:
    homes: dict[str, Header] = {}
    for header in headers:
        for name in header.entries:
            if name in homes:
                faults.append(
                    CheckpointError(
                        f"tensor {shown(name)} is in both `{homes[name].path}` and `{header.path}`",
                        hint="remove the file that does not belong to this model",
                    )
                )
            homes[name] = header
    return homes
