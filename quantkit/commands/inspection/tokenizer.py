"""Faults of the tokenizer in a folder, whether it belongs to the model, and what is known of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.folder import side_files
from quantkit.checkpoint.links import leading_out
from quantkit.checkpoint.regular import LFS_OPENING, open_regular, read_at, refuse_pointer
from quantkit.errors import CheckpointError, QuantkitError, RequestError
from quantkit.runtime.chat import find_template, read_json
from quantkit.runtime.tokenizer import Tokenizer

BELONGS_HINT = "copy the tokenizer files of the original model into the folder"
SMALL_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What is known of a tokenizer; `template` is the file that its chat template stands in."""

    vocabulary: int
    bos: str | None
    eos: tuple[str, ...]
    adds_bos: bool
    template: str | None

    def rows(self) -> list[list[str]]:
        return [
            ["tokenizer", f"{self.vocabulary:,} entries"],
            [
                "begins with",
                (self.bos or "nothing") + ("" if self.adds_bos or not self.bos else ", not added by itself"),
            ],
            ["ends with", ", ".join(self.eos) or "nothing"],
            ["chat template", self.template or "none"],
        ]


def tokenizer_faults(
    folder: Path, config: Mapping[str, Any], vocabulary: int | None
) -> tuple[list[QuantkitError], list[str], TokenizerFacts | None]:
    """Faults, notes and facts. `vocabulary` is the number of ids that the model knows, None where that is unknown.
    None of them where links lead out of the folder, which is for `survey` to tell: what they lead to is not read."""
    if folder.is_dir() and leading_out(folder, side_files(folder)):
        return [], [], None
    faults, notes = pointers(folder) if folder.is_dir() else [], list[str]()
    try:
        tokenizer = Tokenizer.open(folder)
    except QuantkitError as error:
        if all(error.message != fault.message for fault in faults):
            faults.append(error)
        return faults, notes, None
    if vocabulary is not None:
        faults += _of_vocabulary(folder, tokenizer, config, vocabulary, notes)
    if not tokenizer.eos_ids:
        notes.append("no file names a token that ends an answer: only a limit of tokens will")
    template = None
    try:
        found = find_template(folder, read_json(folder / "tokenizer_config.json"))
        template = None if found is None else found[1].name
        if found is not None:
            tokenizer.template().render([{"role": "user", "content": "Hello"}])
        else:
            notes.append("no chat template: prompts are plain text")
    except RequestError as error:
        notes.append(error.message)
    except QuantkitError as error:
        faults.append(error)
    spelled = [tokenizer.token(index) for index in sorted(tokenizer.eos_ids)]
    bos = None if tokenizer.bos_id is None else tokenizer.token(tokenizer.bos_id)
    return faults, notes, TokenizerFacts(tokenizer.vocab_size, bos, tuple(spelled), tokenizer.adds_bos, template)


def pointers(folder: Path) -> list[QuantkitError]:
    """Files beside the weights that are git-LFS pointers, and not what they are called."""
    faults: list[QuantkitError] = []
    for file in side_files(folder):
        if not file.is_file():
            continue
        try:
            with open_regular(file) as (descriptor, _):
                refuse_pointer(file, read_at(descriptor, len(LFS_OPENING), 0))
        except QuantkitError as error:
            faults.append(error)
    return faults


def _of_vocabulary(
    folder: Path, tokenizer: Tokenizer, config: Mapping[str, Any], vocabulary: int, notes: list[str]
) -> list[QuantkitError]:
    faults: list[QuantkitError] = []
    told: set[int] = set()
    if tokenizer.vocab_size > vocabulary:
        faults.append(
            CheckpointError(
                f"the tokenizer in `{folder}` has ids up to {tokenizer.vocab_size - 1}, the model knows {vocabulary}: "
                "they do not belong together",
                hint=BELONGS_HINT,
            )
        )
    elif tokenizer.vocab_size < SMALL_SHARE * vocabulary:
        notes.append(
            f"the tokenizer has {tokenizer.vocab_size:,} entries, the model {vocabulary:,}: padding, or another's"
        )
    for key in ("bos_token_id", "eos_token_id"):
        said = config.get(key)
        ids = said if isinstance(said, list) else [said]
        for index in ids:
            if not isinstance(index, int) or isinstance(index, bool) or index < 0:
                continue
            if index >= vocabulary:
                why = f"the model knows {vocabulary} ids"
            elif tokenizer.token(index) == str(index):
                why = "the tokenizer has no such id"
            else:
                continue
            told.add(index)
            faults.append(
                CheckpointError(f"`{key}` in `{folder / 'config.json'}` is {index}, but {why}", hint=BELONGS_HINT)
            )
    faults += [
        CheckpointError(f"a stop token of `{folder}` has id {index}, the model knows {vocabulary}", hint=BELONGS_HINT)
        for index in sorted(tokenizer.eos_ids - told)
        if index >= vocabulary
    ]
    return faults
