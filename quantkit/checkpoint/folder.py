"""The folder of a model: which files are its weights, which go along with them, and what may be wrong with either.

Weights are safetensors files, found by the first rule that fits:

1. those that `model.safetensors.index.json` names,
2. `model.safetensors`, else `model-*-of-*.safetensors`,
3. `output.safetensors`, else `output-*-of-*.safetensors` (the names EXL2 folders have),
4. every `*.safetensors` file of the folder.

Links are followed as far as `links` allows; names from an index are not trusted.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from quantkit.checkpoint.header import parse_json, shown
from quantkit.checkpoint.regular import open_regular, read_at, refuse_pointer
from quantkit.errors import CheckpointError, in_shell

INDEX = "model.safetensors.index.json"
# Where quantizers put their settings, beside or instead of `quantization_config` in config.json.
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")
# What a result of this program says of itself: of that folder alone, so it does not go along.
RESULT_FILE = "quantkit.json"
NUMBERED = re.compile(r"(model|output)-([0-9]+)-of-([0-9]+)\.safetensors")
MAX_CONFIG_BYTES = 4 * 2**20
MAX_INDEX_BYTES = 16 * 2**20

PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
WEIGHT_ENDINGS = (*PICKLE_ENDINGS, ".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".npz")
# The one sub-folder that belongs to a tokenizer: named chat templates.
TEMPLATE_FOLDER = "additional_chat_templates"

PICKLE_REASON = "pickled weights can run code when they are opened, so quantkit reads safetensors only"
PICKLE_HINT = "use a safetensors version of this model, or `quantkit convert pickle-to-safetensors IN OUT`"


@dataclass(frozen=True, slots=True)
class Weights:
    """The weight files of a folder, and what its index says: tensor name → file. `notes` are for people."""

    files: tuple[Path, ...]
    weight_map: dict[str, Path] | None
    notes: tuple[str, ...]


def find_weights(folder: Path) -> Weights:
    """The weight files by the rules above.

    Raises CheckpointError as `name_weights` does, and when some are missing or are links to nothing (naming all).
    """
    found = name_weights(folder)
    require(found.files, "found in the folder" if found.weight_map is None else f"named in `{folder / INDEX}`")
    return found


def name_weights(folder: Path) -> Weights:
    """The same, whether these files are there or not.

    Raises CheckpointError when there are none (saying what is there instead), when they are too few by their own names,
    or when an index cannot be used.
    """
    present = {path.name for path in folder.iterdir() if path.name.endswith(".safetensors")}
    usual = _usual_names(present)
    notes: tuple[str, ...] = ()
    if os.path.lexists(folder / INDEX):
        weight_map = _read_weight_map(folder)
        files = sorted(set(weight_map.values()))
        if any(os.path.lexists(file) for file in files) or not usual:
            return Weights(tuple(files), weight_map, notes)
        # ExLlamaV2 copies the index of the model that it read beside the weights that it wrote.
        notes = (f"`{INDEX}` names no file of this folder and is left aside",)
    files = [folder / name for name in usual or sorted(present)]
    if not files:
        raise _no_weights(folder)
    _check_complete(folder, usual)
    return Weights(tuple(files), None, notes)


def require(files: Iterable[Path], how: str) -> None:
    """Raises CheckpointError when any of these files is missing; where links lead to nothing, it names all of them."""
    missing = [file for file in files if not file.exists()]
    if not missing:
        return
    links = dangling(missing[0].parent)
    if links:
        raise CheckpointError(
            f"dangling links in the model folder: {', '.join(links)}",
            hint="the files they point to are gone: download the model again",
        )
    names = ", ".join(f"`{file}`" for file in missing)
    raise CheckpointError(f"missing: {names}, {how}", hint="fetch the missing files, or the whole model, again")


def dangling(folder: Path) -> list[str]:
    """The links of a folder that lead to nothing, in words: `` `A` → `B` ``."""
    links = (path for path in sorted(folder.iterdir()) if path.is_symlink() and not path.exists())
    return [f"`{path}` → `{path.readlink()}`" for path in links]


def read_json(path: Path, most_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError when it is missing, too large, no JSON or no object."""
    with open_regular(path) as (descriptor, status):
        if status.st_size > most_bytes:
            raise CheckpointError(
                f"`{path}` holds {status.st_size} bytes; at most {most_bytes} are read", hint="fetch it again"
            )
        raw = read_at(descriptor, status.st_size, 0)
    refuse_pointer(path, raw)
    try:
        return parse_json(raw)
    except ValueError as error:
        hint = "correct it, or fetch it again"
        raise CheckpointError(f"`{path}` is not a valid JSON object: {error}", hint=hint) from None


def readable(folder: Path) -> list[Path]:
    """All that is read or copied where a folder is taken as a model: safetensors and what describes them, templates in
    their own folder too. Sorted; links to nothing are not among them."""
    other = tuple(ending for ending in WEIGHT_ENDINGS if ending != ".safetensors")
    inner = folder / TEMPLATE_FOLDER
    found = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    templates = [path for path in inner.iterdir() if path.is_file()] if inner.is_dir() else []
    return sorted([path for path in found if not path.name.lower().endswith(other)] + templates)


def side_files(folder: Path) -> list[Path]:
    """What belongs to a model beside weights, config and quantization settings: tokenizer, chat template, generation
    config, licence, model card, custom code. Sorted; links to nothing are not among them, see `dangling`."""
    found = [path for path in folder.iterdir() if path.is_file() and is_side_file(path.name)]
    if (folder / TEMPLATE_FOLDER).is_dir():
        found.append(folder / TEMPLATE_FOLDER)
    return sorted(found)


def is_side_file(name: str) -> bool:
    """Whether a file of this name goes along when a model is written anew: neither weights nor what describes them."""
    rewritten = name in ("config.json", RESULT_FILE, *QUANTIZATION_FILES) or name.endswith(".index.json")
    return not (rewritten or name.startswith(".") or name.lower().endswith(WEIGHT_ENDINGS))


def is_pickle(name: str) -> bool:
    """Whether a file of this name holds pickled weights, or is the index of some."""
    return name.lower().endswith((*PICKLE_ENDINGS, ".bin.index.json"))


def _read_weight_map(folder: Path) -> dict[str, Path]:
    said = read_index(folder)
    places = {file: shard_place(folder, file) for file in set(said.values())}
    return {tensor: places[file] for tensor, file in said.items()}


def read_index(folder: Path) -> dict[str, str]:
    """Tensor → file, as the index has it. Raises CheckpointError where it names none."""
    path = folder / INDEX
    require([path], "found in the folder")
    said = read_json(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(said, dict) or not all(isinstance(file, str) for file in said.values()):
        raise CheckpointError(f"`{path}` has no `weight_map` from tensor names to files", hint="fetch it again")
    if not said:
        raise CheckpointError(f"`{path}` names no tensors", hint="fetch it again")
    return said


def shard_place(folder: Path, name: str) -> Path:
    """The file an index names, which must lie in the folder: no way up, no root, no linked folder that leads out."""
    parts = PurePosixPath(name).parts
    leaves = not parts or name.startswith("/") or ".." in parts or "\0" in name or "\\" in name
    if not leaves and len(parts) > 1:
        leaves = not (folder / name).parent.resolve().is_relative_to(folder.resolve())
    if leaves:
        raise CheckpointError(
            f"`{folder / INDEX}` names the shard {shown(name)}, which leaves its folder",
            hint="do not use this model: its index was tampered with, or made by a faulty tool",
        )
    if not name.endswith(".safetensors"):
        raise CheckpointError(
            f"`{folder / INDEX}` names {shown(name)}, which is no safetensors file", hint="fetch the index again"
        )
    return folder / name


def _usual_names(present: set[str]) -> list[str]:
    """The files of rules 2 and 3."""
    for stem in ("model", "output"):
        if f"{stem}.safetensors" in present:
            return [f"{stem}.safetensors"]
        if numbered := sorted(name for name in present if (found := NUMBERED.fullmatch(name)) and found[1] == stem):
            return numbered
    return []


def _check_complete(folder: Path, names: list[str]) -> None:
    """Shards without an index: their own names say how many there must be."""
    numbered = [match for name in names if (match := NUMBERED.fullmatch(name))]
    if not numbered:
        return
    if len({match[3] for match in numbered}) > 1:
        raise CheckpointError(
            f"`{folder}` holds shards of different sets: {', '.join(f'`{name}`' for name in names)}",
            hint="remove those that do not belong to this model",
        )
    stem, count, have = numbered[0][1], int(numbered[0][3]), {int(match[2]) for match in numbered}
    absent = next((number for number in range(1, count + 1) if number not in have), None)
    if absent is not None:
        missing = f"{stem}-{absent:05d}-of-{count:05d}.safetensors"
        raise CheckpointError(
            f"`{folder}` has {len(have)} of {count} shards: `{missing}` is missing",
            hint="fetch the missing shards, or the whole model, again",
        )


def _no_weights(folder: Path) -> CheckpointError:
    """Nothing to read: say what is there instead, since that is what the person took for a model."""
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        if is_pickle(name):
            return CheckpointError(f"`{folder}` has only pickled weights (`{name}`): {PICKLE_REASON}", hint=PICKLE_HINT)
        if name.lower().endswith(".gguf"):
            return CheckpointError(
                f"`{folder}` has only GGUF weights (`{name}`)",
                hint=f"convert them first: `quantkit convert gguf-to-hf {in_shell(folder / name)} OUT`",
            )
    inner = [path.parent for pattern in ("*/config.json", "snapshots/*/config.json") for path in folder.glob(pattern)]
    hint = f"did you mean `{inner[0]}`?" if inner else "give the folder that config.json and the weights are in"
    return CheckpointError(f"`{folder}` holds no safetensors files", hint=hint)
