"""The stream between blocks: what goes in comes out, in memory as on disk, and nothing grows."""

import os
from pathlib import Path

import pytest
import torch

from quantkit.calibration.stream import ActivationStream
from quantkit.errors import CalibrationError

TABLE = torch.randn(50, 12, generator=torch.Generator().manual_seed(0))
ROWS = torch.arange(35).reshape(7, 5)


def _embed(ids: torch.Tensor) -> torch.Tensor:
    return TABLE[ids]


def _block(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 1.5 + hidden.flip(1)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_pass_through_the_blocks(tmp_path: Path, on_disk: bool, dtype: torch.dtype) -> None:
    folder = tmp_path if on_disk else None
    stream = ActivationStream.start(_embed, ROWS, batch_rows=3, dtype=dtype, folder=folder)
    expected = _embed(ROWS).to(dtype)
    for index in range(3):
        batches = list(stream.batches())
        assert [len(batch) for batch in batches] == [3, 3, 1]
        assert torch.equal(torch.cat(batches), expected) and batches[0].dtype == dtype
        stream.advance(_block, f"block {index}")
        expected = _block(expected).to(dtype)
    assert torch.equal(torch.cat(list(stream.batches())), expected)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_stream_that_follows_leaves_the_first_as_it_was(tmp_path: Path, on_disk: bool) -> None:
    first = ActivationStream.start(_embed, ROWS, batch_rows=3, folder=tmp_path if on_disk else None)
    folder = tmp_path / "second" if on_disk else None
    if folder:
        folder.mkdir()
    second = first.follow(_block, "block 0", dtype=torch.bfloat16, folder=folder)
    second.advance(_block, "block 1")
    assert torch.equal(torch.cat(list(first.batches())), _embed(ROWS))
    expected = _block(_block(_embed(ROWS)).bfloat16()).bfloat16()
    batches = list(second.batches())
    assert [len(batch) for batch in batches] == [3, 3, 1] and torch.equal(torch.cat(batches), expected)
    assert next(first.follow(_block, "block 0").batches()).dtype == torch.float32
    with pytest.raises(CalibrationError, match="block 9 gives NaN or infinity in calibration row 3"):
        first.follow(lambda hidden: hidden / (hidden - TABLE[15]), "block 9")


def test_files_do_not_multiply(tmp_path: Path) -> None:
    stream = ActivationStream.start(_embed, ROWS, batch_rows=2, folder=tmp_path)
    for index in range(4):
        stream.advance(_block, f"block {index}")
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) == ROWS.numel() * 12 * 4


def test_a_block_that_breaks_is_named_with_the_row() -> None:
    stream = ActivationStream.start(_embed, ROWS, batch_rows=3)
    seen = 0

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += len(hidden)
        return torch.where(torch.arange(len(hidden))[:, None, None] + seen == 5 + 3, torch.inf, hidden)

    with pytest.raises(CalibrationError, match="block 2 gives NaN or infinity in calibration row 5"):
        stream.advance(broken, "block 2")


def test_a_damaged_embedding_is_named() -> None:
    with pytest.raises(CalibrationError, match="the embedding gives NaN or infinity in calibration row 0"):
        ActivationStream.start(lambda ids: TABLE[ids] * torch.nan, ROWS, batch_rows=4)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    stream = ActivationStream.start(_embed, ROWS, batch_rows=7, folder=tmp_path)
    file = next(tmp_path.iterdir())
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CalibrationError, match=r"has 1,670 bytes of hidden states, expected 1,680"):
        list(stream.batches())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"hidden states cannot be written to `.*missing`: No such file"):
        ActivationStream.start(_embed, ROWS, batch_rows=7, folder=tmp_path / "missing")


def test_a_sealed_folder_is_taken_up_again(tmp_path: Path) -> None:
    stream = ActivationStream.start(_embed, ROWS, batch_rows=3, dtype=torch.bfloat16, folder=tmp_path)
    seal = stream.seal()

    def resume() -> ActivationStream:
        return ActivationStream.resume(tmp_path, seal, ROWS, batch_rows=3, hidden_size=12, dtype=torch.bfloat16)

    again = resume()
    assert again.tokens == ROWS.numel()
    assert torch.equal(torch.cat(list(again.batches())), _embed(ROWS).bfloat16())
    follower = tmp_path / "next"
    follower.mkdir()
    assert again.follow(_block, "block 0", folder=follower).seal() != seal
    file = sorted(tmp_path.glob("*.bin"))[1]
    content = file.read_bytes()
    for damaged, words in (
        (content[:5] + bytes([content[5] ^ 1]) + content[6:], "are not what was written"),
        (content[:-2], "has 358 bytes of hidden states, expected 360"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(CalibrationError, match=words) as caught:
            resume()
        assert "--restart" in caught.value.hint
    file.unlink()
    with pytest.raises(CalibrationError, match="cannot be read from"):
        resume()
    (tmp_path / "elsewhere").write_bytes(content)
    file.symlink_to("elsewhere")
    with pytest.raises(CalibrationError, match="cannot be read from"):
        resume()


@pytest.mark.parametrize("call", ["fsync", "open"])
def test_a_disk_that_does_not_keep_states_is_named(tmp_path: Path, monkeypatch, call: str) -> None:
    stream = ActivationStream.start(_embed, ROWS, batch_rows=3, folder=tmp_path)

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(CalibrationError, match=r"hidden states cannot be written to .*: No space left on device"):
        stream.seal()
