"""A model's chat template: found among its files, compiled in a sandbox, rendered within limits.

A template is code that came with somebody else's weights. It runs in the sandbox of `chat_sandbox`, sees only what
it is handed, and cannot be very long, count very far, repeat text without end or write very much. It knows no token
ids.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import jinja2

from quantkit.checkpoint.regular import open_regular, read_at, refuse_pointer
from quantkit.errors import CheckpointError, RequestError
from quantkit.runtime.chat_sandbox import Refusal, Sandbox

MAX_SIDE_BYTES = 1 << 25
MAX_SOURCE_CHARS = 1 << 17
MAX_OUTPUT_CHARS = 1 << 23

AGAIN = "fetch this file again"
PLAIN_TEXT = "use `--prompt` with plain text, or mend the template"

Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled template. `render` turns messages into the text the model was trained to read."""

    def __init__(self, source: str, file: Path, tokens: Mapping[str, str]) -> None:
        """`file` is named in errors; `tokens` are the special tokens a template may print (`bos_token`, …).

        Raises CheckpointError for a template that is too long or does not compile.
        """
        self.file = file
        self._tokens = dict(tokens)
        if len(source) > MAX_SOURCE_CHARS:
            raise CheckpointError(
                f"the chat template in `{file}` has {len(source)} characters, more than the "
                f"{MAX_SOURCE_CHARS} that are accepted",
                hint="use `--prompt` with plain text",
            )
        self._sandbox, self._turn = Sandbox(), Lock()
        try:
            self._template = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template in `{file}` does not compile: line {error.lineno}: {error.message}",
                hint=PLAIN_TEXT,
            ) from error
        except Exception as error:  # RecursionError, MemoryError and SyntaxError, of what is nested too deeply
            message = f"the chat template in `{file}` does not compile: {error}"
            raise CheckpointError(message, hint=PLAIN_TEXT) from error

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, answer: bool = True
    ) -> str:
        """The conversation as text, special tokens spelled out; with `answer` it ends where the model is to go on.

        Raises RequestError where the template itself refuses the messages, CheckpointError where it fails.
        """
        try:
            return self._write(
                {
                    **self._tokens,
                    "messages": [dict(message) for message in messages],
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": answer,
                }
            )
        except Refusal as error:
            raise RequestError(
                f"the chat template in `{self.file}` refuses these messages: {error.message}",
                hint="change the roles or their order, or use `--prompt` with plain text",
            ) from error
        except Exception as error:  # whatever foreign code may raise: TypeError, OverflowError, UndefinedError, …
            raise CheckpointError(
                f"the chat template in `{self.file}` fails: {error}",
                hint=PLAIN_TEXT,
            ) from error

    def _write(self, values: dict[str, Any]) -> str:
        written, pieces = 0, []
        with self._turn:
            self._sandbox.begin()
            for piece in self._template.generate(values):
                written += len(piece)
                if written > MAX_OUTPUT_CHARS:
                    raise jinja2.TemplateRuntimeError(f"it writes more than {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        return "".join(pieces)


def find_template(folder: Path, tokenizer_config: Mapping[str, Any], name: str = "default") -> tuple[str, Path] | None:
    """The source of the template called `name` and the file it stands in, or None if the model has none.

    Newest spelling first: `chat_template.jinja` (others in `additional_chat_templates/`), `chat_template.json`, then
    `chat_template` in `tokenizer_config.json`; the last two hold one text or a list of named ones.
    Raises CheckpointError when there are templates but none of that name.
    """
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (main := folder / "chat_template.jinja").is_file():
        files["default"] = main
    if name in files:
        try:
            return _read(files[name]).decode("utf-8"), files[name]
        except UnicodeDecodeError as error:
            raise CheckpointError(f"`{files[name]}` is not UTF-8 text: {error}", hint=AGAIN) from error
    for file in (folder / "chat_template.json", folder / "tokenizer_config.json"):
        content = tokenizer_config if file.name == "tokenizer_config.json" else read_json(file)
        if (found := content.get("chat_template")) is not None:
            return _named(found, name, file), file
    return None


def _named(found: Any, name: str, file: Path) -> str:
    if isinstance(found, str):
        return found
    if isinstance(found, list):
        found = {
            entry["name"]: entry["template"]
            for entry in found
            if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
        }
    if not isinstance(found, dict) or not found or not all(isinstance(source, str) for source in found.values()):
        raise CheckpointError(
            f"`chat_template` in `{file}` is neither a text nor a list of named templates", hint=PLAIN_TEXT
        )
    if name in found:
        return str(found[name])
    if len(found) == 1:
        return str(next(iter(found.values())))
    raise CheckpointError(
        f"`chat_template` in `{file}` has no template `{name}`, only {', '.join(map(repr, found))}", hint=PLAIN_TEXT
    )


def read_json(file: Path) -> dict[str, Any]:
    """An optional side file of a checkpoint as a dict, empty where it is absent. Raises CheckpointError if damaged."""
    if not os.path.lexists(file):
        return {}
    raw = _read(file)
    try:
        content = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"`{file}` cannot be read as JSON: {error}", hint=AGAIN) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"`{file}` holds a JSON {type(content).__name__}, not an object", hint=AGAIN)
    return content


def _read(file: Path) -> bytearray:
    """Raises CheckpointError for what is no file, too large, or what git-LFS leaves in place of one."""
    with open_regular(file) as (descriptor, status):
        if status.st_size > MAX_SIDE_BYTES:
            raise CheckpointError(
                f"`{file}` holds {status.st_size} bytes; at most {MAX_SIDE_BYTES} are read", hint=AGAIN
            )
        raw = read_at(descriptor, status.st_size, 0)
    refuse_pointer(file, raw)
    return raw
