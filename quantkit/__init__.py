"""quantkit: quantize language models, convert between formats, prove each result.

The public API has the verbs of the command line; each name is imported when it is first used, so that
`import quantkit` costs nothing.
"""

import importlib
from typing import Any

from quantkit.version import VERSION

__version__ = VERSION

_HOMES = {
    "quantize": "quantkit.commands.quantize",
    "measure": "quantkit.commands.measure",
    "check": "quantkit.commands.check",
    "convert": "quantkit.commands.convert",
    "inspect": "quantkit.commands.inspect",
    "evaluate": "quantkit.commands.evaluate",
    "generate": "quantkit.commands.generate",
    "recommend": "quantkit.commands.recommend",
    "load": "quantkit.runtime.load",
    "open_checkpoint": "quantkit.checkpoint.reader",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
