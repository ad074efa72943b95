"""Faults in the values of a model's tensors: numbers that are none, groups that are not there, zero points amiss."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.spelling import spellings
from quantkit.commands.inspection.model import gptq_settings
from quantkit.errors import CheckpointError, FormatError, QuantkitError
from quantkit.formats import exl2, gptq
from quantkit.formats.gptq_config import GptqSettings
from quantkit.formats.gptq_zeros import read_zeros
from quantkit.inventory import head_spec
from quantkit.models.architecture import LinearSpec
from quantkit.models.source import read_linear
from quantkit.progress import Progress

SCANNED_VALUES = 1 << 24


@dataclass(slots=True)
class Findings:
    """What is wrong, what is worth knowing, and least and greatest zero point of each GPTQ module."""

    faults: list[QuantkitError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    zero_points: dict[str, tuple[int, int]] = field(default_factory=dict)


def value_findings(checkpoint: Checkpoint, spoilt: set[str], progress: Progress) -> Findings:
    """Reads every tensor: NaN and infinity, groups out of range, zero points under the wrong name, zero scales.

    spoilt  modules that a fault was told of already: they are not decoded
    """
    found = Findings()
    specs = [*checkpoint.architecture.linears(checkpoint.model_config), head_spec(checkpoint.model_config)]
    names = checkpoint.names()
    with progress.task("check tensors", total=len(names) + len(specs)) as task:
        for name in names:
            if not _is_finite(checkpoint, name):
                spoilt = spoilt | {name.rpartition(".")[0]}
                kind = FormatError if name.endswith(("scales", "q_scale_max")) else CheckpointError
                where = checkpoint.homes[name].path
                found.faults.append(
                    kind(
                        f"`{name}` in `{where}` holds NaN or infinity",
                        hint="fetch this file again; if it stays, the model itself is damaged",
                    )
                )
            task.advance(note=name)
        for spec in specs:
            modules = next((m for m in spellings(spec.name) if all(checkpoint.suffixes(one) for one in m)), ())
            if modules and not spoilt & set(modules):
                _look_into(checkpoint, spec, modules, found)
            task.advance(note=spec.name)
    return found


def _is_finite(checkpoint: Checkpoint, name: str) -> bool:
    try:
        tensor = checkpoint.tensor(name)
    except QuantkitError:  # of a dtype that is told elsewhere
        return True
    parts = tensor.flatten().split(SCANNED_VALUES) if tensor.is_floating_point() and tensor.numel() else ()
    return all(bool(torch.isfinite(end)) for part in parts for end in torch.aminmax(part.to(torch.float32)))


def _look_into(checkpoint: Checkpoint, spec: LinearSpec, modules: tuple[str, ...], found: Findings) -> None:
    if not any(exl2.recognise(checkpoint.suffixes(one)) or gptq.recognise(checkpoint.suffixes(one)) for one in modules):
        return
    try:
        read_linear(checkpoint, spec, torch.float32, "cpu")
    except QuantkitError as error:
        found.faults.append(error)
        return
    for module in modules:
        if not gptq.recognise(checkpoint.suffixes(module)):
            continue
        scales = checkpoint.tensor(f"{module}.scales")
        if zeros := int((scales == 0).sum()):
            found.notes.append(f"`{module}.scales`: {zeros} of {scales.numel()} are zero, their weights load as zeros")
        settings = gptq_settings(checkpoint, module)
        if settings is not None:
            _note_zero_points(module, read_zeros(checkpoint.tensor(f"{module}.qzeros"), settings), settings, found)


def _note_zero_points(module: str, zeros: Tensor, settings: GptqSettings, found: Findings) -> None:
    least, greatest = int(zeros.min()), int(zeros.max())
    found.zero_points[module] = least, greatest
    middle = 1 << settings.bits - 1
    if settings.sym and (least, greatest) != (middle, middle):
        found.notes.append(
            f"`{module}.qzeros`: zero points {least} to {greatest} though `sym` is true, which readers take in two ways"
        )
