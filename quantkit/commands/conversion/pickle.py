"""`quantkit convert pickle-to-safetensors`: pickled weights, opened by torch's restricted reader only.

A pickle can run code. `torch.load(weights_only=True)` builds tensors and plain containers and refuses all else; a file
that asks for more is refused here too, and nothing of it is used.
"""

import pickle
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.folder import is_pickle, read_json, readable, require, side_files
from quantkit.checkpoint.links import require_inside
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.checkpoint.receipt import Receipt
from quantkit.checkpoint.regular import open_regular, read_at, refuse_pointer
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.commands.conversion.folder import weight_bytes
from quantkit.commands.conversion.report import ConvertReport, Written
from quantkit.errors import CheckpointError
from quantkit.models.architecture import EMBEDDING, HEAD
from quantkit.progress import Progress
from quantkit.settings import ConvertSettings

INDEX = "pytorch_model.bin.index.json"
USUAL = "pytorch_model*.bin"


def pickle_to_safetensors(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """One file in memory at a time, mapped from the disk where it can be.

    Raises CheckpointError for a folder without config.json or pickled weights, for a file that holds anything but
    tensors, and for a tensor in two files. Then nothing is left behind.
    """
    start = time.monotonic()
    folder = settings.source
    if not folder.is_dir():
        raise CheckpointError(f"`{folder}` is no folder", hint="give the folder that config.json is in")
    require_inside(folder, [*readable(folder), *(path for path in folder.iterdir() if is_pickle(path.name))])
    files = _files(folder)
    require([folder / "config.json"], "which describes the model")
    config = read_json(folder / "config.json")
    receipt, parameters, tensors = Receipt(), 0, 0
    tied: Tensor | None = None
    dropped: list[str] = []
    with (
        CheckpointWriter(settings.out, source=folder, overwrite=settings.overwrite) as writer,
        progress.task(settings.route, total=len(files)) as task,
    ):
        for file in files:
            for name, tensor in _tensors(file):
                if name == f"{EMBEDDING}.weight":
                    tied = tensor
                if name == f"{HEAD}.weight" and config.get("tie_word_embeddings") and _same(tensor, tied):
                    dropped.append(name)  # a second copy of the embedding, as readers of tied models know
                    continue
                writer.add(name, tensor.contiguous())
                receipt.add(name, tensor)
                parameters, tensors = parameters + tensor.numel(), tensors + 1
            task.advance(note=file.name)
        made = writer.finish(
            config, side_files(folder), check=lambda out: receipt.check(open_checkpoint(out), progress)
        )
    return ConvertReport(
        settings,
        way="exact, tensors as they were",
        written=Written(tensors, parameters, weight_bytes(made)),
        seconds=time.monotonic() - start,
        facts={"files_before": len(files)},
        remarks=tuple(f"`{name}` is the embedding once more and was left out" for name in dropped),
    )


def _files(folder: Path) -> list[Path]:
    """Those of the index, else those of the usual name, else the only pickle there is."""
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise CheckpointError(f"`{folder / INDEX}` names no files of this folder", hint="fetch the model again")
        files = sorted(folder / name for name in names)
        require(files, f"named in `{INDEX}`")
        return files
    usual = sorted(folder.glob(USUAL))
    others = [path for path in sorted(folder.iterdir()) if is_pickle(path.name) and path.suffix != ".json"]
    if usual or len(others) == 1:
        return usual or others
    found = ", ".join(f"`{path.name}`" for path in others) or "no file"
    raise CheckpointError(f"`{folder}` has no `{USUAL}`, and {found} instead", hint="leave only weights in the folder")


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    for name, value in _load(file).items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            raise CheckpointError(
                f"`{file}` holds `{name}`, a {kind} and no tensor", hint="this is no file of weights; remove it"
            )
        if value.layout != torch.strided or value.is_quantized:
            raise CheckpointError(f"`{name}` in `{file}` is no plain tensor", hint="use another version of this model")
        yield name, value.detach()


def _load(file: Path) -> dict[str, object]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle protocol: what cannot be read is refused anyway
            try:
                found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # files of old versions of torch cannot be mapped
                found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        with open_regular(file) as (descriptor, _):
            refuse_pointer(file, read_at(descriptor, 64, 0))
        raise CheckpointError(
            f"`{file}` asks for more than tensors, which could run code: refused",
            hint="use a safetensors version of this model",
        ) from error
    except Exception as error:  # whatever a reader of noise may raise: IndexError, AttributeError, RuntimeError, …
        first = str(error).partition("\n")[0]
        raise CheckpointError(f"`{file}` cannot be read: {first}", hint="fetch it again") from error
    inner = found.get("state_dict") if isinstance(found, dict) else None
    found = inner if isinstance(inner, dict) else found
    if not isinstance(found, dict):
        raise CheckpointError(f"`{file}` holds no tensors by name", hint="give the folder of a whole model")
    return found


def _same(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and tensor.shape == other.shape and bool(torch.equal(tensor, other))
