"""Text to token ids and back: the `tokenizers` library, the model's special ids and its chat template in one class.

    tokenizer = Tokenizer.open(folder)
    ids = tokenizer.chat([{"role": "user", "content": "Hello"}])
    stream = tokenizer.stream(); text = "".join(map(stream.push, ids)) + stream.finish()

Reads `tokenizer.json` and, where present, `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json`
and `config.json`. Nothing is ever truncated or padded here, whatever `tokenizer.json` says.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import tokenizers

from quantkit.checkpoint.regular import open_regular, read_at, refuse_pointer
from quantkit.errors import CheckpointError, RequestError
from quantkit.runtime.chat import ChatTemplate, Message, find_template, read_json

REPLACEMENT = "\ufffd"


class Tokenizer:
    """One model's vocabulary. Make it with `Tokenizer.open`.

    eos_ids     every id that ends an answer, from all files that name one
    bos_id      the id that begins a text, or None
    adds_bos    whether `encode(…, special=True)` puts `bos_id` in front
    vocab_size  one more than the highest id; a model's embedding may have more rows, as padding
    """

    def __init__(self, library: tokenizers.Tokenizer, folder: Path, tokenizer_config: Mapping[str, Any]) -> None:
        library.no_truncation()
        library.no_padding()
        self.folder = folder
        self._library = library
        self._config = tokenizer_config
        self._template: ChatTemplate | None = None
        self.vocab_size = 1 + max(library.get_vocab(with_added_tokens=True).values())
        self.special_ids = frozenset(
            index for index, token in library.get_added_tokens_decoder().items() if token.special
        )
        self.bos_id = _bos_id(library, folder, tokenizer_config)
        self.eos_ids = _eos_ids(library, folder, tokenizer_config)
        begins_with = library.encode("", add_special_tokens=True).ids[:1]
        self._library_adds_bos = self.bos_id is not None and begins_with == [self.bos_id]
        self.adds_bos = self._library_adds_bos or (
            self.bos_id is not None and tokenizer_config.get("add_bos_token") is True
        )

    @classmethod
    def open(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a checkpoint folder.

        Raises CheckpointError: no `tokenizer.json` (a lone `tokenizer.model` cannot be read), or a damaged side file.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise _absent(folder)
        with open_regular(file) as (descriptor, status):
            raw = bytes(read_at(descriptor, status.st_size, 0))
        refuse_pointer(file, raw)
        try:
            library = tokenizers.Tokenizer.from_buffer(raw)  # not from its path, which need not be UTF-8
        except Exception as error:  # the library raises bare Exception for anything it cannot parse
            raise CheckpointError(f"`{file}` cannot be read: {error}", hint="fetch this file again") from error
        if library.get_vocab_size(with_added_tokens=True) == 0:
            raise CheckpointError(f"`{file}` has an empty vocabulary", hint="fetch this file again")
        return cls(library, folder, read_json(folder / "tokenizer_config.json"))

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of `text`. With `special` also those which this tokenizer puts around a text, `bos_id` at most once.

        Special tokens spelled out in `text` become their ids either way. Raises RequestError for lone surrogates.
        """
        try:
            ids = list(self._library.encode(text, add_special_tokens=special).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "the text is not valid Unicode: it holds half of a surrogate pair", hint="pass the text as UTF-8"
            ) from error
        if not (special and self.adds_bos):
            return ids
        if not self._library_adds_bos:
            ids = [self.bos_id, *ids] if self.bos_id is not None else ids
        return ids[1:] if ids[1:2] == [self.bos_id] else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out; equal to what `stream` yields for them.

        Bytes that form no character become U+FFFD, each run of them without touching its neighbours.
        """
        text = self._decode(ids)
        if REPLACEMENT not in text:
            return text
        stream = self.stream()
        return "".join([*map(stream.push, ids), stream.finish()])

    def stream(self) -> "TokenStream":
        """A decoder that takes one id at a time."""
        return TokenStream(self)

    def token(self, index: int) -> str:
        """How the vocabulary spells one id, for messages; a number where it has no such id."""
        known = 0 <= index < self.vocab_size  # the library takes 32 bits
        return (self._library.id_to_token(index) if known else None) or str(index)

    def vocabulary(self) -> dict[str, int]:
        """Every token with its id."""
        return dict(self._library.get_vocab(with_added_tokens=True))

    def id_of(self, token: str) -> int | None:
        """The id of one token, as the vocabulary spells it or as a number; None where there is no such token."""
        index = self._library.token_to_id(token)
        if index is None and token.isdecimal() and int(token) < self.vocab_size:
            return int(token)
        return index

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to where the model is to answer. The template alone decides about BOS.

        Raises RequestError if the model has no chat template or the template refuses the messages.
        """
        return self.encode(self.template().render(messages))

    def template(self) -> ChatTemplate:
        """The model's chat template. Raises RequestError if it has none, CheckpointError if it does not compile."""
        if self._template is None:
            found = find_template(self.folder, self._config)
            if found is None:
                raise RequestError(f"`{self.folder}` has no chat template", hint="use `--prompt` with plain text")
            self._template = ChatTemplate(*found, tokens=_token_texts(self.folder, self._config))
        return self._template

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode(list(ids), skip_special_tokens=True))


class TokenStream:
    """Ids in, text out, never half a character: bytes wait until they are complete or `finish` is called.

    What a token adds depends on its neighbours (a first space is dropped, bytes join into characters), so each piece is
    the text of `context + pending` less that of `context`, where `context` ended on a whole character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode, self._special = tokenizer._decode, tokenizer.special_ids
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, index: int) -> str:
        """The text that this id completes, often "" for a part of a character or a special token."""
        if index in self._special:
            return ""
        self._pending.append(index)
        text = self._decode(self._context + self._pending)
        return "" if text.endswith(REPLACEMENT) else self._release(text)

    @property
    def unfinished(self) -> bool:
        """Whether a character has begun that is not complete."""
        return bool(self._pending)

    def copy(self) -> "TokenStream":
        """A decoder in the same state, which goes its own way from here on."""
        other = copy(self)
        other._pending = list(self._pending)
        return other

    def finish(self) -> str:
        """What was held back; U+FFFD stands for bytes that never became a character."""
        return self._release(self._decode(self._context + self._pending)) if self._pending else ""

    def _release(self, text: str) -> str:
        before = self._decode(self._context)
        # Some decoders spoil a whole run of byte tokens for one bad byte, the already released ones too.
        piece = text[len(before) :] if text.startswith(before) else self._decode(self._pending)
        self._context, self._pending = self._pending, []
        return piece


def _absent(folder: Path) -> CheckpointError:
    if not folder.is_dir():
        return CheckpointError(f"`{folder}` is not a folder", hint="pass the folder of a model")
    if (folder / "tokenizer.model").is_file():
        return CheckpointError(
            f"`{folder}` has a `tokenizer.model` but no `tokenizer.json`, and only the latter can be read",
            hint=f"python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}')"
            f".save_pretrained('{folder}')\"",
        )
    return CheckpointError(
        f"`{folder}` has no `tokenizer.json`",
        hint=f"copy the original model's `tokenizer.json` and `tokenizer_config.json` to `{folder}`",
    )


def _text_of(token: Any) -> str | None:
    """A token as side files spell it: a text, or an object with the text under `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _token_texts(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … as a chat template sees them."""
    merged = {**read_json(folder / "special_tokens_map.json"), **tokenizer_config}
    return {
        key: text for key, value in merged.items() if key.endswith("_token") and (text := _text_of(value)) is not None
    }


def _bos_id(library: tokenizers.Tokenizer, folder: Path, tokenizer_config: Mapping[str, Any]) -> int | None:
    """`bos_token` of the tokenizer's own files where they mention it, be it null; else `bos_token_id` of the config."""
    for content in (tokenizer_config, read_json(folder / "special_tokens_map.json")):
        if "bos_token" in content:
            text = _text_of(content["bos_token"])
            return None if text is None else library.token_to_id(text)
    return next(iter(_ids_in(folder / "config.json", "bos_token_id")), None)


def _eos_ids(library: tokenizers.Tokenizer, folder: Path, tokenizer_config: Mapping[str, Any]) -> frozenset[int]:
    """The union of `generation_config.json`, `config.json` and the tokenizer's own `eos_token`.

    Chat models often end a turn with an id that only one of these names. Raises CheckpointError when the only thing
    named is a token that the vocabulary lacks: nothing could ever stop such a model.
    """
    ids = {
        *_ids_in(folder / "generation_config.json", "eos_token_id"),
        *_ids_in(folder / "config.json", "eos_token_id"),
    }
    text = _token_texts(folder, tokenizer_config).get("eos_token")
    if text is not None and (index := library.token_to_id(text)) is not None:
        ids.add(index)
    elif text is not None and not ids:
        raise CheckpointError(
            f"`eos_token` in `{folder / 'tokenizer_config.json'}` is `{text}`, which `tokenizer.json` does not have",
            hint="add the token to `tokenizer.json` or name another `eos_token`",
        )
    return frozenset(ids)


def _ids_in(file: Path, key: str) -> list[int]:
    """An id field as the files spell it: an integer, a list of them, null or absent; negative means none."""
    content = read_json(file)
    nested = content.get("text_config")
    found = content.get(key, nested.get(key) if isinstance(nested, dict) else None)
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(isinstance(index, bool) or not isinstance(index, int) for index in ids):
        raise CheckpointError(
            f"`{key}` in `{file}` is {found!r}, expected an integer, a list of integers or null",
            hint="correct it, or fetch this file again",
        )
    return [index for index in ids if index >= 0]
