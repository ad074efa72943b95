"""Tasks: rows of a file → questions, and a model's answers to them → figures.

What a task asks follows from its fields:

    query, choices, gold                     which choice is likeliest, plain and by its length
    context_options, continuation, gold      behind which context the continuation is likeliest
    context, continuation                    whether the continuation (LAMBADA: a last word) is the likeliest
    context, question, answers               a written answer, by the rules of SQuAD
    context, answer, aliases                 the same, for a context that ends in its own question
    two languages, named by `Languages`      a translation, by BLEU and chrF
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.errors import CalibrationError
from quantkit.evaluators.likelihood import Pair, encode_pair, likelihoods, require_room
from quantkit.evaluators.metrics import Figure, Metric, score_answers, translation_figures
from quantkit.models.transformer import Model
from quantkit.progress import Progress
from quantkit.runtime.tokenizer import Tokenizer

CHOICES = {"query", "choices", "gold"}
OPTIONS = {"context_options", "continuation", "gold"}
LAST_WORD = {"context", "continuation"}
QUESTION = {"context", "question", "answers"}
TRIVIA = {"context", "answer"}
FORMS = (CHOICES, OPTIONS, LAST_WORD, QUESTION, TRIVIA)
KINDS = ("multiple choice", "multiple choice", "last word", "answer", "answer")
SHOT_BREAK = "\n\n"
ANSWER_TOKENS = 32
TRANSLATION_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Languages:
    """Fields of the text to translate and of its translation."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Question:
    """One item.

    contexts  what stands before each option; a single one where all options share it
    options   continuations to choose from, or none where an answer is to be written
    gold      the right option
    right     right answers in words, the one shown as an example first
    """

    contexts: tuple[str, ...]
    options: tuple[str, ...]
    gold: int
    right: tuple[str, ...]

    def example(self) -> str:
        """The item with its answer, for few-shot prompts."""
        context = self.contexts[self.gold] if len(self.contexts) > 1 else self.contexts[0]
        return context + (self.options[self.gold] if self.options else f" {self.right[0]}")


@dataclass(frozen=True, slots=True)
class Task:
    """A list of questions of one kind: `multiple choice`, `last word`, `answer` or `translation`."""

    name: str
    kind: str
    questions: tuple[Question, ...]
    shots: str = ""

    def take(self, limit: int | None, shots: int) -> "Task":
        """The first `shots` questions as examples in front of the `limit` that follow them.

        Raises CalibrationError where there are not enough.
        """
        if len(self.questions) <= shots:
            raise CalibrationError(
                f"`{self.name}` has {len(self.questions)} items, {shots} of them as examples leave none to ask",
                hint=f"--shots {max(0, len(self.questions) - 1)} at most",
            )
        examples = "".join(question.example() + SHOT_BREAK for question in self.questions[:shots])
        asked = self.questions[shots:]
        return Task(self.name, self.kind, asked if limit is None else asked[:limit], examples)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Figures of one task, and what each item got, as objects for JSON."""

    task: str
    kind: str
    count: int
    figures: Mapping[str, Figure]
    items: tuple[dict[str, Any], ...] = field(repr=False)


def make_task(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    languages: Languages | None = None,
    places: Sequence[str] | None = None,
) -> Task:
    """Questions from rows; `places` say where each row was found. Raises CalibrationError for rows without the fields
    of a task, or with others in them, or with nothing in them."""
    if not rows:
        raise CalibrationError(f"`{name}` has no items", hint="give a `.jsonl` with one item on each line")
    if languages is not None:
        make: Callable[..., Question] = _translation
        kind, needed = "translation", {languages.source, languages.target}
    else:
        needed, kind = _form_of(name, rows[0])
        make = {"query": _choices, "context_options": _options, "question": _question, "answer": _trivia}.get(
            next((key for key in ("query", "context_options", "question", "answer") if key in needed), ""), _last_word
        )
    questions = []
    for number, row in enumerate(rows, start=1):
        place = f"item {number} of `{name}`" if places is None else places[number - 1]
        lacking = sorted(needed - row.keys())
        if lacking:
            raise CalibrationError(
                f"{place} has no field {_quoted(lacking)}, only {_quoted(row)}",
                hint="every item of a task has the same fields",
            )
        questions.append(make(row, place) if languages is None else make(row, place, languages))
    return Task(name, kind, tuple(questions))


def _form_of(name: str, row: Mapping[str, Any]) -> tuple[set[str], str]:
    for form, kind in zip(FORMS, KINDS, strict=True):
        if form <= row.keys():
            return form, kind
    known = "; ".join(_quoted(sorted(form)) for form in FORMS)
    raise CalibrationError(
        f"`{name}` has the fields {_quoted(row)}, which make no task: known are {known}",
        hint="rename fields, as `--field query=prompt`, or name two languages: `--source en --target de`",
    )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _text(row: Mapping[str, Any], key: str, place: str) -> str:
    if not isinstance(row[key], str):
        raise CalibrationError(
            f"`{key}` in {place} is a {type(row[key]).__name__}, expected a text", hint="mend the item"
        )
    return str(row[key])


def _some_text(row: Mapping[str, Any], key: str, place: str) -> str:
    if not (text := _text(row, key, place)).strip():
        raise CalibrationError(f"`{key}` in {place} is empty: there is nothing to predict", hint="mend the item")
    return text


def _texts(row: Mapping[str, Any], key: str, place: str, least: int) -> tuple[str, ...]:
    value = row[key]
    if isinstance(value, Mapping) and "text" in value:  # as SQuAD has its answers
        value = value["text"]
    if not isinstance(value, list) or len(value) < least or not all(isinstance(one, str) for one in value):
        raise CalibrationError(f"`{key}` in {place} is no list of {least} or more texts", hint="mend the item")
    return tuple(value)


def _gold(row: Mapping[str, Any], options: int, place: str) -> int:
    gold = row["gold"]
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < options:
        raise CalibrationError(
            f"`gold` in {place} is {gold!r}, expected the number of a choice, 0 to {options - 1}", hint="mend the item"
        )
    return gold


def _choices(row: Mapping[str, Any], place: str) -> Question:
    options = _texts(row, "choices", place, 2)
    if not all(option.strip() for option in options):
        raise CalibrationError(f"`choices` in {place} has an empty one, which has no likelihood", hint="mend the item")
    gold = _gold(row, len(options), place)
    return Question((_text(row, "query", place),), tuple(f" {one}" for one in options), gold, (options[gold],))


def _options(row: Mapping[str, Any], place: str) -> Question:
    contexts = _texts(row, "context_options", place, 2)
    after = " " + _some_text(row, "continuation", place)
    return Question(contexts, (after,) * len(contexts), _gold(row, len(contexts), place), (after[1:],))


def _last_word(row: Mapping[str, Any], place: str) -> Question:
    word = _some_text(row, "continuation", place)
    return Question((_text(row, "context", place),), (" " + word.lstrip(),), 0, (word,))


def _question(row: Mapping[str, Any], place: str) -> Question:
    context, question = _text(row, "context", place), _text(row, "question", place)
    return Question((f"{context}\nQuestion: {question}\nAnswer:",), (), 0, _texts(row, "answers", place, 1))


def _trivia(row: Mapping[str, Any], place: str) -> Question:
    right = dict.fromkeys(
        [_text(row, "answer", place), *(_texts(row, "aliases", place, 0) if "aliases" in row else ())]
    )
    return Question((_text(row, "context", place),), (), 0, tuple(right))


def _translation(row: Mapping[str, Any], place: str, languages: Languages) -> Question:
    source, target = _text(row, languages.source, place), _text(row, languages.target, place)
    return Question((f"{languages.source}: {source}\n{languages.target}:",), (), 0, (target,))


def pairs_of(task: Task, tokenizer: Tokenizer) -> list[list[Pair]]:
    """The options of each question as tokens. Raises RequestError where an item has nothing to predict."""
    found = []
    for question in task.questions:
        contexts = question.contexts if len(question.contexts) > 1 else question.contexts * len(question.options)
        found.append(
            [
                encode_pair(tokenizer, task.shots + context, option)
                for context, option in zip(contexts, question.options, strict=True)
            ]
        )
    return found


def choose(model: Model, task: Task, tokenizer: Tokenizer, progress: Progress | None = None) -> TaskResult:
    """`multiple choice` and `last word`, by likelihood. By length means: divided by the characters of the choice.

    Ties go to the first choice. Raises RequestError for items beyond the context, GateError for logits that are not
    finite.
    """
    pairs = pairs_of(task, tokenizer)
    flat = [pair for options in pairs for pair in options]
    require_room(flat, model.config.context)
    scores = iter(likelihoods(model, flat, task.name, progress))
    items: list[dict[str, Any]] = []
    for question, options in zip(task.questions, pairs, strict=True):
        found = [next(scores) for _ in options]
        values = [one.value for one in found]
        item: dict[str, Any] = {"likelihoods": values, "gold": question.gold}
        if task.kind == "last word":
            item |= {"right": found[0].greedy}
        else:
            by_length = [value / len(text.strip()) for value, text in zip(values, question.options, strict=True)]
            item |= {"choice": _first_best(values), "choice_by_length": _first_best(by_length)}
        items.append(item)
    return TaskResult(task.name, task.kind, len(items), _choice_figures(task.kind, items), tuple(items))


def _choice_figures(kind: str, items: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    if kind == "last word":
        loss = Figure.mean([-item["likelihoods"][0] for item in items])
        ppl = math.exp(loss.value)
        error = None if loss.error is None else ppl * loss.error
        return {"accuracy": Figure.mean([float(item["right"]) for item in items]), "perplexity": Figure(ppl, error)}
    return {
        name: Figure.mean([float(item[key] == item["gold"]) for item in items])
        for name, key in (("accuracy", "choice"), ("accuracy_by_length", "choice_by_length"))
    }


def _first_best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda at: values[at])


def judge_written(task: Task, answers: Sequence[str], metrics: Mapping[str, Metric]) -> TaskResult:
    """`answer` and `translation`, from what was written. Raises UsageError where sacrebleu is wanted and absent."""
    right = [question.right for question in task.questions]
    if task.kind == "translation":
        figures = translation_figures(answers, [one[0] for one in right])
    else:
        figures = score_answers(answers, right, metrics)
    items = tuple({"answer": answer, "right": list(one)} for answer, one in zip(answers, right, strict=True))
    return TaskResult(task.name, task.kind, len(items), figures, items)
