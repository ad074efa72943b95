"""`quantkit check`: all faults of a model folder in one go, and who can load it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.survey import survey
from quantkit.commands.inspection import model
from quantkit.commands.inspection.tokenizer import tokenizer_faults
from quantkit.commands.inspection.values import value_findings
from quantkit.consumer_rules import Objection
from quantkit.consumers import CONSUMERS, Verdict, verdicts
from quantkit.errors import QuantkitError, UnsupportedModel
from quantkit.inventory import take
from quantkit.progress import Progress, Tqdm
from quantkit.settings import CheckSettings

MOST_SHOWN = 40


@dataclass(frozen=True, slots=True, eq=False)
class CheckReport:
    """Faults as the errors that they would be; notes are worth knowing and stop nothing."""

    path: Path
    faults: tuple[QuantkitError, ...]
    notes: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def exit_code(self) -> int:
        """0 for a sound folder, else that of the first fault: what any command that opens it would exit with."""
        return self.faults[0].exit_code if self.faults else 0

    def lines(self) -> list[str]:
        """Faults with their hints, then notes, for people; `--json` has them all."""
        lines = [f"{self.path}: {_counted(len(self.faults), 'fault')}, {_counted(len(self.notes), 'note')}"]
        for fault in self.faults[:MOST_SHOWN]:
            lines += [f"fault {fault.exit_code}: {fault.message}", *([f"    hint: {fault.hint}"] if fault.hint else [])]
        if len(self.faults) > MOST_SHOWN:
            lines.append(f"… and {len(self.faults) - MOST_SHOWN} more faults: `--json` has them all")
        lines += [f"note: {note}" for note in self.notes[:MOST_SHOWN]]
        if len(self.notes) > MOST_SHOWN:
            lines.append(f"… and {len(self.notes) - MOST_SHOWN} more notes: `--json` has them all")
        return lines

    def rows(self) -> list[list[str]]:
        """Consumer, whether it loads the folder, and why not."""
        return verdict_rows(self.verdicts)

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "sound": not self.faults,
            "exit_code": self.exit_code,
            "faults": [
                {
                    "kind": type(fault).__name__,
                    "exit_code": fault.exit_code,
                    "message": fault.message,
                    "hint": fault.hint,
                }
                for fault in self.faults
            ],
            "notes": list(self.notes),
            "consumers": verdicts_json(self.verdicts),
        }


def verdict_rows(found: tuple[Verdict, ...]) -> list[list[str]]:
    """One row for each consumer, its reasons and cautions below one another."""
    words = {True: "yes", False: "no", None: "unknown"}
    return [
        [verdict.consumer, words[verdict.loads], "\n".join(map(str, (*verdict.objections, *verdict.cautions)))]
        for verdict in found
    ]


def verdicts_json(found: tuple[Verdict, ...]) -> list[dict[str, Any]]:
    def listed(objections: tuple[Objection, ...]) -> list[dict[str, Any]]:
        return [{"linear": objection.linear, "why": objection.why} for objection in objections]

    return [
        {
            "consumer": verdict.consumer,
            "loads": verdict.loads,
            "objections": listed(verdict.objections),
            "cautions": listed(verdict.cautions),
        }
        for verdict in found
    ]


def check(path: str | Path) -> CheckReport:
    """The command for Python: every fault of the folder, and who can load it."""
    return run(CheckSettings(Path(path)), Tqdm())


def run(settings: CheckSettings, progress: Progress) -> CheckReport:
    """Raises nothing for a faulty folder: faults are the result."""
    found = survey(settings.path)
    checkpoint = found.checkpoint
    if checkpoint is None:
        return CheckReport(settings.path, found.faults, found.notes, _unknown("there is no folder to load"))
    where = str(settings.path / "config.json")
    faults, notes = list(found.faults), list(found.notes)
    has_config = bool(checkpoint.config)
    unknown = model.config_faults(checkpoint.config, where) if has_config else []
    faults += [*unknown, *model.quantization_faults(checkpoint, incomplete=found.incomplete)]
    zero_points: dict[str, tuple[int, int]] = {}
    if has_config and not unknown:
        contents = list(model.content_faults(checkpoint, incomplete=found.incomplete))
        values = value_findings(checkpoint, {module for module, _ in contents}, progress)
        faults += [*(fault for _, fault in contents), *values.faults]
        notes += values.notes
        zero_points = values.zero_points
        if not faults:
            faults += model.loading_fault(checkpoint)
    vocabulary = checkpoint.model_config.vocab_size if has_config and not unknown else None
    of_tokenizer, tokenizer_notes, _ = tokenizer_faults(settings.path, checkpoint.config, vocabulary)
    judged = _judge(checkpoint, faults, of_tokenizer, zero_points, known=has_config and not unknown)
    return CheckReport(settings.path, (*faults, *of_tokenizer), (*notes, *tokenizer_notes), judged)


def _judge(
    checkpoint: Checkpoint,
    faults: list[QuantkitError],
    of_tokenizer: list[QuantkitError],
    zero_points: dict[str, tuple[int, int]],
    *,
    known: bool,
) -> tuple[Verdict, ...]:
    """Damage stops every consumer; a model that only this tool does not know says nothing about the others."""
    if not known:
        only_ours = all(isinstance(fault, UnsupportedModel) for fault in faults)
        if not only_ours:
            return tuple(Verdict(each.name, False, (_damaged(faults),)) for each in CONSUMERS)
        return _unknown("the model is not known here, and so neither are its linears", ours=False)
    found = verdicts(take(checkpoint).with_zero_points(zero_points))
    mute = (Objection(None, "no tokenizer that fits: see the faults"),) if of_tokenizer else ()
    return tuple(
        Verdict(
            each.consumer,
            each.loads if not faults else False,
            (*((_damaged(faults),) if faults else ()), *each.objections),
            (*each.cautions, *(mute if each.loads and not faults else ())),
        )
        for each in found
    )


def _damaged(faults: list[QuantkitError]) -> Objection:
    return Objection(None, f"the folder is damaged: {_counted(len(faults), 'fault')}")


def _unknown(why: str, *, ours: bool | None = None) -> tuple[Verdict, ...]:
    last = CONSUMERS[-1].name
    return tuple(Verdict(each.name, ours if each.name == last else None, (Objection(None, why),)) for each in CONSUMERS)


def _counted(count: int, word: str) -> str:
    return f"no {word}s" if count == 0 else f"1 {word}" if count == 1 else f"{count} {word}s"
