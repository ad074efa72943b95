"""Measurement: what each layout of each linear would cost in bits and do in damage, for one model and one text.

A file of plain JSON: `linears` has one object for each linear, `candidates` in it one for each layout that was solved.
Damage is in nats of KL divergence from the original's predictions, per token, unless `unit` says otherwise, and adds up
over linears. The file knows the fingerprint of its model, so that it is never used for another.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.durable import sync_folder, write_file
from quantkit.errors import PlanError, in_shell
from quantkit.models.architecture import block_of

KIND, VERSION = "quantkit measurement", 1
NATS = "nats of KL divergence per token"
MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout of one linear.

    mix     of widths, as `formats.exl2_mix` spells it
    bits    all bits on disk, side data and bias included
    error   Hessian-weighted squared error relative to the weighted square of the weight
    damage  in the unit of the measurement
    """

    mix: str
    bits: int
    error: float
    damage: float


@dataclass(frozen=True, slots=True)
class MeasuredLinear:
    """One linear. One that the format cannot hold has no candidates, but a reason, and bits as it is stored now."""

    name: str
    in_features: int
    out_features: int
    candidates: tuple[Candidate, ...]
    dense_bits: int = 0
    dense_because: str | None = None

    @property
    def weights(self) -> int:
        return self.in_features * self.out_features


@dataclass(frozen=True, slots=True)
class Check:
    """One block with all its linears quantized and nothing else: the damage that the measurement predicts, and the mean
    KL divergence that was seen when the model ran so, with teacher forcing, over some tokens of the text."""

    block: int
    bits_per_weight: float
    predicted: float
    seen: float
    tokens: int

    @property
    def ratio(self) -> float:
        """Predicted to seen."""
        return self.predicted / self.seen if self.seen > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Measurement:
    """All linears of the blocks in the order of the model, and what they were measured with.

    checks    of the prediction, where it was checked
    together  linears that were measured together: the n-th candidates of all of them are one choice, and only the sum
              of their damages has been measured
    unit      of damages
    """

    model: str
    head_inputs: int
    head_weights: int
    calibration: Mapping[str, Any]
    linears: tuple[MeasuredLinear, ...]
    checks: tuple[Check, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    unit: str = NATS

    @property
    def weights(self) -> int:
        """Of all linears of the blocks, dense ones included: what bits per weight are counted over."""
        return sum(linear.weights for linear in self.linears)

    @property
    def dense(self) -> tuple[MeasuredLinear, ...]:
        """Linears that the format cannot hold."""
        return tuple(linear for linear in self.linears if not linear.candidates)

    @property
    def choices(self) -> list[tuple[MeasuredLinear, ...]]:
        """What is to be chosen for: single linears, and those that were measured together. Dense ones are left out."""
        partners = {names[0]: names for names in self.together}
        followers = {name for names in self.together for name in names[1:]}
        by_name = {linear.name: linear for linear in self.linears}
        return [
            tuple(by_name[name] for name in partners.get(linear.name, (linear.name,)))
            for linear in self.linears
            if linear.candidates and linear.name not in followers
        ]

    def choices_by_block(self) -> dict[int, list[tuple[MeasuredLinear, ...]]]:
        """Block → what is to be chosen for in it."""
        blocks: dict[int, list[tuple[MeasuredLinear, ...]]] = {}
        for choice in self.choices:
            blocks.setdefault(block_of(choice[0].name), []).append(choice)
        return blocks

    def require(self, fingerprint: str, model: str) -> None:
        """PlanError unless this was measured on the model of that fingerprint."""
        if fingerprint != self.model:
            raise PlanError(
                f"the measurement is of another model than `{model}`: fingerprint {self.model[:12]}, "
                f"expected {fingerprint[:12]}",
                hint=f"measure this one: `quantkit measure {model} -o measurement.json`",
            )

    def as_json(self) -> dict[str, Any]:
        return {"kind": KIND, "version": VERSION, **asdict(self)}

    def save(self, path: Path) -> None:
        """Written whole or not at all. Raises PlanError when it cannot be."""
        save_json(path, self.as_json())

    @classmethod
    def load(cls, path: Path) -> "Measurement":
        """Raises PlanError, naming file and key, for anything that is no measurement."""
        value = load_json(path, KIND, VERSION, "quantkit measure MODEL -o measurement.json")
        try:
            linears = tuple(_linear(entry) for entry in value["linears"])
            head = int(value["head_inputs"]), int(value["head_weights"])
            checks = tuple(Check(**check) for check in value.get("checks", ()))
            together = tuple(tuple(names) for names in value.get("together", ()))
            _require_alike(linears, together)
            unit = str(value.get("unit", NATS))
            measurement = cls(str(value["model"]), *head, dict(value["calibration"]), linears, checks, together, unit)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"`{path}` is a damaged measurement: {_reason(error)}", hint="measure again") from error
        if not linears:
            raise PlanError(f"`{path}` measures no linear", hint="measure again")
        return measurement


def damage_near(choices: Sequence[tuple[MeasuredLinear, ...]], bits: float) -> float:
    """The damage of linears together, each choice in the option nearest to so many bits per weight."""
    total = 0.0
    for choice in choices:
        weights = sum(linear.weights for linear in choice)
        total += min(
            (abs(sum(each.bits for each in alike) / weights - bits), sum(each.damage for each in alike))
            for alike in zip(*(linear.candidates for linear in choice), strict=True)
        )[1]
    return total


def require_place(path: Path) -> None:
    """PlanError unless a file of that name can be written, asked before the hours that fill it."""
    hint = "choose another place with `-o`"
    if path.is_dir() or not path.name:
        raise PlanError(f"`{path}` is a folder, not the name of a file", hint=hint)
    part = path.with_name(f".{path.name}.part")
    try:
        part.touch()
        part.unlink()
    except OSError as error:
        raise PlanError(f"`{path}` cannot be written: {error.strerror}", hint=hint) from error


def save_json(path: Path, value: Mapping[str, Any]) -> None:
    """Through a temporary file beside it: on the disk when this returns. Raises PlanError when it cannot be written."""
    part = path.with_name(f".{path.name}.part")
    try:
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        part.unlink(missing_ok=True)
        write_file(part, text.encode())
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        hint = "choose another place with `-o`"
        raise PlanError(f"`{path}` cannot be written: {error.strerror}", hint=hint) from error


def load_json(path: Path, kind: str, version: int, command: str) -> dict[str, Any]:
    """An object of that kind and version; `command` makes one. Raises PlanError for anything else."""
    hint = f"make one: `{command}`"
    try:
        if path.stat().st_size > MOST_BYTES:
            raise PlanError(f"`{path}` is too large for a {kind}", hint=hint)
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_each_key_once)
    except OSError as error:
        raise PlanError(f"`{path}` cannot be read: {error.strerror}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"`{path}` is not JSON: {error}", hint=hint) from error
    if isinstance(value, dict) and "last_module_idx" in value:
        raise PlanError(
            f"`{path}` is a measurement of ExLlamaV2, no {kind}",
            hint=f"import it: `quantkit measurement import {in_shell(path)} MODEL -o measurement.json`",
        )
    if not isinstance(value, dict) or value.get("kind") != kind:
        raise PlanError(f"`{path}` is no {kind}", hint=hint)
    if value.get("version") != version:
        found = value.get("version")
        raise PlanError(f"`{path}`: expected version {version} of a {kind}, found {found}", hint=hint)
    return value


def _require_alike(linears: tuple[MeasuredLinear, ...], together: tuple[tuple[str, ...], ...]) -> None:
    """ValueError unless linears that belong together exist, have equally many candidates and no other partners."""
    counts = {linear.name: len(linear.candidates) for linear in linears}
    named = [name for names in together for name in names]
    for names in together:
        if len({counts.get(name, 0) for name in names}) != 1 or not counts.get(names[0]):
            raise ValueError(f"`{names[0]}` is measured together with linears that have other candidates")
    if len(set(named)) < len(named):
        raise ValueError("`together` has a linear twice")


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An edit that names a linear twice must not be half forgotten."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has `{next(key for key in keys if keys.count(key) > 1)}` twice in one object")
    return value


def _linear(entry: Any) -> MeasuredLinear:
    candidates = tuple(
        Candidate(str(each["mix"]), int(each["bits"]), float(each["error"]), float(each["damage"]))
        for each in entry["candidates"]
    )
    for candidate in candidates:
        if not (math.isfinite(candidate.damage) and candidate.damage >= 0 and candidate.bits > 0):
            found = f"{candidate.bits} bits and damage {candidate.damage}"
            raise ValueError(f"`{entry['name']}` has a candidate of {found}")
    because = entry["dense_because"]
    if not candidates and because is None:
        raise ValueError(f"`{entry['name']}` has neither candidates nor a reason to stay dense")
    return MeasuredLinear(
        str(entry["name"]),
        int(entry["in_features"]),
        int(entry["out_features"]),
        candidates,
        int(entry["dense_bits"]),
        None if because is None else str(because),
    )


def _reason(error: Exception) -> str:
    return f"no key {error}" if isinstance(error, KeyError) else str(error)
