"""Tokenizers from metadata: cuts stated by hand, merges against a plain implementation, contradictions refused."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quantkit.checkpoint import gguf_tokenizer
from quantkit.checkpoint.gguf_header import Metadata
from quantkit.checkpoint.gguf_tokenizer import ImportedTokenizer
from quantkit.errors import CheckpointError, UnsupportedModel

BYTE_LEVEL = tiny_gguf.tokenizer_values()
SPECIAL = list(tiny.SPECIAL_TOKENS)


def rebuild(values: dict[str, Any], vocab_size: int = 300) -> ImportedTokenizer:
    given = {key.replace("@", "tokenizer.ggml."): value for key, value in values.items()}
    metadata = {key: value for key, value in {**BYTE_LEVEL, **given}.items() if value is not None}
    return gguf_tokenizer.rebuild(Metadata(metadata, Path("x.gguf")), vocab_size, 2048)


def load(imported: ImportedTokenizer) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(imported.tokenizer))


def encode(imported: ImportedTokenizer, text: str) -> list[str]:
    return load(imported).encode(text).tokens


# Text of every kind, between bars as each tokenizer cuts it: numbers with their space or digit by digit or in threes,
# marks with or without line ends, the last space of several with the next word, contractions in capitals.
CUTS = {
    "gpt-2": "It|'s| 12345| naïve|,!?|\n|\n|x|   | 77|'|LL",
    "smollm": "It|'s| |1|2|3|4|5| naïve|,!?|\n|\n|x|    |7|7|'|LL",
    "llama-bpe": "It|'s| |123|45| naïve|,!?\n\n|x|   | |77|'LL",
    "qwen2": "It|'s| |1|2|3|4|5| naïve|,!?\n\n|x|   | |7|7|'LL",
}


@pytest.mark.parametrize("pre", CUTS)
def test_text_is_cut_as_the_name_says(pre) -> None:
    text = CUTS[pre].replace("|", "")
    pre_tokenizer = load(rebuild({"@pre": pre})).pre_tokenizer
    assert "|".join(text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)) == CUTS[pre]


def test_names_of_the_same_tokenizer() -> None:
    rules = gguf_tokenizer.PRE_TOKENIZERS
    assert set(rules) == {*CUTS, "gpt2", "llama3", "llama-v3"}
    assert rules["gpt2"] == rules["gpt-2"]
    assert rules["llama3"] == rules["llama-v3"] == rules["llama-bpe"]


def test_merges_and_ids_are_those_of_the_file(tmp_path) -> None:
    tiny.write_tokenizer(tmp_path)
    original = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    rebuilt = load(rebuild({}))
    text = "The rest of <|im_start|>the ends\n\n and more: é 😀 <s> 123"
    assert rebuilt.encode(text).ids == original.encode(text).ids
    assert rebuilt.decode(rebuilt.encode(text).ids, skip_special_tokens=False) == text
    assert rebuilt.get_vocab() == original.get_vocab()


def test_only_qwen2_composes_accents() -> None:
    composed, apart = "é", "e\u0301"
    assert encode(rebuild({"@pre": "qwen2"}), apart) == encode(rebuild({}), composed)
    assert encode(rebuild({}), apart) != encode(rebuild({}), composed)


def test_whole_words_come_before_merges_where_the_tokenizer_says_so() -> None:
    values = {"@tokens": [*BYTE_LEVEL["tokenizer.ggml.tokens"], "zebra"], "@token_type": [*BYTE_LEVEL["tokenizer.ggml.token_type"], 1]}
    assert encode(rebuild({**values, "@pre": "llama-bpe"}), "zebra") == ["<s>", "zebra"]
    assert encode(rebuild(values), "zebra") == ["z", "e", "b", "r", "a"]


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({}, ["a"]),
        ({"@add_bos_token": True}, ["<s>", "a"]),
        ({"@add_bos_token": True, "@add_eos_token": True}, ["<s>", "a", "</s>"]),
        ({"@add_eos_token": True}, ["a", "</s>"]),
        ({"@pre": "llama-bpe"}, ["<s>", "a"]),
        ({"@pre": "llama-bpe", "@add_bos_token": False}, ["a"]),
        ({"@pre": "llama-bpe", "@bos_token_id": None}, ["a"]),
    ],
)
def test_bos_and_eos_are_added_where_the_file_says_so(values, tokens) -> None:
    imported = rebuild(values)
    assert encode(imported, "a") == tokens
    pair = [token for text in "ab" for token in [*tokens[: tokens.index("a")], text, *tokens[tokens.index("a") + 1 :]]]
    assert load(imported).encode("a", "b").tokens == pair


def test_added_tokens_by_type_and_role() -> None:
    tokens = [*BYTE_LEVEL["tokenizer.ggml.tokens"], "<tool>", "<end>", "[PAD1]"]
    types = [*BYTE_LEVEL["tokenizer.ggml.token_type"], 4, 1, 5]
    imported = rebuild({"@tokens": tokens, "@token_type": types, "@padding_token_id": tokens.index("<end>")})
    added = {token["content"]: (token["id"], token["special"]) for token in imported.tokenizer["added_tokens"]}
    expected = {token: (index, True) for index, token in enumerate(SPECIAL)}
    assert added == expected | {"<tool>": (276, False), "<end>": (277, True)}
    assert encode(imported, "a<tool>b<end>")[1::2] == ["<tool>", "<end>"]
    assert load(imported).token_to_id("[PAD1]") == 278


def test_the_other_files() -> None:
    imported = rebuild({})
    assert imported.tokenizer_config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": tiny.CHAT_TEMPLATE,
    }
    assert imported.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 4]}
    assert imported.config_ids == {"bos_token_id": 1, "eos_token_id": 2}
    assert imported.kind == "byte-level BPE, gpt-2"


def test_one_end_is_a_number_and_none_is_absent() -> None:
    assert rebuild({"@eot_token_id": 2, "@padding_token_id": 0}).generation_config == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    bare = rebuild(dict.fromkeys(("@bos_token_id", "@eos_token_id", "@eot_token_id"), None))
    assert bare.generation_config == bare.config_ids == {}


def test_named_chat_templates_become_a_list() -> None:
    key = "tokenizer.chat_template"
    imported = rebuild({f"{key}s": ["default", "tools"], f"{key}.tools": "T"})
    named = [{"name": "default", "template": tiny.CHAT_TEMPLATE}, {"name": "tools", "template": "T"}]
    assert imported.tokenizer_config["chat_template"] == named
    assert "chat_template" not in rebuild({key: None}).tokenizer_config


# A SentencePiece vocabulary: 3 control tokens, 256 bytes, letters, and pieces of which a higher score is joined first.
PIECES = {"ab": -1.0, "bc": 0.0, "abc": -3.0, "▁a": -2.0, "▁ab": -1.5, "ca": -2.5, "bca": -4.0, "▁▁": -0.5, "aa": -6.0}
LETTERS = ["▁", "a", "b", "c"]
SENTENCEPIECE = {
    "@model": "llama",
    "@tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *LETTERS],
    "@token_type": [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) + len(LETTERS))],
    "@scores": [0.0] * 259 + [*PIECES.values(), *[-10.0] * len(LETTERS)],
    "@merges": None,
    "@pre": None,
    "@eot_token_id": None,
}


def join_by_score(text: str) -> list[str]:
    """SentencePiece BPE as it is defined: join the neighbours whose union scores highest, leftmost first, to the end."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        scored = [(PIECES.get(left + right), -place) for place, (left, right) in enumerate(pairwise(pieces))]
        best = max((pair for pair in scored if pair[0] is not None), default=None)
        if best is None:
            break
        place = -best[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return [token for piece in pieces for token in in_vocabulary(piece)]


def in_vocabulary(piece: str) -> list[str]:
    return [piece] if piece in {*PIECES, *LETTERS} else [f"<0x{byte:02X}>" for byte in piece.encode()]


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="aabbcc  é", max_size=24))
def test_scores_become_merges_of_the_same_order(text) -> None:
    tokenizer = load(rebuild(SENTENCEPIECE))
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["<s>", *(join_by_score(text) if text else [])]
    assert tokenizer.decode(encoded.ids) == text


def test_sentencepiece_without_a_space_in_front() -> None:
    imported = rebuild({**SENTENCEPIECE, "@add_space_prefix": False, "@add_bos_token": False})
    assert encode(imported, "abc a") == ["abc", "▁a"]
    assert load(imported).decode(load(imported).encode(" a").ids) == " a"
    assert imported.kind == "SentencePiece BPE"


WITHOUT_BYTES = {
    **SENTENCEPIECE,
    "@tokens": ["<unk>", "<s>", "</s>", *PIECES, *LETTERS],
    "@token_type": [2, 3, 3, *[1] * (len(PIECES) + len(LETTERS))],
    "@scores": [0.0] * 3 + [*PIECES.values(), *[-10.0] * len(LETTERS)],
}


@pytest.mark.parametrize("role", [0, None])
def test_sentencepiece_without_bytes_falls_back_to_unk(role) -> None:
    imported = rebuild({**WITHOUT_BYTES, "@unknown_token_id": role})
    assert encode(imported, "éaé") == ["<s>", "▁", "<unk>", "a", "<unk>"]


REFUSED = {
    "pre": ({"@pre": "deepseek-llm"}, UnsupportedModel, "`tokenizer.ggml.pre` of `x.gguf` is `deepseek-llm`, expected one of gpt-2, gpt2, smollm"),
    "no pre": ({"@pre": None}, CheckpointError, "no metadata `tokenizer.ggml.pre`"),
    "model": ({"@model": "bert"}, UnsupportedModel, "`tokenizer.ggml.model` of `x.gguf` is `bert`, expected gpt2 or llama"),
    "no model": ({"@model": None}, CheckpointError, "no metadata `tokenizer.ggml.model`"),
    "merge": ({"@merges": ["t h e"]}, CheckpointError, "has `t h e`, expected two tokens"),
    "merge of nothing": ({"@merges": ["zz yy"]}, CheckpointError, "gives no tokenizer: "),
    "no bos": ({"@add_bos_token": True, "@bos_token_id": None}, CheckpointError, "is true without `tokenizer.ggml.bos_token_id`"),
    "space prefix": ({"@add_space_prefix": True}, UnsupportedModel, "`tokenizer.ggml.add_space_prefix` of `x.gguf` = true cannot be honoured"),
    "whitespace": ({**SENTENCEPIECE, "@remove_extra_whitespaces": True}, UnsupportedModel, "remove_extra_whitespaces` of `x.gguf` = true"),
    "nothing for the rest": (
        {**WITHOUT_BYTES, "@token_type": [3, 3, 3, *WITHOUT_BYTES["@token_type"][3:]], "@unknown_token_id": None},
        CheckpointError,
        "has neither bytes nor an unknown token",
    ),
    "scores": ({**SENTENCEPIECE, "@scores": [0.0]}, CheckpointError, "has 1 entries for 272 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_unknown_rules_and_contradictions_are_named(kind) -> None:
    values, error_class, message = REFUSED[kind]
    with pytest.raises(error_class) as error:
        rebuild(values)
    assert message in error.value.message
    assert error.value.hint
