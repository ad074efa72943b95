import json

import pytest
import tiny

from quantkit.commands.evaluation import tasks
from quantkit.errors import CalibrationError, UsageError
from quantkit.progress import Silent
from quantkit.settings import TasksSettings

ITEM = {"query": "the end of", "choices": ["the", "sands"], "gold": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("model"))


def ask(folder, file, **settings):
    return tasks.run(TasksSettings(str(folder), (str(file),), **settings), Silent())


def test_items_of_a_file_are_asked(folder, tmp_path):
    """Also behind a byte order mark, which some editors put there."""
    plain, marked = tmp_path / "plain.jsonl", tmp_path / "marked.jsonl"
    plain.write_text(f"{json.dumps(ITEM)}\n\n{json.dumps(ITEM)}\n")
    marked.write_text(json.dumps(ITEM), encoding="utf-8-sig")
    two, one = ask(folder, plain).results[0], ask(folder, marked).results[0]
    assert two.count == 2 and one.count == 1
    assert two.items[0] == two.items[1] == one.items[0]
    assert set(one.figures) == {"accuracy", "accuracy_by_length"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "is not JSON: it is nested too deeply"),
        ('{"query": NaN}', "is not JSON: NaN is no number of JSON"),
        ("[]", "is no object"),
        (json.dumps(ITEM | {"choices": ["", "a"]}), "has an empty one, which has no likelihood"),
    ],
)
def test_what_cannot_be_asked_is_named_by_its_line_before_any_weight_is_read(line, message, tmp_path):
    folder = tiny.write_model(tmp_path / "model")
    tiny.write_tensors(folder, {})
    file = tmp_path / "items.jsonl"
    file.write_text(f"{json.dumps(ITEM)}\n\n{line}\n")
    with pytest.raises(CalibrationError) as caught:
        ask(folder, file)
    assert f"line 3 of `{file}`" in caught.value.message and message in caught.value.message and caught.value.hint


def test_a_field_may_be_that_of_one_of_several_tasks(folder, tmp_path):
    plain, renamed = tmp_path / "plain.jsonl", tmp_path / "renamed.jsonl"
    plain.write_text(json.dumps(ITEM))
    renamed.write_text(json.dumps({"question" if key == "query" else key: value for key, value in ITEM.items()}))
    settings = TasksSettings(str(folder), (str(plain), str(renamed)), fields=("query=question",))
    one, other = tasks.run(settings, Silent()).results
    assert one.items[0]["likelihoods"] == other.items[0]["likelihoods"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "train"}, "`--split` is of data sets of the hub, and all tasks are files"),
        ({"metrics": ("exact_match",)}, "`--metric` scores written answers, and these tasks are multiple choice"),
        ({"fields": ("query=question",)}, "`--field` renames `question`, which no item of `.*` has"),
    ],
)
def test_options_without_effect_are_refused(settings, message, folder, tmp_path):
    file = tmp_path / "items.jsonl"
    file.write_text(json.dumps(ITEM))
    with pytest.raises(UsageError, match=message):
        ask(folder, file, **settings)
