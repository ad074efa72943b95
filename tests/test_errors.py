import re

from quantkit import errors


def _tree(base: type) -> list[type]:
    return [base, *(leaf for child in base.__subclasses__() for leaf in _tree(child))]


def test_the_drawing_shows_every_class_with_its_code() -> None:
    drawn = dict(re.findall(r"(\w+) +(\d+)   ", errors.__doc__))
    assert drawn == {error.__name__: str(error.exit_code) for error in _tree(errors.QuantkitError)}


def test_every_class_says_what_it_means() -> None:
    assert all(error.__doc__ for error in _tree(errors.QuantkitError))


def test_message_and_hint_are_kept_apart() -> None:
    error = errors.FormatError("found 7 bits", hint="use `--bits 8`")
    assert (str(error), error.message, error.hint) == ("found 7 bits", "found 7 bits", "use `--bits 8`")
