"""A finished result that is to be redone in part: its record, the settings that it keeps, what is refused before work.

What decides the form of the folder (format, widths, groups, rules, rotation, …) is as the result was made; what it is
calibrated with is so too, unless something else is asked for.
"""

import json
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from quantkit.checkpoint.folder import INDEX, QUANTIZATION_FILES, RESULT_FILE
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.checkpoint.receipt import Receipt
from quantkit.commands.quantization.effort import EFFORTS
from quantkit.commands.quantization.exl2 import EXL2_OPTIONS, GPTQ_OPTIONS
from quantkit.commands.quantization.job import Subject, stored_bits
from quantkit.commands.quantization.resumption import CHANGED, as_fact, read_result, receipt_of
from quantkit.commands.quantization.rules import Rule, require_used
from quantkit.errors import CheckpointError, UsageError, in_shell
from quantkit.job.job import Facts
from quantkit.models.architecture import HEAD
from quantkit.plan import Plan
from quantkit.progress import Progress
from quantkit.settings import QuantizeSettings

FORM = ("format", *GPTQ_OPTIONS, *EXL2_OPTIONS, "rotate")
FILES = ("measurement", "plan")
"""Of these a record has a digest."""
TEXT = ("calibration", "samples", "length", "route_all", "hessian_dtype")
CALIBRATED = ("effort", "seed", *TEXT)
WHOLE = "quantize as a whole into another folder, with `-o`"


@dataclass(frozen=True, slots=True, eq=False)
class PreviousResult:
    """A folder that `quantkit quantize` has made. `made` is its record, `facts` are those of the whole, which no redo
    changes."""

    made: Mapping[str, Any]
    checkpoint: Checkpoint

    @classmethod
    def open(cls, out: Path) -> Self:
        """Reads no tensor yet. Raises CheckpointError for a folder that is missing, was made by something else, or has
        files that a new one would not have."""
        if not out.is_dir() or not any(out.iterdir()):
            raise CheckpointError(f"`{out}` is not there: nothing to redo", hint="quantize first, without `--redo`")
        made = read_result(out)
        if made is None or made["facts"].get("command") != "quantize" or "conversion" in made:
            by = "a conversion" if made is not None else "something else"
            raise CheckpointError(f"`{out}` was made by {by}, not by `quantkit quantize`", hint=WHOLE)
        if not isinstance(made.get("tensors"), str) or type(made.get("bits_per_weight")) not in (int, float):
            raise CheckpointError(f"`{out / RESULT_FILE}` has no digest of the tensors, or no bits", hint=WHOLE)
        checkpoint = open_checkpoint(out)
        _require_no_other_files(checkpoint)
        return cls(made, checkpoint)

    @property
    def facts(self) -> Facts:
        found: Facts = self.made["facts"]
        return found

    @property
    def digest(self) -> str:
        """Of all that the record says, the digest of the tensors included."""
        return sha256(json.dumps(self.made, sort_keys=True).encode()).hexdigest()

    @property
    def rotation_seed(self) -> int:
        """Known to be a number once the settings are complete."""
        return int(self.facts.get("seed") or 0)

    def complete(self, settings: QuantizeSettings) -> QuantizeSettings:
        """Settings as the result has them where nobody asked for others. Raises UsageError for one that contradicts the
        form of the folder, CheckpointError for a record that this program cannot read."""
        plain = QuantizeSettings(settings.model, settings.out)
        asked = {name for name in (*FORM, *CALIBRATED) if name in settings.asked}
        asked |= {name for name in (*FORM, *CALIBRATED) if getattr(settings, name) != getattr(plain, name)}
        before = {name: self.facts.get(name, as_fact(getattr(plain, name))) for name in (*FORM, *CALIBRATED)}
        other = [name for name in FORM if name in asked and as_fact(getattr(settings, name)) != before[name]]
        if other:
            now = {name: as_fact(getattr(settings, name)) for name in other}
            pairs = [(_spelled(name, before[name]), _spelled(name, now[name])) for name in other]
            said = "; ".join(f"made with {old}, not {new}" for old, new in pairs)
            options = ", ".join(f"`{_option(name, now[name])}`" for name in other)
            raise UsageError(
                f"`--redo` keeps the form of `{settings.out}`: {said}", hint=f"leave out {options}, or {WHOLE}"
            )
        values = {name: self._value(name, value, plain) for name, value in before.items() if name not in FILES}
        effort = settings.effort if "effort" in asked else values["effort"]
        calibrates = effort not in EFFORTS or EFFORTS[effort].calibrates
        free = asked.intersection(CALIBRATED).union(() if calibrates else TEXT)
        kept = {name: value for name, value in values.items() if name not in free}
        return replace(settings, **kept, measurement=None, plan=None)

    def require_model(self, weights: str, subject: Subject) -> None:
        """CheckpointError unless it was made from the weights of this fingerprint, and is used as they are."""
        before = str(self.facts.get("model"))
        if before != weights:
            raise CheckpointError(
                f"`{self.checkpoint.path}` was made from another model: its weights have the sha256 `{before[:12]}…`, "
                f"those of `{subject.checkpoint.path}` `{weights[:12]}…`",
                hint="name the model that it was made from",
            )
        own = self.checkpoint.model_config
        if replace(own, tie_embeddings=subject.config.tie_embeddings) != subject.config:
            raise CheckpointError(
                f"`{self.checkpoint.path / 'config.json'}` describes another model than that of "
                f"`{subject.checkpoint.path}`",
                hint="one of them was changed since: bring it back to what it was",
            )

    def require_unchanged(self, progress: Progress) -> Receipt:
        """Reads every tensor. Raises CheckpointError unless all of them are those of the record."""
        found = receipt_of(self.checkpoint, progress)
        if found.digest() != self.made["tensors"]:
            raise CheckpointError(
                f"`{self.checkpoint.path}` cannot be redone in part: {CHANGED}",
                hint="bring them back, or quantize as a whole with `--overwrite`",
            )
        return found

    def require_plan(self, plan: Plan) -> None:
        """CheckpointError unless each linear takes the bits that its settings give it."""
        for linear in (*plan.linears, *([] if plan.head is None else [plan.head])):
            if (bits := stored_bits(self.checkpoint, linear.name)) != linear.stored_bits:
                raise CheckpointError(
                    f"`{linear.name}` takes {bits} bits in `{self.checkpoint.path}`, by its record it should take "
                    f"{linear.stored_bits}",
                    hint=WHOLE,
                )

    def _value(self, name: str, value: Any, plain: QuantizeSettings) -> Any:
        """Of a fact: the setting that it was. A record may have been edited: it is held to the type."""
        usual = getattr(plain, name)
        if isinstance(usual, tuple):
            return _texts(value)
        allowed = {"checkpoint_format": (str, type(None)), "bpw": (int, float, type(None))}.get(name, (type(usual),))
        if type(value) not in allowed:
            file = self.checkpoint.path / RESULT_FILE
            raise CheckpointError(f"`{file}` has the {name} `{value}`, which this program cannot read", hint=WHOLE)
        return value


def chosen_linears(rule: Rule, plan: Plan, subject: Subject) -> frozenset[str]:
    """The quantized linears that a `--redo` matches, by their names on disk. Raises UsageError where there are none,
    with names that it may have meant."""
    places = {subject.module_on_disk(name): name for name in (*(linear.name for linear in plan.linears), HEAD)}
    require_used((rule,), list(places))
    matched = [name for place, name in places.items() if rule.matches(place)]
    work = {linear.name for linear in plan.work}
    if found := frozenset(name for name in matched if name in work):
        return found
    reasons = {linear.name: linear.dense_because for linear in plan.dense}
    why = reasons.get(matched[0]) or "it stays as it is in the model"
    raise UsageError(
        f"`{rule.option}` matches only linears that are not quantized, {len(matched)} of them: `{matched[0]}`, {why}",
        hint="what is not quantized cannot be redone",
    )


def _require_no_other_files(checkpoint: Checkpoint) -> None:
    """The new folder takes the place of the old one: what it would not have would be lost."""
    known = {header.path.name for header in checkpoint.homes.values()} | {path.name for path in checkpoint.side_files()}
    known |= {"config.json", INDEX, RESULT_FILE, *QUANTIZATION_FILES}
    for path in sorted(checkpoint.path.iterdir()):
        if path.name not in known:
            raise CheckpointError(
                f"`{path}` is no part of the model, and would be lost with the old folder",
                hint="move it elsewhere first",
            )


def _option(name: str, fact: Any) -> str:
    """What the command line calls a setting, at this value where it has two names."""
    return "--asym" if name == "sym" and not fact else f"--{name.replace('_', '-')}"


def _spelled(name: str, fact: Any) -> str:
    """A setting as the command line has it, from its fact."""
    option = _option(name, fact)
    if isinstance(getattr(QuantizeSettings("", Path()), name), tuple):
        texts = _texts(fact)
        return " ".join(f"`{option} {text}`" for text in texts) if texts else f"no `{option}`"
    if name == "sym" or fact is True:
        return f"`{option}`"
    if fact is None or fact is False:
        return f"no `{option}`"
    return f"that `{option}`" if name in FILES else f"`{option} {fact}`"


def _texts(fact: Any) -> tuple[str, ...]:
    """Those of an option that may be repeated: a record has its tuple in Python's words, a single one as it is."""
    try:
        found = literal_eval(fact) if isinstance(fact, str) else fact
    except (ValueError, SyntaxError):
        found = (fact,)
    return tuple(map(str, found)) if isinstance(found, tuple | list) else (str(fact),)


def require_alone(settings: QuantizeSettings) -> None:
    """UsageError for options that have no meaning beside `--redo`."""
    if settings.overwrite:
        raise UsageError(
            "`--redo` and `--overwrite` contradict each other: one keeps what the other replaces",
            hint="leave out one of them",
        )
    if settings.target is not None:
        raise UsageError(
            "`--target` has no meaning with `--redo`, which keeps the form of the folder",
            hint=f"leave it out; `quantkit check {in_shell(settings.out)}` says who loads it",
        )
