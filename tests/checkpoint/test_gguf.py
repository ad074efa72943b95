"""Dequantized tensors: hand-worked blocks, every type of the library, pieces, and values that float16 cannot hold."""

import sys

import gguf
import numpy as np
import pytest
import tiny_gguf
import torch

from quantkit.checkpoint import gguf as reader
from quantkit.checkpoint.gguf import open_gguf
from quantkit.errors import CheckpointError


def dequantizable() -> list[str]:
    names = []
    for kind in gguf.GGMLQuantizationType:
        try:
            with np.errstate(all="ignore"):
                gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            names.append(kind.name)
        except NotImplementedError:
            pass
    return names


def write(path, array: np.ndarray, type_name: str):
    return tiny_gguf.write_file(path, {}, {"t": (array, type_name)})


def test_blocks_worked_by_hand(tmp_path) -> None:
    """Q4_1: `w = d * q + m`, low nibbles first; Q8_0: `w = d * q`; 32 weights in a block."""
    half = np.array([0.5, -1.0], np.float16).tobytes()
    nibbles = bytes([0x10, 0x32, 0xFE] + [0] * 13)
    q4_1 = np.frombuffer(half + nibbles, np.uint8).reshape(1, 20)
    q8_0 = np.frombuffer(np.float16(0.25).tobytes() + np.array([-128, 127] + [1] * 30, np.int8).tobytes(), np.uint8).reshape(1, 34)
    path = tiny_gguf.write_file(tmp_path / "x.gguf", {}, {"a": (q4_1, "Q4_1"), "b": (q8_0, "Q8_0")})
    with open_gguf(path) as file:
        a, a_error = file.half("a")
        b, b_error = file.half("b")
    low, high = [0.0, 2.0, 14.0] + [0.0] * 13, [1.0, 3.0, 15.0] + [0.0] * 13
    assert a.tolist() == [[0.5 * q - 1.0 for q in low + high]]
    assert b.tolist() == [[-32.0, 31.75] + [0.25] * 30]
    assert a_error == b_error == 0.0
    assert a.dtype == b.dtype == torch.float16


@pytest.mark.parametrize("type_name", dequantizable())
def test_every_type_is_dequantized_in_pieces_of_whole_rows(type_name, tmp_path, monkeypatch) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (7, 2 * block_bytes), np.uint8)
    raw &= 0xBF  # without the highest exponent bit every scale is finite
    expected = np.array(gguf.dequantize(raw, kind), np.float32).reshape(7, 2 * block)
    path = write(tmp_path / "x.gguf", raw, type_name)
    monkeypatch.setattr(reader, "CHUNK_WEIGHTS", 6 * block)  # three rows: pieces of 3, 3 and 1
    with open_gguf(path) as file:
        assert file.tensors["t"].shape == (7, 2 * block)
        assert torch.equal(file.single("t"), torch.from_numpy(expected))


def test_rounding_happens_once_and_is_reported(tmp_path) -> None:
    weights = np.array([[1.0, 1.0 + 2**-11 + 2**-20], [-0.1, 4.0]], np.float32)
    path = write(tmp_path / "x.gguf", weights, "F32")
    with open_gguf(path) as file:
        half, error = file.half("t")
    assert torch.equal(half, torch.from_numpy(weights).half())
    assert error == (torch.from_numpy(weights) - half.float()).abs().max().item() / 4.0


def test_zeros_have_no_error(tmp_path) -> None:
    with open_gguf(write(tmp_path / "x.gguf", np.zeros((2, 4), np.float32), "F32")) as file:
        half, error = file.half("t")
    assert not half.any()
    assert error == 0.0


@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "not finite"), (np.inf, "not finite"), (65520.0, "65520, beyond the range of float16")]
)
def test_a_weight_that_float16_cannot_hold_is_refused_by_name(value, message, tmp_path) -> None:
    weights = np.zeros((3, 4), np.float32)
    weights[2, 1] = value
    with open_gguf(write(tmp_path / "x.gguf", weights, "F32")) as file, pytest.raises(CheckpointError) as error:
        file.half("t")
    assert message in error.value.message
    assert "tensor `t`" in error.value.message


def test_missing_file_and_folder(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"), open_gguf(tmp_path / "none.gguf"):
        pass
    with pytest.raises(CheckpointError, match="is a folder, expected one GGUF file"), open_gguf(tmp_path):
        pass


def test_without_the_library_the_hint_installs_it(tmp_path, monkeypatch) -> None:
    path = write(tmp_path / "x.gguf", np.zeros((1, 4), np.float32), "F32")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError) as error, open_gguf(path):
        pass
    assert error.value.hint == "pip install gguf"
