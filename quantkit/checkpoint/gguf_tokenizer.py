"""Rebuilds the tokenizer of a GGUF file: tokenizer.json, tokenizer_config.json and generation_config.json.

GGUF keeps the vocabulary and, for byte-level BPE, the merges; of how text is cut before merging it keeps a name only,
`tokenizer.ggml.pre`, and PRE_TOKENIZERS says what the known names mean. SentencePiece vocabularies keep scores instead
of merges: the piece of higher score is joined first, which is a list of merges in another spelling.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.checkpoint.gguf_header import ORIGINAL, Metadata
from quantkit.checkpoint.gguf_vocabulary import (
    BYTE,
    NORMAL,
    UNKNOWN,
    UNUSED,
    Vocabulary,
    contradiction,
    read_vocabulary,
)
from quantkit.checkpoint.header import shown
from quantkit.errors import UnsupportedModel

Json = dict[str, Any]

SPACE = "\u2581"  # how SentencePiece writes a space
HF_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # Hugging Face name → GGUF name


@dataclass(frozen=True, slots=True)
class ImportedTokenizer:
    """The contents of the three files, the ids that config.json repeats, and what was found in a few words."""

    tokenizer: Json
    tokenizer_config: Json
    generation_config: Json
    config_ids: dict[str, int]
    kind: str


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a named byte-level tokenizer works beyond its vocabulary.

    pattern        what text is cut into; None is the pattern of GPT-2, built into `tokenizers`
    single_digits  each digit is cut off by itself, before the pattern
    whole_words    a cut that is a token becomes that token, whatever the merges say
    adds_bos       whether bos begins a text when the metadata do not say
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    normalizer: str | None = None
    adds_bos: bool = False


# The pattern of OpenAI's cl100k_base, with N where the ways to cut numbers differ.
_CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|N| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = PreTokenizer()
_LLAMA3 = PreTokenizer(_CL100K.replace("|N|", r"|\p{N}{1,3}|"), whole_words=True, adds_bos=True)
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": PreTokenizer(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreTokenizer(_CL100K.replace("|N|", r"|\p{N}|"), normalizer="NFC"),
}


def rebuild(metadata: Metadata, vocab_size: int, context_length: int) -> ImportedTokenizer:
    """The tokenizer of a model whose embedding has `vocab_size` rows; it has been loaded once when this returns.

    Raises UnsupportedModel when its rules are not known, CheckpointError when its metadata contradict themselves.
    """
    vocabulary = read_vocabulary(metadata, vocab_size)
    model = metadata.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, kind = byte_level_bpe(metadata, vocabulary), f"byte-level BPE, {metadata['tokenizer.ggml.pre']}"
    elif model == "llama":
        tokenizer, kind = sentencepiece_bpe(metadata, vocabulary), "SentencePiece BPE"
    else:
        raise UnsupportedModel(
            f"{metadata.at('tokenizer.ggml.model')} is {shown(model)}, expected gpt2 or llama", hint=ORIGINAL
        )
    _check_loads(metadata, tokenizer)
    ids = {f"{name}_token_id": vocabulary.roles.get(role) for name, role in HF_ROLES.items() if name != "unk"}
    return ImportedTokenizer(
        tokenizer,
        _tokenizer_config(metadata, vocabulary, context_length),
        _generation_config(vocabulary),
        {key: index for key, index in ids.items() if index is not None},
        kind,
    )


def byte_level_bpe(metadata: Metadata, vocabulary: Vocabulary) -> Json:
    """tokenizer.json of a `gpt2` tokenizer."""
    pre = metadata.text("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        where = metadata.at("tokenizer.ggml.pre")
        raise UnsupportedModel(f"{where} is {shown(pre)}, expected one of {known}", hint=ORIGINAL)
    if metadata.flag(key := "tokenizer.ggml.add_space_prefix", False):
        raise UnsupportedModel(f"{metadata.at(key)} = true cannot be honoured", hint=ORIGINAL)
    rules = PRE_TOKENIZERS[pre]
    steps: list[Json] = []
    if rules.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if rules.pattern is not None:
        steps.append({"type": "Split", "pattern": {"Regex": rules.pattern}, "behavior": "Isolated", "invert": False})
    steps.append(_byte_level(use_regex=rules.pattern is None))
    return _tokenizer_json(
        vocabulary,
        normalizer={"type": rules.normalizer} if rules.normalizer else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        post_processor=_frame(metadata, vocabulary, adds_bos=rules.adds_bos),
        decoder=_byte_level(use_regex=True),
        model={"merges": _merges(metadata), "ignore_merges": rules.whole_words},
    )


def sentencepiece_bpe(metadata: Metadata, vocabulary: Vocabulary) -> Json:
    """tokenizer.json of a `llama` tokenizer: BPE over characters, bytes for what the vocabulary lacks."""
    if metadata.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        key = "tokenizer.ggml.remove_extra_whitespaces"
        raise UnsupportedModel(f"{metadata.at(key)} = true cannot be honoured", hint=ORIGINAL)
    bytewise, unknown = BYTE in vocabulary.types, vocabulary.text("unknown")
    if unknown is None and UNKNOWN in vocabulary.types:
        unknown = vocabulary.tokens[vocabulary.types.index(UNKNOWN)]
    if unknown is None and not bytewise:
        fault = "has neither bytes nor an unknown token for what it lacks"
        raise contradiction(metadata, "tokenizer.ggml.tokens", fault)
    prefixed = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    to_spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return _tokenizer_json(
        vocabulary,
        normalizer={"type": "Sequence", "normalizers": [*prepend, to_marks]},
        pre_tokenizer=None,
        post_processor=_frame(metadata, vocabulary, adds_bos=True),
        decoder={"type": "Sequence", "decoders": [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        model={
            "merges": _merges_by_score(metadata, vocabulary, metadata.numbers("tokenizer.ggml.scores")),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": bytewise,
        },
    )


def _merges(metadata: Metadata) -> list[list[str]]:
    merges = [merge.split(" ") for merge in metadata.texts("tokenizer.ggml.merges")]
    for merge in merges:
        if len(merge) != 2:
            raise contradiction(metadata, "tokenizer.ggml.merges", f"has {shown(' '.join(merge))}, expected two tokens")
    return merges


def _merges_by_score(metadata: Metadata, vocabulary: Vocabulary, scores: Sequence[float]) -> list[list[str]]:
    """Every way to join two pieces into a third, by falling score of the third.

    Source: SentencePiece BPE joins the neighbours whose union has the highest score, over and over.
    """
    if len(scores) != len(vocabulary.tokens):
        fault = f"has {len(scores)} entries for {len(vocabulary.tokens)} tokens"
        raise contradiction(metadata, "tokenizer.ggml.scores", fault)
    pieces = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in {NORMAL, UNUSED}
    }
    return [
        [piece[:cut], piece[cut:]]
        for piece in sorted(pieces, key=lambda piece: -scores[pieces[piece]])
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _tokenizer_json(
    vocabulary: Vocabulary,
    *,
    normalizer: Json | None,
    pre_tokenizer: Json | None,
    post_processor: Json | None,
    decoder: Json,
    model: Json,
) -> Json:
    """The parts put together. Added tokens are in the vocabulary as well, so that each keeps its id."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": {"type": "BPE", **model, "vocab": {token: index for index, token in enumerate(vocabulary.tokens)}},
    }


def _byte_level(*, use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _frame(metadata: Metadata, vocabulary: Vocabulary, *, adds_bos: bool) -> Json | None:
    """The post-processor that puts bos before and eos behind a text; None when it adds neither."""
    adds = {
        "bos": metadata.flag("tokenizer.ggml.add_bos_token", adds_bos and "bos" in vocabulary.roles),
        "eos": metadata.flag("tokenizer.ggml.add_eos_token", False),
    }
    texts = {role: vocabulary.text(role) for role, on in adds.items() if on}
    for role, text in texts.items():
        if text is None:
            fault = f"is true without `tokenizer.ggml.{role}_token_id`"
            raise contradiction(metadata, f"tokenizer.ggml.add_{role}_token", fault)
    if not texts:
        return None

    def framed(sequence: str, type_id: int) -> list[Json]:
        around = {role: [{"SpecialToken": {"id": text, "type_id": type_id}}] for role, text in texts.items()}
        return [*around.get("bos", []), {"Sequence": {"id": sequence, "type_id": type_id}}, *around.get("eos", [])]

    tokens = {text: {"id": text, "ids": [vocabulary.roles[role]], "tokens": [text]} for role, text in texts.items()}
    pair = framed("A", 0) + framed("B", 1)
    return {"type": "TemplateProcessing", "single": framed("A", 0), "pair": pair, "special_tokens": tokens}


def _tokenizer_config(metadata: Metadata, vocabulary: Vocabulary, context_length: int) -> Json:
    """`PreTrainedTokenizerFast` takes tokenizer.json as it is; the class of a family would rebuild parts of it."""
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    config |= {f"{name}_token": vocabulary.text(role) for name, role in HF_ROLES.items() if role in vocabulary.roles}
    key = "tokenizer.chat_template"
    templates = {"default": metadata.text(key)} if key in metadata else {}
    named = metadata.texts(f"{key}s") if f"{key}s" in metadata else []
    templates |= {name: metadata.text(f"{key}.{name}") for name in named if name != "default"}
    if list(templates) == ["default"]:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    return config


def _generation_config(vocabulary: Vocabulary) -> Json:
    """Where generation ends: at eos, and at the ends of a turn or message where a chat model has them apart."""
    ends = list(dict.fromkeys(vocabulary.roles[role] for role in ("eos", "eot", "eom") if role in vocabulary.roles))
    ids = {
        "bos_token_id": vocabulary.roles.get("bos"),
        "eos_token_id": (ends[0] if len(ends) == 1 else ends) or None,
        "pad_token_id": vocabulary.roles.get("padding"),
    }
    return {key: value for key, value in ids.items() if value is not None}


def _check_loads(metadata: Metadata, tokenizer: Json) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # the library knows no other class; a merge of unknown tokens ends here, for one
        raise contradiction(metadata, "tokenizer.ggml.*", f"gives no tokenizer: {error}") from error
