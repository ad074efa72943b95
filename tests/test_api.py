"""The Python API: the verbs of the command line, each found where it says it is."""

import inspect
import json
import subprocess
import sys

import pytest
import tiny
import tiny_gguf

import quantkit
from quantkit.cli.app import app
from quantkit.progress import Silent
from quantkit.version import VERSION

VERBS = sorted(set(quantkit.__all__) - {"__version__"})
# Verbs that no command needs; commands that a program has no use for (`quantkit.plan` and `quantkit.measurement` are modules).
LIBRARY_ALONE, COMMAND_ALONE = {"load", "open_checkpoint"}, {"doctor", "plan", "measurement"}
# What the command line calls by a shorter name.
SPELLED = {"eval": "evaluate"}


def test_every_command_is_a_verb_of_the_api() -> None:
    commands = [info.name or info.callback.__name__ for info in app.registered_commands]
    commands += [group.name for group in app.registered_groups]
    named = {SPELLED.get(command, command) for command in commands} - COMMAND_ALONE
    assert named | LIBRARY_ALONE == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_a_function_with_words(verb) -> None:
    found = getattr(quantkit, verb)
    assert inspect.isfunction(found)
    assert found.__name__ == verb
    assert found.__doc__
    assert verb in dir(quantkit)


def test_the_version_is_that_of_the_package() -> None:
    assert quantkit.__version__ == VERSION


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        quantkit.quantise  # noqa: B018


def test_importing_costs_nothing() -> None:
    program = "import sys, json, quantkit\nprint(json.dumps([n for n in sys.modules if n.startswith('quantkit.')]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["quantkit.version"]


def test_generate_gives_the_text_as_it_comes(tmp_path, capsys) -> None:
    model = tiny.write_model(tmp_path / "model")
    pieces: list[str] = []
    report = quantkit.generate(model, "Once", max_new_tokens=4, ignore_eos=True, on_text=lambda text: not pieces.append(text))
    assert "".join(pieces) == report.completion.text
    assert len(report.completion.token_ids) == 4
    assert capsys.readouterr().out == ""


def test_convert_takes_the_routes_of_the_command_line(tmp_path) -> None:
    tiny_gguf.write_model(tmp_path / "tiny.gguf")
    report = quantkit.convert("gguf-to-hf", tmp_path / "tiny.gguf", tmp_path / "out", progress=Silent())
    assert report.out == str(tmp_path / "out")
    assert quantkit.open_checkpoint(tmp_path / "out").linears()


def test_long_verbs_show_their_progress(tmp_path, capsys) -> None:
    tiny_gguf.write_model(tmp_path / "tiny.gguf")
    quantkit.convert("gguf-to-hf", tmp_path / "tiny.gguf", tmp_path / "out")
    captured = capsys.readouterr()
    assert "gguf-to-hf: 100%" in captured.err
    assert captured.out == ""


def test_evaluate_is_one_model_or_two(tmp_path) -> None:
    model, other = (tiny.write_model(tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
    (tmp_path / "notes.txt").write_text("A group of rows shares its scales, and each row its place. " * 20)
    options = {"text": str(tmp_path / "notes.txt"), "length": 16, "windows": 2, "progress": Silent()}
    alone, beside = quantkit.evaluate(model, **options), quantkit.evaluate(other, model, **options)
    assert alone.score.windows == 2
    assert (beside.reference, beside.candidate) == (str(model), str(other))
    assert beside.divergence.reference.perplexity == pytest.approx(alone.score.perplexity, rel=1e-6)
