"""Token lists that agree with each other and with the embedding, or are refused."""

from pathlib import Path

import pytest

from quantkit.checkpoint.gguf_header import Metadata
from quantkit.checkpoint.gguf_vocabulary import Vocabulary, read_vocabulary
from quantkit.errors import CheckpointError

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "<tool>", "[PAD]"]
VALUES = {"tokens": TOKENS, "token_type": [2, 3, 3, 1, 1, 4, 5], "bos_token_id": 1, "eos_token_id": 2, "eot_token_id": 4}


def read(vocab_size: int = len(TOKENS), **changes) -> Vocabulary:
    values = {f"tokenizer.ggml.{key}": value for key, value in {**VALUES, **changes}.items() if value is not None}
    return read_vocabulary(Metadata(values, Path("x.gguf")), vocab_size)


def test_roles_and_their_texts() -> None:
    vocabulary = read()
    assert vocabulary.roles == {"bos": 1, "eos": 2, "eot": 4}
    assert [vocabulary.text(role) for role in ("bos", "eot", "padding")] == ["<s>", "b", None]


def test_added_tokens_are_those_of_a_special_type_or_a_role() -> None:
    added = {token["content"]: (token["id"], token["special"]) for token in read().added_tokens()}
    assert added == {"<unk>": (0, True), "<s>": (1, True), "</s>": (2, True), "b": (4, True), "<tool>": (5, False)}


def test_without_types_every_token_is_normal() -> None:
    assert [token["id"] for token in read(token_type=None).added_tokens()] == [1, 2, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "`x.gguf` has no metadata `tokenizer.ggml.tokens`"),
        ({"tokens": [], "token_type": []}, "expected every token once"),
        ({"tokens": [1, 2]}, "`tokenizer.ggml.tokens` of `x.gguf` is a list of int, expected a list of str"),
        ({"tokens": "a"}, "is a str, expected a list"),
        ({"token_type": [1]}, "`tokenizer.ggml.token_type` of `x.gguf` has 1 entries for 7 tokens"),
        ({"tokens": [*TOKENS[:-1], "a"]}, "`tokenizer.ggml.tokens` of `x.gguf` has `a` 2 times, expected every token once"),
        ({"eos_token_id": 7}, "`tokenizer.ggml.eos_token_id` of `x.gguf` is 7, expected less than 7"),
        ({"eos_token_id": -1}, "`tokenizer.ggml.eos_token_id` of `x.gguf` is -1, expected less than 7"),
        ({"vocab_size": 6}, "`tokenizer.ggml.tokens` of `x.gguf` has 7 tokens for 6 rows of the embedding"),
    ],
)
def test_contradictions_are_named(changes, message) -> None:
    with pytest.raises(CheckpointError) as error:
        read(**changes)
    assert message in error.value.message
    assert error.value.hint
