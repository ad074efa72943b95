"""The tokenizer of a model as GGUF metadata: the inverse of `gguf_tokenizer`, which also proves it.

GGUF names how text is cut before merging and does not say it; a tokenizer whose rules have none of the known names is
refused. What was written is rebuilt, and must give the ids of the original for a few hard texts.
"""

import json
from pathlib import Path
from typing import Any

from quantkit.checkpoint.folder import read_json
from quantkit.checkpoint.gguf_header import Metadata
from quantkit.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, rebuild
from quantkit.checkpoint.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from quantkit.errors import CheckpointError, UnsupportedModel

Json = dict[str, Any]
NAMES = ("gpt-2", "smollm", "llama-bpe", "qwen2")
"""One name for each known way to cut, that which llama.cpp knows."""
MOST_BYTES = 1 << 28
TEXTS = (
    "Hello world",
    " The price was $1,234.56 in 2024!",
    "naïve café — Größe\n\n\tindented  twice   thrice\r\n",
    "def f(x):\n    return x**2  # it's ok, isn't it? I'LL",
    "日本語 और हिन्दी 🙂 12345678",
)
HINT = "use llama.cpp's own converter for this model"


def tokenizer_metadata(folder: Path, config: Json, vocab_size: int) -> Json:
    """`tokenizer.*` of a model folder.

    Raises CheckpointError without tokenizer.json, UnsupportedModel for rules that GGUF has no name for.
    """
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"`{folder}` has no tokenizer.json", hint="save the tokenizer with transformers first")
    said = read_json(folder / "tokenizer.json", MOST_BYTES)
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    model = said["model"]
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedModel(f"a tokenizer of type {model['type']} has no place in a GGUF file", hint=HINT)
    tokens, types = _vocabulary(said, vocab_size)
    found: Json = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if '"ByteLevel"' in json.dumps(said.get("pre_tokenizer")):
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _pre(said), "tokenizer.ggml.merges": merges}
    elif model.get("byte_fallback"):
        found |= _sentencepiece(said, tokens, types, merges)
    else:
        raise UnsupportedModel("this tokenizer is neither byte-level nor SentencePiece BPE", hint=HINT)
    found |= _roles(folder, config, settings, tokens)
    found |= _frame(folder, found)
    _prove(folder, found, vocab_size, config)
    return found


def _vocabulary(said: Json, vocab_size: int) -> tuple[list[str], list[int]]:
    """Tokens and types by id; rows of the embedding without a token are unused ones."""
    by_id = {index: (token, NORMAL) for token, index in said["model"]["vocab"].items()}
    for added in said.get("added_tokens", []):
        by_id[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    if max(by_id) >= vocab_size:
        raise CheckpointError(
            f"the tokenizer has id {max(by_id)}, the embedding {vocab_size} rows", hint="take both from one model"
        )
    rows = [by_id.get(index, (f"[unused{index}]", UNUSED)) for index in range(vocab_size)]
    return [token for token, _ in rows], [kind for _, kind in rows]


def _pre(said: Json) -> str:
    """The name of the way to cut. Compared part by part with the ways that are known."""
    steps = said["pre_tokenizer"]
    steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    normalizer = (said.get("normalizer") or {}).get("type")
    digits = any(step["type"] == "Digits" and step.get("individual_digits") for step in steps)
    patterns = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    known = {"Digits", "Split", "ByteLevel"}
    plain = all(step["type"] in known and not step.get("add_prefix_space") for step in steps) and len(patterns) <= 1
    regex = any(step["type"] == "ByteLevel" and step.get("use_regex", True) for step in steps)
    for name in NAMES:
        rules = PRE_TOKENIZERS[name]
        if (
            plain
            and rules.single_digits == digits
            and [rules.pattern] == (patterns or [None])
            and (rules.pattern is None) == regex
            and rules.normalizer == normalizer
            and rules.whole_words == bool(said["model"].get("ignore_merges"))
        ):
            return name
    raise UnsupportedModel("how this tokenizer cuts text has no name in GGUF that is known here", hint=HINT)


def _sentencepiece(said: Json, tokens: list[str], types: list[int], merges: list[str]) -> Json:
    """Scores that join pieces in the order of the merges: minus the rank of the first merge that makes the piece."""
    rank: dict[str, int] = {}
    for number, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), number)
    unknown = said["model"].get("unk_token")
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[index] = BYTE
        elif token == unknown:
            types[index] = UNKNOWN
    prepend = '"Prepend"' in json.dumps(said.get("normalizer"))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [-float(rank.get(token, len(merges))) for token in tokens],
        "tokenizer.ggml.add_space_prefix": prepend,
    }


def _roles(folder: Path, config: Json, settings: Json, tokens: list[str]) -> Json:
    """Ids of bos, eos, unk and pad, the end of a turn, and the chat template."""
    found: Json = {}
    for name, role in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        said = settings.get(f"{name}_token")
        text = said.get("content") if isinstance(said, dict) else said
        index = tokens.index(text) if text in tokens else config.get(f"{name}_token_id")
        if isinstance(index, list):
            index = index[0]
        if isinstance(index, int) and 0 <= index < len(tokens):
            found[f"tokenizer.ggml.{role}_token_id"] = index
    generation = folder / "generation_config.json"
    ends = read_json(generation).get("eos_token_id") if generation.is_file() else None
    eos = found.get("tokenizer.ggml.eos_token_id")
    others = [end for end in ends if end != eos] if isinstance(ends, list) else []
    if others:
        found["tokenizer.ggml.eot_token_id"] = others[0]
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, str):
        found["tokenizer.chat_template"] = template
    return found


def _frame(folder: Path, found: Json) -> Json:
    """Whether bos and eos are put around a text: asked of the tokenizer itself."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("a").ids
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    return {
        "tokenizer.ggml.add_bos_token": len(ids) > len(bare) and ids[0] == found.get("tokenizer.ggml.bos_token_id"),
        "tokenizer.ggml.add_eos_token": len(ids) > len(bare) and ids[-1] == found.get("tokenizer.ggml.eos_token_id"),
    }


def _prove(folder: Path, found: Json, vocab_size: int, config: Json) -> None:
    from tokenizers import Tokenizer

    rebuilt = rebuild(Metadata(found, folder / "tokenizer.json"), vocab_size, config["max_position_embeddings"])
    ours = Tokenizer.from_str(json.dumps(rebuilt.tokenizer))
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        if ours.encode(text).ids != theirs.encode(text).ids:
            raise UnsupportedModel(f"as GGUF this tokenizer would give other ids for {text!r}", hint=HINT)
