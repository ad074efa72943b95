import ast
import re
from pathlib import Path

import pytest

from quantkit import errors

COMMANDS = sorted((Path(errors.__file__).parent / "commands").glob("*.py"))


def _tree(base: type) -> list[type]:
    return [base, *(leaf for child in base.__subclasses__() for leaf in _tree(child))]


def test_the_drawing_shows_every_class_with_its_code() -> None:
    drawn = dict(re.findall(r"(\w+) +(\d+)   ", errors.__doc__))
    assert drawn == {error.__name__: str(error.exit_code) for error in _tree(errors.QuantkitError) if error.__module__ == errors.__name__}


def test_every_class_says_what_it_means() -> None:
    assert all(error.__doc__ for error in _tree(errors.QuantkitError))


def test_message_and_hint_are_kept_apart() -> None:
    error = errors.FormatError("found 7 bits", hint="use `--bits 8`")
    assert (str(error), error.message, error.hint) == ("found 7 bits", "found 7 bits", "use `--bits 8`")


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in COMMANDS])
def test_every_error_of_a_command_has_a_hint(path: Path) -> None:
    kinds = {error.__name__ for error in _tree(errors.QuantkitError) if error.__module__ == errors.__name__}
    for node in ast.walk(ast.parse(path.read_text())):
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if called in kinds:
            hints = [keyword.value for keyword in node.keywords if keyword.arg == "hint"]
            assert hints, f"{path.name}:{node.lineno} gives no hint"
            assert not (isinstance(hints[0], ast.Constant) and not hints[0].value), f"{path.name}:{node.lineno}"


@pytest.mark.parametrize(
    ("path", "spelled"),
    [("/a/b", "/a/b"), (Path("./-dash"), "./-dash"), ("a b", "'a b'"), ("it's", """'it'"'"'s'"""), ("-a b", "'./-a b'")],
)
def test_a_path_in_a_hint_can_be_pasted(path: str | Path, spelled: str) -> None:
    assert errors.in_shell(path) == spelled
