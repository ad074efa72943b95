"""Text sources and their packing into rows."""

import json
import re
import sys
from importlib.resources import files
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from quantkit.calibration import text
from quantkit.errors import CalibrationError

DATA = files("quantkit.calibration").joinpath("data")


class Letters:
    """One token for each character; puts `head` before a text when asked for special tokens."""

    def __init__(self, head: tuple[int, ...] = ()) -> None:
        self.head = list(head)

    def encode(self, text: str, special: bool = False) -> list[int]:
        return (self.head if special else []) + [ord(letter) for letter in text]


def _letters(rows: torch.Tensor) -> list[str]:
    return ["".join(map(chr, row)) for row in rows.tolist()]


def _parquet(path: Path, column: str, values: list[str]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({column: values}), path)
    return path


def test_rows_are_windows_of_the_text_drawn_without_replacement(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("abcdefghijkl")
    rows = _letters(text.token_rows(str(tmp_path / "a.md"), Letters(), 4, 3, seed=1))
    assert sorted(rows) == ["abc", "def", "ghi", "jkl"]


def test_rows_depend_on_the_seed_alone() -> None:
    first, again, other = (text.token_rows("bundled", Letters(), 16, 64, seed) for seed in (0, 0, 1))
    assert first.dtype == torch.int64 and first.shape == (16, 64)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_more_samples_keep_the_first_rows() -> None:
    few, many = (text.token_rows("bundled", Letters(), samples, 512, 3) for samples in (128, 160))
    assert torch.equal(few, many[:128])


def test_every_row_begins_with_what_the_tokenizer_puts_before_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdef")
    rows = text.token_rows(str(tmp_path / "a.txt"), Letters(head=(7, 8)), 2, 5, seed=0)
    assert sorted(map(tuple, rows.tolist())) == [(7, 8, 97, 98, 99), (7, 8, 100, 101, 102)]


def test_bundled_rows_keep_to_the_shares_in_every_prefix() -> None:
    parts = {part.file: DATA.joinpath(part.file).read_text() for part in text.BUNDLED}
    rows = _letters(text.token_rows("bundled", Letters(), 40, 200, seed=5))
    for count in (20, 40):
        for part in text.BUNDLED:
            drawn = sum(row in parts[part.file] for row in rows[:count])
            assert abs(drawn - part.share * count) <= 1


def test_shares_sum_to_one_and_every_file_is_listed() -> None:
    assert sum(part.share for part in text.BUNDLED) == pytest.approx(1.0)
    listed = {part.file for part in text.BUNDLED} | {text.HELD_BACK, "README.md", "LICENSE-PSF.txt"}
    assert {file.name for file in DATA.iterdir()} == listed
    readme = DATA.joinpath("README.md").read_text()
    for part in text.BUNDLED:
        assert f"| {part.file} | {len(DATA.joinpath(part.file).read_bytes()):,} | {part.share:.0%}".replace("%", " %") in readme


def test_held_back_text_stands_in_no_calibration_file() -> None:
    def paragraphs(name: str) -> set[str]:
        return {" ".join(part.split()) for part in re.split(r"\n\s*\n", DATA.joinpath(name).read_text())}

    held = {part for part in paragraphs(text.HELD_BACK) if len(part) > 40}
    assert len(held) > 300
    for part in text.BUNDLED:
        assert not held & paragraphs(part.file)


def test_held_back_rows_are_spread_over_the_text() -> None:
    rows = text.held_back(Letters(), 256, 10)
    whole = DATA.joinpath(text.HELD_BACK).read_text()
    places = [whole.index(row) for row in _letters(rows)]
    assert rows.shape == (10, 256) and places == sorted(places)
    assert places[0] == 0 and places[-1] > 0.8 * len(whole)


def test_held_back_gives_what_there_is() -> None:
    assert 40 < len(text.held_back(Letters(), 2000, 1000)) < 45
    with pytest.raises(CalibrationError, match="fewer than one window of 1000000"):
        text.held_back(Letters(), 1_000_000, 1)


def test_text_of_each_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two\\n", "other": 1}\n')
    (tmp_path / "a.raw").write_text('{"text": "one"}\n')
    assert text.read_text(_parquet(tmp_path / "a.parquet", "text", ["one", "", "two\n"])) == "one\n\n\n\ntwo\n"
    assert text.read_text(tmp_path / "a.jsonl") == "one\n\ntwo\n"
    assert text.read_text(tmp_path / "a.raw") == '{"text": "one"}\n'


def test_documents_are_joined_by_a_blank_line(tmp_path: Path) -> None:
    rows = text.token_rows(str(_parquet(tmp_path / "a.parquet", "text", ["abc", "def"])), Letters(), 2, 4, seed=0)
    assert sorted(_letters(rows)) == ["\ndef", "abc\n"]


def test_far_too_many_rows_are_refused_before_anything_is_tokenized() -> None:
    class Never:
        def encode(self, text: str, special: bool = False) -> list[int]:
            assert len(text) < 10, "a text was tokenized"
            return [1]

    with pytest.raises(CalibrationError, match="cannot have more than") as caught:
        text.token_rows("bundled", Never(), 1_000_000, 512, 0)
    assert "--samples 128" in caught.value.hint
    most = sum(len(text._bundled(part.file)[0].encode()) for part in text.BUNDLED) // 512
    with pytest.raises(CalibrationError, match="cannot have more than"):
        text.token_rows("bundled", Never(), most + 4, 512, 0)  # a token has a byte at least


def test_too_short_text_tells_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1300)
    with pytest.raises(CalibrationError, match=r"has 1,300 tokens, which is 2 rows of 512 tokens, and 128 rows") as error:
        text.token_rows(str(tmp_path / "a.txt"), Letters(), 128, 512, 0)
    assert "--samples 2" in str(error.value.hint)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(CalibrationError, match="has 0 tokens, which is 0 rows"):
        text.token_rows(str(tmp_path / "a.txt"), Letters(), 1, 8, 0)


def test_no_room_beside_the_head() -> None:
    with pytest.raises(CalibrationError, match="a row of 1 tokens has no room"):
        text.token_rows("bundled", Letters(head=(1,)), 1, 1, 0)


def test_of_a_long_source_an_excerpt_is_tokenized(tmp_path: Path) -> None:
    class Counting(Letters):
        seen = 0

        def encode(self, text: str, special: bool = False) -> list[int]:
            self.seen += len(text)
            return super().encode(text, special)

    path = _parquet(tmp_path / "long.parquet", "text", [f"{number:06}" * 50 for number in range(2000)])
    counting = Counting()
    rows = text.token_rows(str(path), counting, 4, 32, 0)
    assert counting.seen < 2 * 4 * 32 * text.CHARACTERS_PER_TOKEN
    assert torch.equal(rows, text.token_rows(str(path), Letters(), 4, 32, 0))
    assert not torch.equal(rows, text.token_rows(str(path), Letters(), 4, 32, 1))


@pytest.mark.parametrize("unit", ["paragraph\n\n", "line\n", "word ", "x"])
def test_pieces_join_to_the_text_and_end_at_borders(unit: str) -> None:
    documents = [unit * 40_000, "end"]
    pieces = text._pieces(documents)
    assert "".join(pieces) == "\n\n".join(documents)
    assert all(len(piece) <= text.PIECE_CHARACTERS for piece in pieces)
    assert all(piece.endswith(unit[-1]) for piece in pieces[:-2])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9 au lait", "is not UTF-8 text: byte 3"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}', "line 2 of .* has no text under `text`, but NoneType"),
        ("a.jsonl", b"[1]", "line 1 of .* has no text"),
        ("a.jsonl", b"{", "line 1 of .* is not JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 of .* is not JSON: it is nested too deeply"),
        ("a.parquet", b"PAR?", "is not a readable Parquet file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        text.token_rows(str(tmp_path / name), Letters(), 1, 2, 0)


def test_a_parquet_file_without_the_column_lists_its_columns(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="has no column `text`, only `body`"):
        text.read_text(_parquet(tmp_path / "a.parquet", "body", ["x"]))


@pytest.mark.parametrize(("name", "content"), [("a.txt", "one\n"), ("a.jsonl", '{"text": "one\\n"}')])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert text.read_text(tmp_path / name) == "one\n"


def test_a_path_is_never_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="is a folder"):
        text.token_rows(str(tmp_path), Letters(), 1, 2, 0)
    with pytest.raises(CalibrationError, match="no such file"):
        text.token_rows("missing.jsonl", Letters(), 1, 2, 0)


def test_a_name_that_is_neither_file_nor_dataset_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = "`someone/corpus` is no file here, and data set `someone/corpus` cannot be read: .* is not installed"
    with pytest.raises(CalibrationError, match=message) as error:
        text.token_rows("someone/corpus", Letters(), 1, 2, 0)
    assert "FILE" in str(error.value.hint)


def test_rows_of_a_dataset_depend_on_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def read(name: str, split: str, limit: int, seed: int) -> list[str]:
        asked.append((name, split, seed))
        return [f"{number:04}" for number in range(900)]

    monkeypatch.setattr(text, "read_dataset", read)
    first, again, other = (text.token_rows("someone/corpus", Letters(), 4, 8, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert asked[1:] == [("someone/corpus", "train", 0), ("someone/corpus", "train", 1)]


def test_what_is_there_but_no_file_is_called_what_it_is() -> None:
    with pytest.raises(CalibrationError, match="`/dev/null` is a pipe or device, not a text file"):
        text.read_text(Path("/dev/null"))
    with pytest.raises(CalibrationError, match="`/proc/self/mem` cannot be read: Input/output error"):
        text.read_text(Path("/proc/self/mem"))


def test_json_of_any_language_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "línea\u2028dos"}) + "\n", encoding="utf-8")
    assert text.read_documents(tmp_path / "a.jsonl") == ["línea\u2028dos"]
