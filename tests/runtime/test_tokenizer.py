import json
import random

import pytest
import tiny
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, processors

from quantkit.errors import CheckpointError, RequestError
from quantkit.runtime.tokenizer import REPLACEMENT, Tokenizer

MIXED = "Hello 👋🏽 wörld — 你好，世界! नमस्ते 🇫🇷 e\u0301\n\tend  "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(path)
    return path


def rewrite(folder, name, **changes):
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not tiny.ABSENT}))


def write_byte_fallback(folder):
    """A tokenizer in the manner of Llama 2 and Gemma: `▁` for spaces, `<0xNN>` for bytes, a first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "你", "▁ab"]
    merges = [("▁", "a"), ("▁a", "b")]
    library = tokenizers.Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.save(str(folder / "tokenizer.json"))
    rewrite(folder, "tokenizer_config.json", bos_token="<s>", eos_token="</s>")


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    return [*map(stream.push, ids), stream.finish()]


def test_text_survives_the_round_trip(folder):
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.decode(tokenizer.encode(MIXED)) == MIXED
    assert tokenizer.vocab_size == 276


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    tiny.write_tokenizer(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.open(tmp_path).encode(MIXED) == library_ids(MIXED, tmp_path)
    assert len(Tokenizer.open(tmp_path).encode(MIXED)) > 64
    assert len(Tokenizer.open(tmp_path).encode("a")) == 1


def library_ids(text, folder):
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    return library.encode(text, add_special_tokens=False).ids


def test_special_tokens_are_read_from_text_but_not_shown(folder):
    tokenizer = Tokenizer.open(folder)
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert ids[0] == 3 and ids[-1] == 4
    assert tokenizer.decode(ids) == "a" == "".join(streamed(tokenizer, ids))


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_stream_never_splits_a_character(kind, tmp_path):
    tiny.write_tokenizer(tmp_path) if kind == "byte level" else write_byte_fallback(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    text = "a 👋🏽你 b你你 🇫🇷" if kind == "byte fallback" else MIXED
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert all(REPLACEMENT not in piece for piece in pieces)
    assert pieces.count("") > 3, "no character of this text was spread over several tokens"


def test_leading_spaces_of_a_byte_fallback_vocabulary(tmp_path):
    write_byte_fallback(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    for text in ("a", " a", "  ab", "a  a", " "):
        ids = tokenizer.encode(text)
        assert "".join(streamed(tokenizer, ids)) == text == tokenizer.decode(ids)


def test_text_that_ends_in_mid_character_is_marked(folder):
    tokenizer = Tokenizer.open(folder)
    ids = tokenizer.encode("ok 👋")
    for cut in (1, 2, 3):
        pieces = streamed(tokenizer, ids[:-cut])
        assert pieces[-1] == REPLACEMENT and "".join(pieces) == "ok " + REPLACEMENT == tokenizer.decode(ids[:-cut])


def test_bad_byte_does_not_spoil_a_finished_character(tmp_path):
    write_byte_fallback(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    byte = {value: 3 + value for value in range(256)}
    ids = [*(byte[b] for b in "é".encode()), byte[0xE4], *(byte[b] for b in b"ok")]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
    assert tokenizer.decode(ids).startswith("é" + REPLACEMENT)


@given(ids=st.lists(st.integers(0, 280), max_size=60))
@settings(max_examples=200, deadline=None)
def test_stream_equals_full_decode_for_any_ids(folder, ids):
    tokenizer = Tokenizer.open(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == library.decode(ids)


def test_stream_equals_full_decode_for_any_bytes(tmp_path):
    write_byte_fallback(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    random_ids = random.Random(0)
    for _ in range(300):
        ids = [random_ids.randrange(3, 266) for _ in range(random_ids.randrange(20))]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("generation", "config", "token", "expected"),
    [
        ([2, 4], 2, "</s>", {2, 4}),
        (7, None, None, {7}),
        (None, [5, 7], None, {5, 7}),
        (None, tiny.ABSENT, {"content": "<|im_end|>", "special": True}, {4}),
        (tiny.ABSENT, -1, None, set()),
        (3, None, "not in the vocabulary", {3}),
    ],
)
def test_eos_in_every_spelling(generation, config, token, expected, tmp_path):
    tiny.write_tokenizer(tmp_path)
    rewrite(tmp_path, "generation_config.json", eos_token_id=generation)
    rewrite(tmp_path, "config.json", eos_token_id=config)
    rewrite(tmp_path, "tokenizer_config.json", eos_token=token)
    assert Tokenizer.open(tmp_path).eos_ids == expected


def test_eos_that_cannot_be_read_is_refused(tmp_path):
    tiny.write_tokenizer(tmp_path)
    rewrite(tmp_path, "generation_config.json", eos_token_id="</s>")
    with pytest.raises(CheckpointError, match=r"`eos_token_id` in .*generation_config\.json` is '</s>'") as caught:
        Tokenizer.open(tmp_path)
    assert caught.value.hint
    rewrite(tmp_path, "generation_config.json", eos_token_id=None)
    rewrite(tmp_path, "tokenizer_config.json", eos_token="<|gone|>")
    with pytest.raises(CheckpointError, match=r"is `<\|gone\|>`, which `tokenizer.json` does not have"):
        Tokenizer.open(tmp_path)


def test_nested_text_config_is_read(tmp_path):
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    rewrite(tmp_path, "config.json", text_config={"eos_token_id": 9})
    assert Tokenizer.open(tmp_path).eos_ids == {2, 9}


def test_optional_side_files_may_be_absent(tmp_path):
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "generation_config.json").unlink()
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.eos_ids == frozenset() and tokenizer.bos_id is None
    with pytest.raises(RequestError, match="has no chat template"):
        tokenizer.chat([{"role": "user", "content": "a"}])


def test_exactly_one_bos(tmp_path):
    write_byte_fallback(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.adds_bos
    assert tokenizer.encode("a", special=True)[0] == 1
    assert tokenizer.encode("<s>a", special=True).count(1) == 1
    assert 1 not in tokenizer.encode("a")


def test_bos_that_only_the_config_asks_for(tmp_path):
    tiny.write_tokenizer(tmp_path)
    assert not Tokenizer.open(tmp_path).adds_bos
    rewrite(tmp_path, "tokenizer_config.json", add_bos_token=True)
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.adds_bos
    assert tokenizer.encode("a", special=True) == [1, *tokenizer.encode("a")]
    assert tokenizer.encode("<s>a", special=True) == [1, *tokenizer.encode("a")]
    rewrite(tmp_path, "tokenizer_config.json", bos_token=None)
    assert Tokenizer.open(tmp_path).bos_id is None, "an explicit null wins over config.json"


def test_chat_is_the_template_of_the_folder(folder):
    tokenizer = Tokenizer.open(folder)
    ids = tokenizer.chat([{"role": "user", "content": "Hi <3"}])
    assert ids == tokenizer.encode("<|im_start|>user\nHi <3<|im_end|>\n<|im_start|>assistant\n")


def test_missing_and_damaged_tokenizers(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        Tokenizer.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no `tokenizer\.json`") as caught:
        Tokenizer.open(tmp_path)
    assert "copy the original" in caught.value.hint
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(CheckpointError, match=r"has a `tokenizer\.model` but no `tokenizer\.json`") as caught:
        Tokenizer.open(tmp_path)
    assert caught.value.hint.startswith("python -c ")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json` is a git-LFS pointer") as caught:
        Tokenizer.open(tmp_path)
    assert "git lfs pull" in caught.value.hint


def test_a_folder_may_have_any_name(tmp_path):
    folder = tmp_path / "n\udcff \u4f60"
    folder.mkdir()
    tiny.write_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).rename(folder / name)
    assert Tokenizer.open(folder).decode(Tokenizer.open(folder).encode("in the end")) == "in the end"


def test_half_a_surrogate_pair_is_refused(folder):
    with pytest.raises(RequestError, match="not valid Unicode"):
        Tokenizer.open(folder).encode("a\ud83d")
