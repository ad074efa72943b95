"""A header is believed only after everything it says was checked, and each lie has an error that names it."""

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import pytest
import raw_safetensors as raw
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_safetensors import entry
from safetensors import deserialize
from safetensors.torch import save

from quantkit.checkpoint.header import DTYPE_BITS, MAX_HEADER_BYTES, TORCH_DTYPES, parse_json, read_header, shown
from quantkit.errors import CheckpointError


def test_a_valid_header_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    table = {"__metadata__": {"format": "pt"}, "b": entry(8, 20, [2, 3], "F16"), "a": entry(0, 8, [], "I64")}
    raw.write(path, json.dumps(table) + "   ", bytes(20))
    header = read_header(path)
    start = 8 + len(json.dumps(table)) + 3
    assert header.metadata == {"format": "pt"}
    assert [(name, e.dtype, e.shape, e.start - start, e.size_bytes) for name, e in header.entries.items()] == [
        ("b", "F16", (2, 3), 8, 12),
        ("a", "I64", (), 0, 8),
    ]


def test_tensors_without_elements_may_lie_anywhere_between_others(tmp_path: Path) -> None:
    table = {"a": entry(0, 4), "none": entry(4, 4, [0, 7]), "b": entry(4, 6)}
    assert set(read_header(raw.write(tmp_path / "x", table, bytes(6))).entries) == set(table)


def test_an_empty_table_is_a_valid_file(tmp_path: Path) -> None:
    assert read_header(raw.write(tmp_path / "x", {})).entries == {}


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_of_the_format_has_its_size(tmp_path: Path, dtype: str) -> None:
    bits = DTYPE_BITS[dtype]
    header = read_header(raw.write(tmp_path / "x", {"a": entry(0, bits, [8], dtype)}, bytes(bits)))
    assert header.entries["a"].size_bytes == bits
    if dtype in TORCH_DTYPES:
        assert torch.empty((), dtype=TORCH_DTYPES[dtype]).element_size() * 8 == bits


def described(start: int, stop: int, **changes: Any) -> dict[str, Any]:
    return {"a": {key: value for key, value in {**entry(start, stop), **changes}.items() if value is not None}}


LIES = {
    "overlap": ({"a": entry(0, 4), "b": entry(3, 8)}, 8, "tensor `b` in `{}` overlaps `a`"),
    "same place": ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "tensor `b` in `{}` overlaps `a`"),
    "hole": ({"a": entry(0, 4), "b": entry(5, 8)}, 8, "tensor `b` in `{}` leaves a hole after `a`"),
    "hole at the start": ({"a": entry(1, 8)}, 8, "tensor `a` in `{}` leaves a hole after the header"),
    "beyond the end": ({"a": entry(0, 9)}, 8, "`{}` is cut short: tensor `a` ends at byte"),
    "bytes of nobody": ({"a": entry(0, 4)}, 8, "`{}` has 4 bytes after its last tensor that belong to none"),
    "data of no tensor": ({}, 1, "`{}` has 1 bytes after its last tensor"),
    "shape too large": (described(0, 8, shape=[9]), 8, "tensor `a` in `{}` has U8 of shape `[9]`, which needs 9 bytes"),
    "wrong width": (described(0, 8, dtype="F16"), 8, "which needs 16 bytes, and 8 bytes of data"),
    "impossible shape": (described(0, 8, shape=[2**62, 2**62]), 8, "which no file can hold"),
    "half a byte": (described(0, 1, shape=[3], dtype="F4"), 1, "which needs 1 bytes, and 1 bytes of data"),
    "unknown dtype": (described(0, 8, dtype="F13"), 8, "tensor `a` in `{}` has the unknown dtype `F13`"),
    "dtype of another kind": (described(0, 8, dtype=["U8"]), 8, "has the unknown dtype"),
    "no dtype": (described(0, 8, dtype=None), 8, "tensor `a` in `{}` must have `dtype`, `shape` and `data_offsets`"),
    "no shape": (described(0, 8, shape=None), 8, "must have `dtype`, `shape` and `data_offsets`"),
    "no offsets": (described(0, 8, data_offsets=None), 8, "must have `dtype`, `shape` and `data_offsets`"),
    "an entry that is a list": ({"a": [1]}, 0, "must have `dtype`, `shape` and `data_offsets`"),
    "negative size": (described(0, 8, shape=[-8]), 8, "tensor `a` in `{}` has the shape `[-8]`"),
    "size that is true": (described(0, 1, shape=[True]), 1, "has the shape `[True]`"),
    "size with a fraction": (described(0, 8, shape=[8.0]), 8, "has the shape `[8.0]`"),
    "too many sizes": (described(0, 1, shape=[1] * 65), 1, "a list of at most 64 sizes is expected"),
    "size beyond 64 bits": (described(0, 0, shape=[0, 2**64]), 0, "has the shape `[0, 18446744073709551616]`"),
    "one offset": (described(0, 8, data_offsets=[8]), 8, "tensor `a` in `{}` has the data offsets `[8]`"),
    "offsets that go back": (described(0, 8, data_offsets=[8, 0]), 8, "has the data offsets `[8, 0]`"),
    "offsets of text": (described(0, 8, data_offsets=["0", "8"]), 8, "has the data offsets"),
    "metadata of numbers": ({"__metadata__": {"format": 1}}, 0, "`__metadata__` that does not map strings to strings"),
    "metadata of another kind": ({"__metadata__": ["pt"]}, 0, "`__metadata__` that does not map strings to strings"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_named_with_file_and_tensor(tmp_path: Path, lie: str) -> None:
    table, data_bytes, message = LIES[lie]
    path = raw.write(tmp_path / "x.safetensors", table, bytes(data_bytes))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert message.format(path) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("opening", [b"\x80\x02", b"PK"])
def test_a_length_that_looks_like_another_format(tmp_path: Path, opening: bytes) -> None:
    """640 is a usual length of a header, and the first two bytes of a pickle."""
    length = int.from_bytes(opening, "little")
    path = raw.write(tmp_path / "x", json.dumps({"a": entry(0, 4)}).ljust(length), bytes(4))
    assert path.read_bytes().startswith(opening)
    assert read_header(path).entries.keys() == {"a"}


GARBAGE = {
    "empty": (b"", "holds 0 bytes, too few for a safetensors file"),
    "seven bytes": (b"\x02" + bytes(6), "holds 7 bytes, too few"),
    "giant length": (b"\xff" * 8 + b"{}", "its header should have 18446744073709551615 bytes"),
    "length beyond the file": ((3).to_bytes(8, "little") + b"{}", "its header should have 3 bytes"),
    "no header at all": (bytes(8), "holds 8 bytes, too few"),
    "text": (b"once upon a time, there was a file", "is not a safetensors file, or a damaged one"),
    "no JSON": ((4).to_bytes(8, "little") + b"{a:}", "not valid JSON: Expecting property name"),
    "a list": ((2).to_bytes(8, "little") + b"[]", "is not a safetensors file"),
    "no UTF-8": ((5).to_bytes(8, "little") + b'{"\xff"}', "not valid JSON"),
    "UTF-16": ((8).to_bytes(8, "little") + '{"":'.encode("utf-16-le"), "not valid JSON"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n",
        "is a git-LFS pointer, not the weights it points to",
    ),
    "zip": (b"PK\x03\x04" + bytes(60), "can run code when opened and are refused"),
    "pickle": (b"\x80\x02}q\x00." + bytes(60), "can run code when opened and are refused"),
    "GGUF": (b"GGUF\x03" + bytes(60), "is a GGUF file"),
    "web page": (b"<!DOCTYPE html><html><body>Not Found</body></html>", "is a web page, not weights"),
}  # fmt: skip


@pytest.mark.parametrize("kind", GARBAGE)
def test_what_is_no_safetensors_file_is_recognised(tmp_path: Path, kind: str) -> None:
    content, message = GARBAGE[kind]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_a_name_that_is_there_twice(tmp_path: Path) -> None:
    said = json.dumps(entry(0, 4))
    path = raw.write(tmp_path / "x", f'{{"a.weight": {said}, "b": {said}, "a.weight": {said}}}', bytes(4))
    with pytest.raises(CheckpointError, match=r"`a\.weight` is there twice"):
        read_header(path)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = raw.write(tmp_path / "x", '{"\\ud800": ' + json.dumps(entry(0, 4)) + "}", bytes(4))
    with pytest.raises(CheckpointError, match=r"tensor `\\ud800` .* not valid Unicode"):
        read_header(path)


def test_names_cannot_draw_on_the_screen() -> None:
    assert shown("model.norm.weight") == "`model.norm.weight`"
    assert shown("\x1b[2Jred\n\ud800") == "`\\x1b[2Jred\\n\\ud800`"
    assert len(shown("x" * 10_000)) == 122


def test_a_header_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{")
        file.truncate(2**40)  # a hole: no disk is used
    with pytest.raises(CheckpointError, match=f"at most {MAX_HEADER_BYTES} are read"):
        read_header(path)


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 100_000, "[[],[{}]," * 50_000])
def test_nothing_but_brackets_is_refused_before_it_is_parsed(nested: str) -> None:
    with pytest.raises(ValueError, match="consists of brackets"):
        parse_json(bytearray(f'{{"a": {nested}'.encode()))


def test_deep_nesting_is_an_error_like_any_other() -> None:
    text = '{"a": ' + "[" * 4000 + " " * 60_000 + "]" * 4000 + "}"
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(bytearray(text.encode()))


def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_header(tmp_path / "x.safetensors")


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_header(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_header(tmp_path / "x")


VALID = save({"layer.weight": torch.ones(3, 5), "layer.bias": torch.ones(5, dtype=torch.bfloat16)}, {"format": "pt"})


def damaged_files() -> st.SearchStrategy[bytes]:
    """A valid file with bytes changed, cut out or put in, mostly within the header."""
    place = st.integers(0, len(VALID))
    changes = st.lists(st.tuples(place, st.integers(0, 12), st.binary(max_size=12)), min_size=1, max_size=4)

    def apply(edits: list[tuple[int, int, bytes]]) -> bytes:
        content = VALID
        for start, removed, inserted in edits:
            content = content[:start] + inserted + content[start + removed :]
        return content

    return changes.map(apply)


HEADER_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["F32", "U8", "", "é\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.lists(st.text(max_size=4) | st.sampled_from(["a", "b.weight", "__metadata__"]), max_size=4, unique=True)


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A header and the bytes of its data: right, or with one thing in it changed."""
    table, data_bytes = {}, 0
    for name in draw(NAMES):
        dtype, shape = draw(st.sampled_from(["U8", "F16", "I64"])), draw(st.lists(st.integers(0, 3), max_size=3))
        size = prod(shape) * DTYPE_BITS[dtype] // 8
        table[name] = entry(data_bytes, data_bytes + size, shape, dtype)
        data_bytes += size
    if table and draw(st.booleans()):
        changed = draw(st.sampled_from(sorted(table)))
        key = draw(st.sampled_from(["dtype", "shape", "data_offsets", ""]))
        value = draw(HEADER_VALUES | st.lists(st.integers(-1, 99), max_size=3) | st.sampled_from(sorted(DTYPE_BITS)))
        table[changed] = {**table[changed], key: value} if key else value
    return table, draw(st.sampled_from([data_bytes, data_bytes, data_bytes, data_bytes + 1]))


def check_that_it_is_read_or_refused(path: Path) -> None:
    """What is accepted is what the safetensors library accepts, and each tensor has its bytes within the file."""
    try:
        header = read_header(path)
    except CheckpointError as error:
        assert str(path) in error.message
        assert error.hint
        error.message.encode("ascii", "strict")
        return
    content = path.read_bytes()
    by_library = {name: bytes(tensor["data"]) for name, tensor in deserialize(content)}
    assert header.entries.keys() == by_library.keys()
    for name, said in header.entries.items():
        assert content[said.start : said.start + said.size_bytes] == by_library[name]


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=damaged_files() | st.binary(max_size=80))
def test_damaged_bytes_are_read_right_or_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    check_that_it_is_read_or_refused(tmp_path / "x")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=tables(), length=st.none() | st.none() | st.integers(0, 2**64 - 1))
def test_any_json_is_read_right_or_refused(
    tmp_path: Path, written: tuple[dict[str, Any], int], length: int | None
) -> None:
    table, data_bytes = written
    check_that_it_is_read_or_refused(raw.write(tmp_path / "x", table, bytes(data_bytes), length))


def test_every_cut_of_a_valid_file_is_refused(tmp_path: Path) -> None:
    for size in range(len(VALID)):
        (tmp_path / "x").write_bytes(VALID[:size])
        with pytest.raises(CheckpointError):
            read_header(tmp_path / "x")
