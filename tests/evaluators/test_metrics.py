"""SQuAD's rules on the cases that trip implementations up: expected values worked out by hand from the paper's rules."""

from importlib.metadata import EntryPoint

import pytest

from quantkit.errors import UsageError
from quantkit.evaluators import metrics
from quantkit.evaluators.metrics import Figure, answer_metrics, exact_match, f1, normalise, translation_figures


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Quick, brown fox!", "quick brown fox"),
        ("an apple a day", "apple day"),
        ("Athena", "athena"),  # "a", "an" and "the" are words, not letters
        ("U.S.A.", "usa"),
        ("the", ""),
        ("twenty-one", "twentyone"),
        ("“quoted”", "“quoted”"),  # ASCII punctuation only
        ("A.", ""),
        (" \t\n", ""),
    ],
)
def test_normalise(text, expected):
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("answer", "right", "match", "overlap"),
    [
        ("the Denver Broncos.", ["Denver Broncos"], 1.0, 1.0),
        ("Denver", ["Denver Broncos", "denver"], 1.0, 1.0),  # the best of several
        ("Denver", ["Denver Broncos"], 0.0, 2 / 3),
        ("in the city of Denver", ["Denver"], 0.0, 2 / 5),
        ("yes yes", ["yes"], 0.0, 2 / 3),  # a word counts as often as it stands in both
        ("", ["Denver"], 0.0, 0.0),
        ("", [""], 1.0, 1.0),
        ("the", ["a"], 1.0, 1.0),  # nothing is left of either
        ("the", ["Denver"], 0.0, 0.0),
        ("Miami", ["Denver"], 0.0, 0.0),
        ("Miami", [], 0.0, 0.0),
    ],
)
def test_exact_match_and_f1(answer, right, match, overlap):
    assert exact_match(answer, right) == match
    assert f1(answer, right) == pytest.approx(overlap)


def test_translation_is_scored_as_sacrebleu_does():
    import sacrebleu

    answers = ["the cat sat on the mat", "there is a dog here", "hello", ""]
    right = ["the cat sat on a mat", "a dog is here", "hello world", "nothing"]
    found = translation_figures(answers, right)
    assert found["bleu"].value == sacrebleu.corpus_bleu(answers, [right]).score
    assert found["chrf"].value == sacrebleu.corpus_chrf(answers, [right]).score
    assert found["bleu"].error > 0 and found["chrf"].error > 0
    assert translation_figures(answers[:1], answers[:1])["bleu"] == Figure(pytest.approx(100), None)
    assert "tok:13a" in metrics.translation_signature()


def test_without_sacrebleu_it_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UsageError, match="sacrebleu, which is not installed"):
        translation_figures(["a"], ["a"])


def test_standard_error_of_a_share():
    assert Figure.mean([1.0] * 30 + [0.0] * 70).error == pytest.approx((0.3 * 0.7 / 99) ** 0.5)
    assert Figure.mean([1.0]) == Figure(1.0, None)


def test_metrics_of_others_come_by_entry_point(monkeypatch):
    points = [
        EntryPoint("first_letter", "test_metrics_plugin:first_letter", metrics.GROUP),
        EntryPoint("broken", "no_such_module:metric", metrics.GROUP),
        EntryPoint("number", "math:pi", metrics.GROUP),
    ]
    monkeypatch.setattr(metrics, "entry_points", lambda group: points if group == "quantkit.metrics" else [])
    import sys
    from types import ModuleType

    plugin = ModuleType("test_metrics_plugin")
    plugin.first_letter = lambda answer, right: float(answer[:1] == right[0][:1])
    monkeypatch.setitem(sys.modules, "test_metrics_plugin", plugin)
    found = answer_metrics(["first_letter", "f1"])
    assert list(found) == ["exact_match", "f1", "first_letter"]
    figures = metrics.score_answers(["ab", "cd"], [["ax"], ["x"]], found)
    assert figures["first_letter"].value == 0.5 and figures["exact_match"].value == 0
    with pytest.raises(UsageError, match="no metric `second`, only exact_match, f1, broken, first_letter, number"):
        answer_metrics(["second"])
    with pytest.raises(UsageError, match="cannot be loaded from `no_such_module:metric`"):
        answer_metrics(["broken"])
    with pytest.raises(UsageError, match="is a float, not a function"):
        answer_metrics(["number"])
