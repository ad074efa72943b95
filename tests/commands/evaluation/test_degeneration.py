import pytest

from quantkit.commands.evaluation.degeneration import DegenerationReport
from quantkit.evaluators.probe import FormatResult
from quantkit.runtime.placement import Placement

HEALTHY, WRONG = FormatResult("fp16", (), None, ()), FormatResult("q4_0", (), 3, ("loops",))
NEVER, NOTHING = FormatResult("int8", (), 0, ()), FormatResult("int8", (), None, (), judged=False)


@pytest.mark.parametrize(
    ("formats", "verdict", "code"),
    [
        ((HEALTHY, HEALTHY), "healthy", 0),
        ((HEALTHY, NEVER), "not run", 3),
        ((NOTHING, HEALTHY), "not run", 3),
        ((NEVER, HEALTHY, WRONG), "degenerate", 3),
    ],
)
def test_what_did_not_run_is_not_hidden_by_what_did(formats, verdict, code):
    report = DegenerationReport("model", None, formats, 16, 0, Placement.choose("cpu", "fp32"))
    assert (report.verdict, report.as_json()["verdict"], report.exit_code) == (verdict, verdict, code)
    said = [words for words in report.facts() if words[0].startswith("cache ")]
    assert len(said) == sum(one.verdict != "healthy" for one in formats)


def test_short_conversations_are_called_so():
    short, long = (DegenerationReport("model", None, (HEALTHY,), tokens, 0, Placement.choose("cpu", "fp32")) for tokens in (64, 400))
    assert "less than 400 tokens prove little" in short.facts()[-1][1]
    assert short.as_json()["notes"] == [short.facts()[-1][1]]
    assert not long.as_json()["notes"]
