"""`quantkit eval tasks`: files of questions → a model's answers → figures with their standard errors."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.calibration.dataset import read_rows
from quantkit.calibration.json_lines import decode, parse_line
from quantkit.checkpoint.durable import write_file
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.evaluation.report import json_number
from quantkit.commands.evaluation.result_file import require_absent
from quantkit.errors import CalibrationError, CheckpointError, UsageError, in_shell
from quantkit.evaluators.likelihood import require_room
from quantkit.evaluators.metrics import Metric, answer_metrics, sacrebleu, translation_signature
from quantkit.evaluators.tasks import (
    ANSWER_TOKENS,
    TRANSLATION_TOKENS,
    Languages,
    Task,
    TaskResult,
    choose,
    judge_written,
    make_task,
    pairs_of,
)
from quantkit.progress import Progress
from quantkit.runtime.generator import Generator
from quantkit.runtime.load import load_model
from quantkit.runtime.placement import Placement
from quantkit.runtime.request import Request, check
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import TasksSettings

DECIDED = {"multiple choice", "last word"}
STOP = "\n"
"""Where a written answer ends."""


@dataclass(frozen=True, slots=True)
class TasksReport:
    """Figures of every task, and what makes them comparable."""

    model: str
    results: tuple[TaskResult, ...]
    shots: int
    placement: Placement
    notes: tuple[str, ...] = ()

    COLUMNS = ("task", "kind", "figure", "value", "± standard error", "items")

    def rows(self) -> list[list[str]]:
        """A row for each figure."""
        return [
            [
                result.task,
                result.kind,
                name,
                f"{figure.value:.4f}",
                "" if figure.error is None else f"{figure.error:.4f}",
                f"{result.count}",
            ]
            for result in self.results
            for name, figure in result.figures.items()
        ]

    def facts(self) -> list[list[str]]:
        return [
            ["examples", f"{self.shots}, the first items of each task, which are not asked"],
            ["arithmetic", f"{self.placement.dtype_name} on {self.placement.device}, backend {self.placement.backend}"],
            *(["note", note] for note in self.notes),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "shots": self.shots,
            "dtype": self.placement.dtype_name,
            "device": self.placement.device,
            "backend": self.placement.backend,
            "tasks": [
                {
                    "task": result.task,
                    "kind": result.kind,
                    "items": result.count,
                    "figures": {
                        name: {"value": json_number(figure.value), "error": json_number(figure.error)}
                        for name, figure in result.figures.items()
                    },
                }
                for result in self.results
            ],
            "notes": list(self.notes),
        }


class Items(NamedTuple):
    """Rows of one task as they were found, and where each was; None for rows of a data set, which are counted."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    places: Sequence[str] | None

    def task(self, renames: Mapping[str, str], languages: Languages | None) -> Task:
        """Raises CalibrationError as `make_task` does."""
        renamed = [{renames.get(key, key): value for key, value in row.items()} for row in self.rows]
        return make_task(self.name, renamed, languages, self.places)


def run(settings: TasksSettings, progress: Progress) -> TasksReport:
    """Ask a model. Everything about the tasks that can be refused is refused before its weights are read.

    Raises UsageError for settings, CalibrationError for tasks, CheckpointError for the model's files, RequestError for
    items beyond the model's context, GateError when logits are no finite numbers.
    """
    require_absent(settings.save_items, "--save-items")
    placement = Placement.choose(settings.device, settings.dtype)
    metrics = answer_metrics(settings.metrics)
    checkpoint = open_checkpoint(settings.model)
    tokenizer = Tokenizer.open(checkpoint.path)
    _refuse_idle_split(settings)
    languages, renames = _languages(settings), dict(map(_renaming, settings.fields))
    found = [_read(name, settings) for name in settings.tasks]
    _refuse_idle_fields(renames, found)
    tasks = [items.task(renames, languages).take(settings.limit, settings.shots) for items in found]
    if settings.metrics and not any(task.kind == "answer" for task in tasks):
        kinds = ", ".join(dict.fromkeys(task.kind for task in tasks))
        raise UsageError(f"`--metric` scores written answers, and these tasks are {kinds}", hint="leave out `--metric`")
    config = checkpoint.model_config
    for task in tasks:
        if task.kind in DECIDED:
            require_room([pair for pairs in pairs_of(task, tokenizer) for pair in pairs], config.context)
            continue
        if task.kind == "translation":
            sacrebleu()
        for request in _requests(task, tokenizer):
            check(request, config)
    generator = Generator(load_model(checkpoint, placement.device, placement.dtype), tokenizer)
    results = tuple(_ask(task, generator, tokenizer, metrics, progress) for task in tasks)
    if settings.save_items is not None:
        _save_items(settings.save_items, results)
    notes = list(checkpoint.notes)
    if any(task.kind == "translation" for task in tasks):
        notes.append(f"BLEU is {translation_signature()}")
    return TasksReport(settings.model, results, settings.shots, placement, tuple(notes))


def _is_file(name: str) -> bool:
    return Path(name).exists() or Path(name).suffix == ".jsonl"


def _refuse_idle_split(settings: TasksSettings) -> None:
    if settings.split != TasksSettings("", ()).split and all(map(_is_file, settings.tasks)):
        raise UsageError("`--split` is of data sets of the hub, and all tasks are files", hint="leave out `--split`")


def _refuse_idle_fields(renames: Mapping[str, str], tasks: Sequence[Items]) -> None:
    """A field may be that of one of several tasks."""
    rows = [row for items in tasks for row in items.rows]
    if rows and (absent := sorted(name for name in renames if not any(name in row for row in rows))):
        names = ", ".join(f"`{items.name}`" for items in tasks)
        raise UsageError(
            f"`--field` renames `{absent[0]}`, which no item of {names} has", hint=f"fields are {', '.join(rows[0])}"
        )


def _languages(settings: TasksSettings) -> Languages | None:
    if settings.source is not None and settings.target is not None:
        return Languages(settings.source, settings.target)
    if settings.source is not None or settings.target is not None:
        raise UsageError("a translation needs `--source` and `--target`", hint="--source en --target de")
    return None


def _read(name: str, settings: TasksSettings) -> Items:
    if _is_file(name):
        path, items = Path(name), read_items(Path(name))
        return Items(path.stem, list(items.values()), [f"line {number} of `{path}`" for number in items])
    wanted = None if settings.limit is None else settings.limit + settings.shots
    return Items(name, read_rows(name, settings.split, wanted), None)


def _renaming(text: str) -> tuple[str, str]:
    """`query=prompt`: the field that a task has as `prompt` is its `query`."""
    ours, equals, theirs = text.partition("=")
    if not (ours and equals and theirs):
        raise UsageError(f"`--field {text}` renames nothing", hint="--field query=prompt")
    return theirs, ours


def read_items(path: Path) -> dict[int, Mapping[str, Any]]:
    """Objects of a `.jsonl`, each by the number of its line. Raises CalibrationError for anything else."""
    try:
        lines = decode(path.read_bytes()).split("\n")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"`{path}` is not UTF-8 text", hint=f"`iconv -t UTF-8 -o items.jsonl {in_shell(path)}`"
        ) from error
    except OSError as error:
        raise CalibrationError(f"`{path}` cannot be read: {error.strerror}", hint="give a `.jsonl` of items") from error
    rows: dict[int, Mapping[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_line(line)
        except ValueError as error:
            raise CalibrationError(
                f"line {number} of `{path}` is not JSON: {error}", hint="one object a line"
            ) from error
        if not isinstance(row, dict):
            raise CalibrationError(f"line {number} of `{path}` is no object", hint="one object a line")
        rows[number] = row
    return rows


def _requests(task: Task, tokenizer: Tokenizer) -> Iterator[Request]:
    """What a model is asked to write, question by question."""
    tokens = TRANSLATION_TOKENS if task.kind == "translation" else ANSWER_TOKENS
    for question in task.questions:
        ids = tokenizer.encode(task.shots + question.contexts[0], special=True)
        yield Request(ids, tokens, stop_ids=tokenizer.eos_ids, stops=(STOP,))


def _ask(
    task: Task, generator: Generator, tokenizer: Tokenizer, metrics: Mapping[str, Metric], progress: Progress
) -> TaskResult:
    if task.kind in DECIDED:
        return choose(generator.model, task, tokenizer, progress)
    answers = []
    with progress.task(task.name, total=len(task.questions)) as bar:
        for request in _requests(task, tokenizer):
            answers.append(generator.run(request).text.strip())
            bar.advance()
    return judge_written(task, answers, metrics)


def _save_items(path: Path, results: Sequence[TaskResult]) -> None:
    lines = [
        json.dumps({"task": result.task, "item": number, **item}, ensure_ascii=False) + "\n"
        for result in results
        for number, item in enumerate(result.items)
    ]
    try:
        path.unlink(missing_ok=True)
        write_file(path, "".join(lines).encode())
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be written: {error.strerror}", hint="--save-items FILE") from error
