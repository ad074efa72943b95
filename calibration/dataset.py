"""Named data sets: the text of one, streamed from the hub or, without a network, from the local cache.

The libraries `datasets` and `huggingface_hub` are imported here alone, and only when a name is asked for.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, TypeVar

from quantkit.errors import CalibrationError

SHORT_NAMES = {"wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1"), "c4": ("allenai/c4", "en")}
HINT = "give local text instead: a `.parquet` (column `text`), `.jsonl` (key `text`) or UTF-8 FILE"
SHUFFLE_BUFFER = 1000

Row = TypeVar("Row")


def read_dataset(name: str, split: str, limit: int | None = None, seed: int | None = None) -> list[str]:
    """Column `text` of a data set: of a hub id, or of a short name.

    limit   stop after this many characters
    seed    shuffle with it (a buffer of `SHUFFLE_BUFFER` documents); None keeps the order
    Raises CalibrationError where it cannot be read, at once where there is neither a network nor a copy in the cache.
    """
    return _read(name, split, seed, lambda path, stream: _texts(path, stream, limit))


def read_rows(name: str, split: str, limit: int | None = None) -> list[dict[str, Any]]:
    """The first rows of a data set as they are, of a hub id or `id:configuration`. Raises as `read_dataset` does."""
    return _read(name, split, None, lambda path, stream: [dict(row) for row in itertools.islice(stream, limit)])


def _read(name: str, split: str, seed: int | None, take: Callable[[str, Any], list[Row]]) -> list[Row]:
    try:
        import datasets
    except ImportError as error:
        raise CalibrationError(
            f"data set `{name}` cannot be read: the package `datasets` is not installed", hint=HINT
        ) from error
    path, _, named = name.partition(":")
    path, config = SHORT_NAMES.get(path, (path, named or None))
    failure = _why_unreachable(path)
    try:
        with _cache_alone(datasets) if failure else nullcontext():
            stream = datasets.load_dataset(path, config, split=split, streaming=True)
            if seed is not None:
                stream = stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
            return take(path, stream)
    except CalibrationError:
        raise
    except Exception as error:  # the library raises its own, the hub's and the HTTP client's errors
        reason = _first_line(error)
        if failure:
            reason = f"the hub cannot be reached ({failure}), and the local cache has no such data set"
        raise CalibrationError(f"data set `{path}` cannot be read: {reason}", hint=HINT) from error


def _texts(path: str, stream: Any, limit: int | None) -> list[str]:
    documents: list[str] = []
    characters = 0
    for row in stream:
        if not isinstance(row.get("text"), str):
            columns = ", ".join(f"`{column}`" for column in row)
            raise CalibrationError(f"data set `{path}` has no column `text` of strings, only {columns}", hint=HINT)
        documents.append(row["text"])
        characters += len(documents[-1])
        if limit is not None and characters >= limit:
            break
    return documents


def _why_unreachable(path: str) -> str | None:
    """Asks the hub once for a data set; None when it answers, be it with a refusal.

    `datasets` on its own asks again and again for the better part of a minute before it gives up.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        huggingface_hub.HfApi().dataset_info(path)
    except HFValidationError as error:
        hint = f"write `organisation/name`, or {HINT}"
        raise CalibrationError(f"`{path}` is no name of a data set", hint=hint) from error
    except HfHubHTTPError as error:
        return _first_line(error) if error.response.status_code >= 500 else None
    except Exception as error:  # of the HTTP client, which is another one with each major version
        return _first_line(error)
    return None


@contextmanager
def _cache_alone(datasets: ModuleType) -> Iterator[None]:
    """`datasets` looks into its cache only. The library has no argument for that, just a switch."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
