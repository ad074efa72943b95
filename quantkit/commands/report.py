"""`quantkit eval report`: a reference and its quantizations, measured alike → a page, a JSON file, a model card each.

report/index.html          one page that needs nothing else
report/report.json         every figure of it
report/NAME.md             a model card to publish with a candidate
"""

import json
import os
import platform
import shlex
from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.durable import write_file
from quantkit.checkpoint.fingerprint import fingerprint
from quantkit.checkpoint.folder import RESULT_FILE, read_json
from quantkit.checkpoint.output_folder import OutputFolder
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.commands import evaluate
from quantkit.commands.evaluation import degeneration
from quantkit.commands.evaluation.card import card
from quantkit.commands.evaluation.compare_report import CompareReport
from quantkit.commands.evaluation.degeneration import DegenerationReport
from quantkit.commands.evaluation.kept_models import KeptModels
from quantkit.commands.evaluation.page import page
from quantkit.commands.evaluation.text import ReadText
from quantkit.commands.quantization.redo_result import CALIBRATED
from quantkit.commands.quantization.resumption import redone
from quantkit.errors import CheckpointError, UsageError
from quantkit.evaluators.depth import depth_errors
from quantkit.inventory import take
from quantkit.measurement import Measurement
from quantkit.models.architecture import block_of
from quantkit.plan import kind_of
from quantkit.progress import Progress
from quantkit.runtime.placement import Placement
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import CompareSettings, DegenerationSettings, QuantizeSettings, ReportSettings
from quantkit.version import VERSION

FILES = ("plan", "measurement")
"""Settings of `quantkit quantize` that are files, of which a record has the digest."""
NO_OPTION = ("model", "out", "device", "dtype", "free_group_size", "free_widths", "free_alone", "evaluate")
"""Settings that are said otherwise, or that change no byte."""
NO = {"sym": "--asym"}
"""How an option is put off, where `--no-` before its name does not do it."""
DEPTH_WINDOW = 512
"""Tokens over which the error by depth is seen."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model is, from its files.

    label            its folder's name, by which the page calls it
    bits_per_weight  of the linears of the blocks, side data included
    bits             of each linear, by block and kind
    fingerprint      SHA-256 over all tensors
    made_with        settings that its own record has, as `quantkit quantize` wrote them, and under `redone` what was
                     solved anew since; empty where there is none
    """

    path: str
    label: str
    format: str
    bits_per_weight: float
    size_bytes: int
    bits: Mapping[str, Sequence[float | None]]
    fingerprint: str
    made_with: Mapping[str, Any]

    @property
    def command(self) -> str | None:
        """What makes it again, as far as its record tells."""
        if self.made_with.get("command") != "quantize":
            return None
        plain = QuantizeSettings("MODEL", Path("OUT"))
        words, files = ["quantkit", "quantize", "MODEL", "-o", self.label], []
        for setting in fields(QuantizeSettings):
            value = self.made_with.get(setting.name)
            usual = getattr(plain, setting.name)
            if setting.name in NO_OPTION or value in (None, usual):
                continue
            if setting.name in FILES:
                files.append(f"the {setting.name} of sha256 {value}")
                continue
            option = "--" + setting.name.replace("_", "-")
            if isinstance(usual, tuple):
                words += [word for one in _texts(value) for word in (option, one)]
            elif isinstance(value, bool):
                words += [option if value else NO.get(setting.name, f"--no-{option[2:]}")]
            else:
                words += [option, str(value)]
        lines = [shlex.join(words), *map(self._redo, redone(self.made_with))]
        return " && ".join(lines) + (f"  # with {' and '.join(files)}" if files else "")

    def _redo(self, entry: Mapping[str, Any]) -> str:
        """What redoes a part, with the options that are not those of the whole."""
        facts = entry["facts"]
        words = ["quantkit", "quantize", "MODEL", "-o", self.label, "--redo", str(facts.get("redo"))]
        for name in CALIBRATED:
            if (value := facts.get(name)) != self.made_with.get(name) and not (isinstance(value, bool) and not value):
                words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return shlex.join([*words, "--no-eval"])  # it was kept, be it for what was measured or unmeasured

    def as_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "label": self.label,
            "format": self.format,
            "bits_per_weight": self.bits_per_weight,
            "size_bytes": self.size_bytes,
            "fingerprint": self.fingerprint,
            "bits": {kind: list(row) for kind, row in self.bits.items()},
            "made_with": dict(self.made_with),
            "command": self.command,
        }


@dataclass(frozen=True, slots=True)
class Judged:
    """One candidate with all that was found."""

    facts: ModelFacts
    compared: CompareReport
    depth: tuple[float, ...]
    probed: DegenerationReport | None


@dataclass(frozen=True, slots=True)
class Report:
    """All that the page shows. `sensitivity`: damage near four bits by kind and block, where it was measured."""

    reference: ModelFacts
    candidates: tuple[Judged, ...]
    sensitivity: Mapping[str, Sequence[float | None]] | None
    sensitivity_unit: str
    command: str
    versions: Mapping[str, str]
    out: Path

    def rows(self) -> list[list[str]]:
        """A row for each candidate."""
        return [
            [
                one.facts.label,
                f"{one.facts.bits_per_weight:.3f}",
                f"{one.compared.divergence.candidate.perplexity:.4f}",
                f"{one.compared.divergence.kl_mean:.5f}",
                f"{one.compared.divergence.top1_agreement:.1%}",
                "" if one.probed is None else one.probed.verdict,
            ]
            for one in self.candidates
        ]

    COLUMNS = ("candidate", "bits per weight", "perplexity", "mean KL", "same likeliest", "probe")

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "quantkit report",
            "version": 1,
            "reference": self.reference.as_json(),
            "candidates": [
                {
                    **one.facts.as_json(),
                    "compared": one.compared.as_json(),
                    "depth": list(one.depth),
                    "probe": None if one.probed is None else one.probed.as_json(),
                }
                for one in self.candidates
            ],
            "sensitivity": None
            if self.sensitivity is None
            else {"unit": self.sensitivity_unit, "damage": {kind: list(row) for kind, row in self.sensitivity.items()}},
            "command": self.command,
            "versions": dict(self.versions),
        }


def run(settings: ReportSettings, progress: Progress) -> Report:
    """Measure, and write the folder. Raises what `eval compare` and `eval degeneration` do, and CheckpointError for a
    folder that cannot be written."""
    if not settings.candidates:
        raise UsageError("no candidate to report on", hint="quantkit eval report REFERENCE CANDIDATE -o report")
    checkpoints = [open_checkpoint(name) for name in (settings.reference, *settings.candidates)]
    read = [checkpoint.path for checkpoint in checkpoints]
    folder = OutputFolder(settings.out, sources=read, overwrite=settings.overwrite)
    measurement = None
    if settings.measurement is not None:
        measurement = Measurement.load(settings.measurement)
        measurement.require(fingerprint(checkpoints[0]), settings.reference)
    labels = _labels([settings.reference, *settings.candidates])
    facts = [
        _facts(*each) for each in zip(checkpoints, (settings.reference, *settings.candidates), labels, strict=True)
    ]
    models = KeptModels(read[0])
    judged = tuple(
        _judge(name, own, checkpoints[0], checkpoint, settings, models, progress)
        for name, own, checkpoint in zip(settings.candidates, facts[1:], checkpoints[1:], strict=True)
    )
    report = Report(
        reference=facts[0],
        candidates=judged,
        sensitivity=None if measurement is None else sensitivity_of(measurement),
        sensitivity_unit="" if measurement is None else measurement.unit,
        command=_command(settings),
        versions={"quantkit": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        out=folder.path,
    )
    write(report, folder)
    return report


def write(report: Report, folder: OutputFolder) -> None:
    """The folder appears whole or not at all."""
    try:
        folder.claim()
        texts = {
            "index.html": page(report.as_json()),
            "report.json": json.dumps(report.as_json(), ensure_ascii=False, allow_nan=False, indent=1) + "\n",
        }
        for one in report.as_json()["candidates"]:
            texts[f"{one['label']}.md"] = card(report.as_json(), one)
        for name, text in texts.items():
            write_file(folder.working / name, text.encode())
        folder.put_in_place()
    except OSError as error:
        raise CheckpointError(
            f"`{folder.path}` cannot be written: {error.strerror}", hint="choose another folder with `-o`"
        ) from error
    finally:
        folder.abandon()


def _judge(
    name: str,
    facts: ModelFacts,
    reference: Checkpoint,
    checkpoint: Checkpoint,
    settings: ReportSettings,
    models: KeptModels,
    progress: Progress,
) -> Judged:
    compared = evaluate.compare(
        CompareSettings(settings.reference, name, settings.text, settings.device, settings.dtype), progress, models.load
    )
    assert isinstance(compared, CompareReport)
    probed = None
    if settings.probe:
        probed = degeneration.run(
            DegenerationSettings(name, settings.reference, quick=True, device=settings.device, dtype=settings.dtype),
            progress,
            models.load,
        )
    return Judged(facts, compared, tuple(_depth(reference, checkpoint, settings, models)), probed)


def _depth(
    reference: Checkpoint, candidate: Checkpoint, settings: ReportSettings, models: KeptModels
) -> list[float]:
    placement = Placement.choose(settings.device, settings.dtype)
    tokenizer = Tokenizer.open(reference.path)
    text = ReadText.read(settings.text, tokenizer, reference.model_config.context)
    original, other = (models.load(each, placement.device, placement.dtype) for each in (reference, candidate))
    return depth_errors(original, other, text.windows[:1, :DEPTH_WINDOW])


def _facts(checkpoint: Checkpoint, name: str, label: str) -> ModelFacts:
    inventory = take(checkpoint)
    layers = inventory.config.num_layers
    bits: dict[str, list[float | None]] = {}
    sums: dict[tuple[str, int], tuple[int, int]] = {}
    for linear in inventory.linears:
        place = kind_of(linear.name), block_of(linear.name)
        stored, weights = sums.get(place, (0, 0))
        sums[place] = stored + linear.stored_bits, weights + linear.in_features * linear.out_features
    for (kind, block), (stored, weights) in sums.items():
        bits.setdefault(kind, [None] * layers)[block] = stored / weights
    whole = [sum(each) for each in zip(*sums.values(), strict=True)]
    files = {header.path for header in checkpoint.homes.values()}
    return ModelFacts(
        path=name,
        label=label,
        format=inventory.method or "unquantized",
        bits_per_weight=whole[0] / whole[1],
        size_bytes=sum(Path(file).stat().st_size for file in files),
        bits=bits,
        fingerprint=fingerprint(checkpoint),
        made_with=_made_with(checkpoint.path),
    )


def _texts(value: Any) -> list[str]:
    """Those of an option that may be repeated: a record has its tuple in Python's words."""
    try:
        found = literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return []
    return [str(one) for one in found] if isinstance(found, tuple | list) else []


def _made_with(folder: Path) -> dict[str, Any]:
    """The facts in a folder's record, and what was redone since; empty where there is none that can be read."""
    try:
        made = read_json(folder / RESULT_FILE)
    except CheckpointError:
        return {}
    facts, since = made.get("facts"), redone(made)
    return {**facts, **({"redone": since} if since else {})} if isinstance(facts, dict) else {}


def sensitivity_of(measurement: Measurement) -> dict[str, list[float | None]]:
    """Damage of each linear in its layout nearest to four bits, by kind and block; experts of a block together."""
    layers = 1 + max(block_of(linear.name) for linear in measurement.linears)
    damage: dict[str, list[float | None]] = {}
    for linear in measurement.linears:
        if not linear.candidates:
            continue
        near = min(linear.candidates, key=lambda one: abs(one.bits / linear.weights - 4))
        row = damage.setdefault(kind_of(linear.name), [None] * layers)
        row[block_of(linear.name)] = (row[block_of(linear.name)] or 0.0) + near.damage
    return damage


def _labels(names: Sequence[str]) -> list[str]:
    """The last part of each path, made different where two are alike."""
    labels: list[str] = []
    for name in names:
        label = Path(os.path.realpath(name)).name if Path(name).exists() else name.rsplit("/", 1)[-1]
        free = (f"{label} {number}" if number > 1 else label for number in count(1))
        labels.append(next(one for one in free if one not in labels))
    return labels


def _command(settings: ReportSettings) -> str:
    words = ["quantkit", "eval", "report", settings.reference, *settings.candidates, "-o", str(settings.out)]
    text = settings.text
    for option, value in (
        ("--dataset", text.dataset),
        ("--text", text.text),
        ("--windows", text.windows),
        ("--measurement", settings.measurement),
    ):
        words += [] if value is None else [option, str(value)]
    words += ["--length", str(text.length)] + ["--bos"] * text.bos + ["--probe"] * settings.probe
    return shlex.join(words)
