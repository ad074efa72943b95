"""Text → token rows `[rows, length]`: the bundled sample, a local file, or a named dataset.

Packing: the documents of a source are joined by a blank line into one text, its tokens are cut into windows that do
not overlap, and the rows are windows drawn without replacement. Every row begins with what the tokenizer puts before
any text (a BOS token in some families, nothing in others), so that calibration sees what generation will see. The draw
depends on the seed alone. A source far longer than what is asked for is tokenized in part: see `CHARACTERS_PER_TOKEN`.
"""

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.calibration.dataset import read_dataset
from quantkit.calibration.json_lines import decode, parse_line
from quantkit.errors import CalibrationError, in_shell

HELD_BACK = "held-back.txt"
PIECE_CHARACTERS = 1 << 16  # tokenized at once: bounds the memory of the tokenizer
USUAL_SAMPLES = 128
CHARACTERS_PER_TOKEN = 32  # of a longer source only this much text is tokenized for each token asked for
ROW_HINT = 'each line of `.jsonl` looks like {"text": "…"}; the Parquet column `text` holds strings'


@dataclass(frozen=True, slots=True)
class Part:
    """One bundled file and its share of the rows."""

    file: str
    share: float


# Rows of each kind: most of what such models read and write is prose; code and other scripts wake other channels.
BUNDLED = (
    Part("prose.txt", 0.35),
    Part("technical.txt", 0.20),
    Part("code.txt", 0.20),
    Part("multilingual.txt", 0.25),
)


class Encoder(Protocol):
    """What this module needs of a tokenizer; `special=True` adds what the model expects around a text."""

    def encode(self, text: str, special: bool = False) -> list[int]: ...


def token_rows(source: str, tokenizer: Encoder, samples: int, length: int, seed: int) -> Tensor:
    """Calibration rows, int64 `[samples, length]`.

    source   "bundled"; an existing path, always a file (see `read_documents`); else the name of a dataset
    Raises CalibrationError when the source cannot be read or holds fewer than `samples` windows.
    """
    generator = random.Random(seed)
    head = _head(tokenizer)
    limit = samples * length * CHARACTERS_PER_TOKEN
    if source == "bundled":
        sources = [(_bundled(part.file), part.share) for part in BUNDLED]
    elif Path(source).exists() or _looks_like_file(source):
        sources = [(read_documents(Path(source)), 1.0)]
    else:
        sources = [(_read_named(source, limit, seed), 1.0)]
    if samples > (most := _most_rows(sources, length - len(head))):
        raise CalibrationError(
            f"calibration text too short: `{source}` cannot have more than {most} rows of {length} tokens, "
            f"and {samples} rows are asked for",
            hint=f"use `--samples {min(most, USUAL_SAMPLES)}`, or longer text with `--calibration FILE`",
        )
    streams = [(_encode(_excerpt(documents, limit, generator), tokenizer), share) for documents, share in sources]
    windows = [(_windows(tokens, head, length), share) for tokens, share in streams]
    rows = sum(len(part) for part, _ in windows)
    if rows < samples:
        tokens = sum(len(tokens) for tokens, _ in streams)
        raise CalibrationError(
            f"calibration text too short: `{source}` has {tokens:,} tokens, which is {rows} rows of {length} tokens, "
            f"and {samples} rows are asked for",
            hint=f"use `--samples {rows}`, a smaller `--length`, or longer text with `--calibration FILE`"
            if rows
            else "use a smaller `--length`, or longer text with `--calibration FILE`",
        )
    return _draw(windows, samples, generator)


def _most_rows(sources: Sequence[tuple[list[str], float]], body: int) -> int:
    """Known without a tokenizer: no token is less than a byte. One more for each piece that is tokenized by itself."""
    characters = [sum(map(len, documents)) for documents, _ in sources]
    if body < 1 or max(characters) < PIECE_CHARACTERS:
        return sys.maxsize  # `_windows` will refuse the one, and the other is counted in a moment
    encoded = ([document.encode("utf-8", "surrogatepass") for document in documents] for documents, _ in sources)
    sizes = (sum(len(document) + 2 for document in documents) for documents in encoded)
    return sum((size + size // PIECE_CHARACTERS + 2) // body for size in sizes)


def held_back(tokenizer: Encoder, length: int, windows: int) -> Tensor:
    """Rows of bundled text that calibration never sees, int64 `[at most windows, length]`, spread evenly over it."""
    tokens = _encode(_pieces(_bundled(HELD_BACK)), tokenizer)
    rows = _windows(tokens, _head(tokenizer), length)
    if not len(rows):
        raise CalibrationError(
            f"the held-back text has {len(tokens):,} tokens, fewer than one window of {length}",
            hint="use a smaller `--length`",
        )
    count = min(windows, len(rows))
    return rows[[i * len(rows) // count for i in range(count)]]


def held_back_text() -> str:
    """The bundled text that calibration never sees, whole."""
    return "\n\n".join(_bundled(HELD_BACK))


def read_text(path: Path) -> str:
    """A file as one text: the documents of `read_documents`, joined by a blank line."""
    return "\n\n".join(read_documents(path))


def read_documents(path: Path) -> list[str]:
    """The documents of a file: `.parquet` column `text`, `.jsonl` key `text`, any other ending one UTF-8 text."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "is a pipe or device" if path.exists() else ""
        raise CalibrationError(
            f"`{path}` {found}, not a text file" if found else f"no such file: `{path}`",
            hint="give a `.parquet`, `.jsonl` or text file",
        )
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        text = decode(path.read_bytes())  # not `read_text`, which would change line ends
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"`{path}` is not UTF-8 text: byte {error.start:,} cannot be decoded",
            hint=f"convert it: `iconv -t UTF-8 -o text.txt {in_shell(path)}`",
        ) from error
    except OSError as error:
        raise CalibrationError(
            f"`{path}` cannot be read: {error.strerror}", hint="give a file that you may read"
        ) from error
    return _read_jsonl(path, text) if path.suffix == ".jsonl" else [text]


def _read_named(source: str, limit: int, seed: int) -> list[str]:
    try:
        return read_dataset(source, "train", limit, seed)
    except CalibrationError as error:
        raise CalibrationError(f"`{source}` is no file here, and {error.message}", hint=error.hint) from error


def _looks_like_file(source: str) -> bool:
    return Path(source).suffix in {".parquet", ".jsonl", ".txt", ".md"} or source.startswith(("/", "./", "../", "~"))


def _bundled(name: str) -> list[str]:
    return [files("quantkit.calibration").joinpath("data", name).read_text(encoding="utf-8")]


def _read_parquet(path: Path) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        columns = pyarrow.parquet.read_schema(path).names
        if "text" not in columns:
            raise CalibrationError(
                f"`{path}` has no column `text`, only {', '.join(f'`{name}`' for name in columns)}",
                hint="rename the column that holds the text to `text`",
            )
        rows = pyarrow.parquet.read_table(path, columns=["text"]).column("text").to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise CalibrationError(
            f"`{path}` is not a readable Parquet file: {error}", hint="copy it again, or give a `.jsonl`"
        ) from error
    return [_text(row, f"row {number} of `{path}`") for number, row in enumerate(rows)]


def _read_jsonl(path: Path, content: str) -> list[str]:
    documents = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_line(line)
        except ValueError as error:
            raise CalibrationError(f"line {number} of `{path}` is not JSON: {error}", hint=ROW_HINT) from error
        documents.append(_text(row.get("text") if isinstance(row, dict) else None, f"line {number} of `{path}`"))
    return documents


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise CalibrationError(f"{place} has no text under `text`, but {type(value).__name__}", hint=ROW_HINT)
    return value


def _pieces(documents: Sequence[str]) -> list[str]:
    """The documents joined by blank lines, cut again into pieces that end at a paragraph, a line or a word."""
    pieces = []
    for number, document in enumerate(documents):
        text = document if number == len(documents) - 1 else document + "\n\n"
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            end = _last_border(text, start, start + PIECE_CHARACTERS)
            pieces.append(text[start:end])
            start = end
        pieces.append(text[start:])
    return [piece for piece in pieces if piece]


def _last_border(text: str, start: int, reach: int) -> int:
    """Where the last paragraph, line or word inside `text[start:reach]` ends; `reach` when there is none."""
    for mark in ("\n\n", "\n", " "):
        place = text.rfind(mark, start, reach)
        if place >= 0:
            return place + len(mark)
    return reach


def _excerpt(documents: Sequence[str], limit: int, generator: random.Random) -> list[str]:
    """The pieces of a text; of one longer than `limit` characters a random choice that reaches it, in text order."""
    pieces = _pieces(documents)
    if sum(map(len, pieces)) <= limit:
        return pieces
    chosen, characters = [], 0
    for number in generator.sample(range(len(pieces)), len(pieces)):
        chosen.append(number)
        characters += len(pieces[number])
        if characters >= limit:
            break
    return [pieces[number] for number in sorted(chosen)]


def _encode(pieces: Iterable[str], tokenizer: Encoder) -> Tensor:
    """int64 `[tokens]`."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.tensor(tokenizer.encode(piece)) for piece in pieces)])


def _head(tokenizer: Encoder) -> list[int]:
    """The tokens that the tokenizer puts before any text."""
    plain, full = tokenizer.encode("a"), tokenizer.encode("a", special=True)
    starts = [start for start in range(len(full) - len(plain) + 1) if full[start : start + len(plain)] == plain]
    return full[: starts[0]] if starts else []


def _windows(tokens: Tensor, head: list[int], length: int) -> Tensor:
    """`[n, length]`: windows of the stream that do not overlap, each behind the same head; the rest is dropped."""
    body = length - len(head)
    if body < 1:
        raise CalibrationError(f"a row of {length} tokens has no room for text", hint="use a greater `--length`")
    count = len(tokens) // body
    bodies = tokens[: count * body].reshape(count, body)
    return torch.cat([torch.tensor(head, dtype=torch.int64).expand(count, -1), bodies], dim=1)


def _draw(parts: Sequence[tuple[Tensor, float]], samples: int, generator: random.Random) -> Tensor:
    """Random windows of each part, interleaved so that every prefix keeps to the shares as nearly as it can."""
    left = [generator.sample(range(len(windows)), len(windows)) for windows, _ in parts]
    taken = [0] * len(parts)
    rows = []
    for _ in range(samples):
        open_parts = [number for number, windows in enumerate(left) if windows]
        number = min(open_parts, key=lambda part: (taken[part] + 1) / parts[part][1])
        rows.append(parts[number][0][left[number].pop()])
        taken[number] += 1
    return torch.stack(rows)
