"""Regular expressions that came with a model: only those whose matching is sure to end soon.

Python's matcher goes back and forth. A pattern like `(a*)*b` makes it try more ways than there are atoms, so a file
could stop whoever reads it. How many ways there are is bounded here from the pattern alone.
"""

import re
from typing import Any

MOST_WAYS = 1 << 30
"""About as many as five times `.*` have in a name."""
NAME_CHARACTERS = 64
"""Of a usual name: how often one unbounded repetition may be ended in another place."""


def compile_pattern(text: str) -> re.Pattern[str]:
    """Raises ValueError, with a reason, for what is no regular expression or could take forever."""
    try:
        parsed = re._parser.parse(text)  # type: ignore[attr-defined]
        if _ways(parsed) > MOST_WAYS:
            raise ValueError("it could take forever to match")
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no regular expression: {error}") from error


def _ways(parsed: Any) -> int:
    """At most in how many ways the parts of a pattern can be matched; an upper bound, cut off above the limit."""
    ways = 1
    for operation, argument in parsed:
        ways *= _ways_of(str(operation), argument)
        if ways > MOST_WAYS:
            return MOST_WAYS + 1
    return ways


def _ways_of(operation: str, argument: Any) -> int:
    if operation in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, most, body = argument
        inner = _ways(body)
        if inner > 1 and most > 1:
            return MOST_WAYS + 1
        return (min(most - least, NAME_CHARACTERS) + 1) * inner
    if operation == "BRANCH":
        return sum(map(_ways, argument[1]))
    if operation == "SUBPATTERN":
        return _ways(argument[-1])
    if operation in ("ASSERT", "ASSERT_NOT"):
        return _ways(argument[1])
    if operation == "ATOMIC_GROUP":
        return _ways(argument)
    if operation == "GROUPREF_EXISTS":
        return sum(_ways(part) for part in argument[1:] if part is not None)
    return 1
