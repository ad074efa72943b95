"""The vocabulary in the metadata of a GGUF file: tokens, their types, and which of them have a role."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.checkpoint.gguf_header import Metadata
from quantkit.checkpoint.header import DAMAGED_HINT, shown
from quantkit.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # `tokenizer.ggml.token_type`
ROLES = ("bos", "eos", "unknown", "padding", "eot", "eom")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens and their types by id, and the ids that have a role."""

    tokens: Sequence[str]
    types: Sequence[int]
    roles: dict[str, int]

    def text(self, role: str) -> str | None:
        return self.tokens[self.roles[role]] if role in self.roles else None

    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that are cut out of a text before all else: control tokens, a user's own, and those with a role.

        As entries of `added_tokens` in tokenizer.json.
        """
        roles = set(self.roles.values())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": index, "content": token, **flags, "special": kind != USER_DEFINED or index in roles}
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in {UNKNOWN, CONTROL, USER_DEFINED} or index in roles
        ]


def read_vocabulary(metadata: Metadata, vocab_size: int) -> Vocabulary:
    """The token lists, checked against each other and against the embedding."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    types = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = metadata.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise contradiction(metadata, "tokenizer.ggml.token_type", f"has {len(types)} entries for {len(tokens)} tokens")
    key = "tokenizer.ggml.tokens"
    if len(tokens) > vocab_size:
        raise contradiction(metadata, key, f"has {len(tokens)} tokens for {vocab_size} rows of the embedding")
    token, times = Counter(tokens).most_common(1)[0] if tokens else ("", 0)
    if times != 1:
        raise contradiction(metadata, key, f"has {shown(token)} {times} times, expected every token once")
    keys = {role: f"tokenizer.ggml.{role}_token_id" for role in ROLES}
    roles = {role: metadata.integer(key) for role, key in keys.items() if key in metadata}
    for role, index in roles.items():
        if not 0 <= index < len(tokens):
            fault = f"is {index}, expected less than {len(tokens)}, the number of tokens"
            raise contradiction(metadata, keys[role], fault)
    return Vocabulary(tokens, types, roles)


def contradiction(metadata: Metadata, key: str, fault: str) -> CheckpointError:
    """Metadata that cannot all be true; `fault` goes on behind the name of one entry."""
    return CheckpointError(f"{metadata.at(key)} {fault}", hint=DAMAGED_HINT)
