"""Text and lines of JSON as people give them: UTF-8, perhaps behind a byte order mark, each line read strictly."""

import json
import math
from typing import Any, NoReturn

MARK = "\ufeff"
"""Some editors put it at the beginning of UTF-8 files; it is no part of the text."""


def decode(raw: bytes) -> str:
    """Raises UnicodeDecodeError for what is not UTF-8. Line ends stay as they are."""
    return raw.decode("utf-8").removeprefix(MARK)


def parse_line(line: str) -> Any:
    """Any JSON value. Raises ValueError, with the reason alone as its text, for what is none or has numbers that none
    are: Python's reader would let NaN and infinity pass, and gives up on deep nesting with an error of its own."""
    try:
        return json.loads(line, parse_constant=_no_number, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg}, column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is too large a number")
    return value
