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
from quantkit.checkpoint import links
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
    """All faults of the files: absent ones, links to nothing or out of the folder, damaged headers, tensors in two
    files or not where the index has them, JSON that is none, quantization settings that contradict each other. Raises
    nothing."""
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

    out = links.leading_out(folder, folders.readable(folder))
    told = {*out, *(path for path in folder.iterdir() if not path.exists())}
    config: dict[str, Any] = {} if folder / "config.json" in told else attempt(lambda: _config(folder), {})
    settings = told.intersection(folder / name for name in folders.QUANTIZATION_FILES)
    quantization = None if settings else attempt(lambda: read_quantization(folder, config), None)
    nothing = folders.Weights((), {}, ())
    weights = nothing if folder / folders.INDEX in told else attempt(lambda: _weights(folder, faults), nothing)
    files, index = weights.files, weights.weight_map
    out += [file for file in links.leading_out(folder, files) if file not in out]
    faults += [links.outside(folder, [file]) for file in out]
    for link in folders.dangling(folder):
        faults.append(CheckpointError(f"dangling link {link}", hint="the file is gone: download the model again"))
    for file in files:
        if not os.path.lexists(file):
            how = f"named in `{folder / folders.INDEX}`"
            faults.append(CheckpointError(f"missing: `{file}`, {how}", hint="fetch it, or the whole model, again"))
    headers: dict[Path, Header] = {}
    for file in files:
        header = attempt(partial(read_header, file), None) if file.exists() and file not in out else None
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
    incomplete = len(headers) < len(files) or not files or (index is not None and not index)
    return Survey(Checkpoint(folder, config, quantization, homes), tuple(faults) or (first,), weights.notes, incomplete)


def _config(folder: Path) -> dict[str, Any]:
    folders.require([folder / "config.json"], "which describes the model")
    return folders.read_json(folder / "config.json")


def _weights(folder: Path, faults: list[QuantkitError]) -> folders.Weights:
    """The weights as opening would find them; where it refuses, what can be read all the same."""
    try:
        return folders.name_weights(folder)
    except QuantkitError as error:
        if not os.path.lexists(folder / folders.INDEX):
            faults.append(error)
            return folders.Weights(tuple(sorted(folder.glob("*.safetensors"))), None, ())
        known = len(faults)
        places = _placed(folder, faults)
        faults += [error] if len(faults) == known else []
    return folders.Weights(tuple(sorted(set(places.values()))), places, ())


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
