import pytest

from quantkit.commands.evaluation.gate import Gate
from quantkit.errors import UsageError

FIGURES = {"kl_mean": 0.04, "ppl_ratio": 1.03, "correlation": None}


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("kl_mean<0.05", 0),
        ("kl_mean<0.04", 1),
        ("kl_mean<=0.04", 0),
        (" kl_mean > 1e-3 , ppl_ratio >= 1.04 ", 1),
        ("kl_mean<0.01,ppl_ratio<1.02", 2),
        ("correlation>0", 1),
    ],
)
def test_conditions(text, failed):
    gate = Gate.parse(text, FIGURES)
    assert len(gate.failures(FIGURES)) == failed
    assert gate.exit_code(FIGURES) == (3 if failed else 0)
    assert len(gate.as_json(FIGURES)["gate"]["failed"]) == failed
    assert ("passed" in gate.rows(FIGURES)[0][1]) is not bool(failed)


def test_no_gate_passes_everything_and_says_nothing():
    gate = Gate.parse(None, FIGURES)
    assert gate.exit_code(FIGURES) == 0 and gate.rows(FIGURES) == [] and gate.as_json(FIGURES) == {}


@pytest.mark.parametrize("text", ["", "kl_mean", "kl_mean=1", "kl_mean<", "kl_mean<1,", "kl_mean<1-2", "kl_mean<nan"])
def test_what_is_no_condition(text):
    with pytest.raises(UsageError, match="is no condition"):
        Gate.parse(text, FIGURES)


def test_unknown_figures_are_named_with_those_there_are():
    with pytest.raises(UsageError, match="no figure `kl`") as caught:
        Gate.parse("kl<1", FIGURES)
    assert caught.value.hint == "use one of correlation, kl_mean, ppl_ratio"
