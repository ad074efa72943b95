"""Keys: reading config.json with every missing or unusable value named, and every key that was used remembered."""

import sys
from collections.abc import Mapping
from typing import Any

from quantkit.errors import CheckpointError, UnsupportedModel

REQUIRED: Any = object()


class Keys:
    """The values of one JSON object.

    A `default` is taken when a key is absent or null; without one such a key is an error. `where` names the object in
    messages: the file, and inside it the path of a nested object.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where
        self.used: set[str] = set()

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The value as it is; a key that must be there but may be null is asked for with `nullable`."""
        self.used.add(name)
        value = self.values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise CheckpointError(
                f"`{name}` is missing in `{self.where}`",
                hint=f"add `{name}` with the value the model was trained with",
            )
        return default

    def nullable(self, name: str) -> Any:
        """A key whose absence would be ambiguous, while null has a meaning of its own."""
        if name not in self.values:
            self.take(name)
        return self.take(name, None)

    def whole(self, name: str, default: Any = REQUIRED) -> Any:
        """A positive integer."""
        value = self.take(name, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise self.refuse(name, "expected a positive integer")
        return value

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """A positive number, as float."""
        value = self.take(name, default)
        if value is default:
            return default
        if not _is_positive_number(value):
            raise self.refuse(name, "expected a positive number")
        return float(value)

    def flag(self, name: str, default: Any = REQUIRED) -> Any:
        """True or false."""
        value = self.take(name, default)
        if value is not default and not isinstance(value, bool):
            raise self.refuse(name, "expected true or false")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        value = self.take(name, default)
        if value is not default and not isinstance(value, str):
            raise self.refuse(name, "expected a string")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of that many positive numbers."""
        value = self.take(name)
        usable = isinstance(value, list) and all(map(_is_positive_number, value))
        if not usable or len(value) != length:
            raise self.refuse(name, f"expected a list of {length} positive numbers")
        return tuple(float(item) for item in value)

    def refuse(self, name: str, reason: str) -> UnsupportedModel:
        """The error for a value that cannot be honoured."""
        shown = repr(self.values.get(name))
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return UnsupportedModel(
            f"`{name}` is {shown} in `{self.where}`: {reason}",
            hint=f"correct `{name}` if it is wrong; if it is right, this model is not supported",
        )


def _is_positive_number(value: Any) -> bool:
    """A finite one, which a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
