"""Strings that end or must not enter an answer, found in text that comes piece by piece.

    stops = StopStrings(("\\nUser:",))
    text = stops.push("Hello\\nUs") + stops.push("er: and more")      # "Hello", and `stops.found` is "\\nUser:"

What may be the beginning of a string waits, however the text is cut into pieces, and no longer than it may be one.
"""

from collections.abc import Sequence

from quantkit.errors import RequestError


def first_of(strings: Sequence[str], text: str) -> tuple[int, str] | None:
    """Where the earliest of `strings` begins in `text`, and which; of two that begin together the longer one."""
    found = [(index, -len(string), string) for string in strings if (index := text.find(string)) >= 0]
    if not found:
        return None
    index, _, string = min(found)
    return index, string


def beginning_of(strings: Sequence[str], text: str) -> int:
    """How many characters at the end of `text` may become one of `strings`, none of which it holds whole."""
    longest = min(max(map(len, strings), default=1) - 1, len(text))
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        if any(len(string) > length and string.startswith(end) for string in strings):
            return length
    return 0


def require_text(option: str, strings: Sequence[str]) -> None:
    """Raises RequestError for an empty string, which is everywhere."""
    if "" in strings:
        raise RequestError(f"`{option}` is an empty string, which every text contains", hint=f"leave `{option}` out")


class StopStrings:
    """Text in, the same text out up to the first stop string, which is then `found`; nothing comes after it."""

    def __init__(self, strings: Sequence[str]) -> None:
        require_text("--stop", strings)
        self.found: str | None = None
        self._strings = strings
        self._waiting = ""

    def push(self, text: str) -> str:
        """What is certain to come before a stop string."""
        if self.found is not None:
            return ""
        text = self._waiting + text
        match = first_of(self._strings, text)
        if match is not None:
            index, self.found = match
            self._waiting = ""
            return text[:index]
        cut = len(text) - beginning_of(self._strings, text)
        self._waiting = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What waited in vain, at the end of the text."""
        text, self._waiting = self._waiting, ""
        return text
