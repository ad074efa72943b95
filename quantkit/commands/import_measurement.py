"""`quantkit measurement import`: what ExLlamaV2 measured of a model → a measurement that `quantkit plan` understands.

ExLlamaV2 measures blocks, not linears: each attention and each MLP as a whole in 17 or 19 options, one setting for each
of its linears, with `accuracy`, 1 less the error of the block's output relative to that output, residual included. An
option is therefore chosen for a block as a whole, and its damage is that error squared: errors of different blocks add
up in squares. It is no KL divergence, and blocks whose residual stream is large look less sensitive than they are.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.fingerprint import fingerprint
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.measuring.report import MeasureReport
from quantkit.errors import CheckpointError, FormatError, PlanError
from quantkit.formats import exl2_layout, exl2_mix
from quantkit.formats.codec import Group, Layout
from quantkit.formats.exl2_layout import Width
from quantkit.measurement import MOST_BYTES, Candidate, MeasuredLinear, Measurement, require_place
from quantkit.models.architecture import HEAD, LinearSpec
from quantkit.progress import Progress
from quantkit.settings import ImportMeasurementSettings

UNIT = "squared error of the block outputs, relative"
REMARKS = (
    "the file names neither its model nor its text; the names of all blocks and the bits of all options fit this model",
    "blocks were measured as a whole: each gets one of the options that ExLlamaV2 tried, mixed in no other way",
    "damage is no KL divergence: it ranks the options of one block, and says less of one block against another",
)
ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
HINT = "use the measurement of this very model, or measure it: `quantkit measure {} -o measurement.json`"


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was imported, and what it cannot say."""

    out: Path
    measurement: Measurement

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of each table for people."""
        remarks = [[remark] for remark in REMARKS]
        return [("to be known of it", ["remark"], remarks), *MeasureReport(self.out, self.measurement).tables()]

    def as_json(self) -> dict[str, Any]:
        return {"out": str(self.out), "remarks": list(REMARKS), **self.measurement.as_json()}


def run(settings: ImportMeasurementSettings, progress: Progress) -> ImportReport:
    """Raises PlanError for a file that is no such measurement, or one of another model."""
    require_place(settings.out)
    checkpoint = open_checkpoint(settings.model)
    if checkpoint.quantization is not None:
        raise CheckpointError(
            f"`{settings.model}` is quantized: a measurement is of the original", hint="name the original model"
        )
    blocks = _read(settings.source)
    specs = [spec for spec in checkpoint.architecture.linears(checkpoint.model_config) if spec.quantizable]
    measured: dict[str, MeasuredLinear] = {}
    for name, options in blocks.items():
        own = {spec.name: spec for spec in specs if spec.name.startswith(f"{name}.")}
        if not own or measured.keys() & own.keys():
            message = f"`{settings.source}` measures `{name}`, which this model has not"
            raise PlanError(message, hint=HINT.format(settings.model))
        measured |= _block(settings, name, options, own)
    for spec in specs:
        if spec.name not in measured:
            raise PlanError(f"`{settings.source}` does not measure `{spec.name}`", hint=HINT.format(settings.model))
    config = checkpoint.model_config
    measurement = Measurement(
        fingerprint(checkpoint),
        config.hidden_size,
        config.hidden_size * config.vocab_size,
        {"source": "ExLlamaV2, on a text that it does not name"},
        tuple(measured[spec.name] for spec in specs),
        together=tuple(tuple(spec.name for spec in specs if spec.name.startswith(f"{name}.")) for name in blocks),
        unit=UNIT,
    )
    measurement.save(settings.out)
    progress.say(f"wrote {settings.out}; `{HEAD}` is never measured, `--head-bits` is chosen with the plan")
    return ImportReport(settings.out, measurement)


def _read(path: Path) -> dict[str, Sequence[Any]]:
    """Block → its options. What is `null` there, norms and the head, has none."""
    hint = "name the `measurement.json` that ExLlamaV2's convert.py wrote"
    try:
        if path.stat().st_size > MOST_BYTES:
            raise PlanError(f"`{path}` is too large for a measurement", hint=hint)
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"`{path}` cannot be read: {error.strerror}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"`{path}` is not JSON: {error}", hint=hint) from error
    found = value.get("measurement") if isinstance(value, dict) else None
    if not isinstance(found, dict) or not any(found.values()):
        raise PlanError(f"`{path}` is no measurement of ExLlamaV2: expected options under `measurement`", hint=hint)
    blocks = {name: options for name, options in found.items() if options is not None}
    for name, options in blocks.items():
        if not isinstance(options, list) or not options:
            raise PlanError(f"`{path}`: `{name}` is no list of options, as parallel decoders have none", hint=hint)
    return blocks


def _block(
    settings: ImportMeasurementSettings, name: str, options: Sequence[Any], specs: Mapping[str, LinearSpec]
) -> dict[str, MeasuredLinear]:
    """The linears of one block, each with a candidate for each option that the format can hold."""
    weights = sum(spec.in_features * spec.out_features for spec in specs.values())
    found: dict[str, list[Candidate]] = {linear: [] for linear in specs}
    for number, option in enumerate(options):
        where = f"option {number} of `{name}` in `{settings.source}`"
        try:
            accuracy = float(option["accuracy"])
            layouts = {linear: _layout(spec, _setting(option, linear)) for linear, spec in specs.items()}
            total = int(option["total_bits"])
        except (KeyError, TypeError, ValueError, FormatError) as fault:
            reason = f"no key {fault}" if isinstance(fault, KeyError) else str(fault)
            raise PlanError(f"{where} cannot be read: {reason}", hint=HINT.format(settings.model)) from fault
        if not 0 <= accuracy <= 1:
            raise PlanError(f"{where}: expected an accuracy from 0 to 1", hint=HINT.format(settings.model))
        bits = {
            linear: exl2_layout.stored_bits(layouts[linear], spec.out_features, spec.bias)
            for linear, spec in specs.items()
        }
        if sum(bits.values()) != total:
            message = f"{where} is of another model: it takes {total} bits there and {sum(bits.values())} here"
            raise PlanError(message, hint=HINT.format(settings.model))
        if any(exl2_layout.refusal(layout) for layout in layouts.values()):
            continue
        for linear, spec in specs.items():
            share = spec.in_features * spec.out_features / weights
            error = (1 - accuracy) ** 2
            found[linear].append(Candidate(_mix(layouts[linear]), bits[linear], error, error * share))
    if not all(found.values()):
        raise PlanError(f"no option of `{name}` can be held by EXL2's readers", hint=HINT.format(settings.model))
    return {
        linear: MeasuredLinear(linear, spec.in_features, spec.out_features, tuple(found[linear]))
        for linear, spec in specs.items()
    }


def _setting(option: Mapping[str, Any], linear: str) -> Mapping[str, Any]:
    """What one option has for a linear; experts share a setting, and are called by other names there."""
    last = linear.rpartition(".")[2]
    own = next((key for key in (last, *ROLES) if key in option and ROLES.get(key, key) == ROLES.get(last, last)), last)
    return option[own]


def _layout(spec: LinearSpec, setting: Mapping[str, Any]) -> Layout:
    """The groups that ExLlamaV2 makes of shares: whole ones of each width, rounded up, the last of all cut.

    Raises ValueError for shares that leave rows over.
    """
    rows = left = spec.in_features
    groups: list[Group] = []
    for bits, share in zip(setting["bits"], setting["bits_prop"], strict=True):
        size = int(setting["group_size"][str(bits)])
        for _ in range(math.ceil(min(rows * float(share), left) / size)):
            groups.append(Group(int(bits), min(size, left)))
            left -= groups[-1].rows
    if left:
        raise ValueError(f"the shares of `{spec.name}` leave {left} of {rows} rows over")
    return Layout(tuple(groups))


def _mix(layout: Layout) -> str:
    """The mix of which `exl2_layout.mixed` makes these groups."""
    widths = []
    for bits in dict.fromkeys(group.bits for group in layout.groups):
        own = [group.rows for group in layout.groups if group.bits == bits]
        widths.append(Width(bits, max(32, own[0]), sum(own) / layout.rows))
    return exl2_mix.spell(widths)
