"""Damaged and foreign files: one error each, never more memory than the file is worth."""

import struct

import pytest
import tiny_gguf
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from quantkit.checkpoint import gguf_model, gguf_tokenizer
from quantkit.checkpoint.gguf import open_gguf
from quantkit.checkpoint.gguf_header import read_header
from quantkit.errors import CheckpointError, QuantkitError

HUGE = 2**62


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, type_id: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", type_id) + value


def record(name: str = "t", dimensions: tuple[int, ...] = (32,), type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, type_id, offset)


def gguf(*entries: bytes, records: tuple[bytes, ...] = (), data: bytes = b"", version: int = 3, counts: tuple[int, int] | None = None):
    tensor_count, entry_count = counts or (len(records), len(entries))
    header = b"GGUF" + struct.pack("<IQQ", version, tensor_count, entry_count) + b"".join(entries) + b"".join(records)
    return header + bytes(-len(header) % 32) + data


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def test_values_of_every_type_and_records(tmp_path) -> None:
    entries = (
        entry("u8", 0, b"\xff"),
        entry("i8", 1, b"\xff"),
        entry("u16", 2, b"\xff\xff"),
        entry("i16", 3, b"\xff\xff"),
        entry("u32", 4, b"\xff" * 4),
        entry("i32", 5, b"\xff" * 4),
        entry("f32", 6, struct.pack("<f", 1e-5)),
        entry("bool", 7, b"\x01"),
        entry("string", 8, text("Ġé")),
        entry("strings", 9, struct.pack("<IQ", 8, 2) + text("a") + text("")),
        entry("i16s", 9, struct.pack("<IQ3h", 3, 3, -1, 0, 1)),
        entry("u64", 10, b"\xff" * 8),
        entry("i64", 11, b"\xff" * 8),
        entry("f64", 12, struct.pack("<d", 0.1)),
        entry("general.alignment", 4, u32(64)),
    )
    path = tmp_path / "x.gguf"
    head = gguf(*entries, records=(record("one", (4, 2), 1, 128),))
    path.write_bytes(head)
    with path.open("rb") as file:
        header = read_header(file, path)
        start = -(-file.tell() // 64) * 64
    expected = {
        "u8": 255, "i8": -1, "u16": 65535, "i16": -1, "u32": 2**32 - 1, "i32": -1, "f32": 1e-5, "bool": True, "string": "Ġé",
        "strings": ["a", ""], "i16s": [-1, 0, 1], "u64": 2**64 - 1, "i64": -1, "f64": 0.1, "general.alignment": 64,
    }  # fmt: skip
    assert dict(header.metadata) == expected
    (one,) = header.records
    assert (one.name, one.dimensions, one.type_id, one.offset) == ("one", (4, 2), 1, start + 128)


FLOATS = bytes(128)
DAMAGED = {
    "empty": (b"", "no GGUF file: it begins with b''"),
    "magic": (b"GGML" + bytes(100), "no GGUF file: it begins with b'GGML'"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "a git-LFS pointer"),
    "version 1": (gguf(version=1), "has GGUF version 1, expected little-endian version 2 or 3"),
    "big-endian": (gguf(version=3 << 24), "is written for big-endian machines"),
    "only magic": (b"GGUF", "ends inside its header"),
    "huge metadata count": (gguf(counts=(0, HUGE)), f"announces {HUGE} metadata entries"),
    "huge tensor count": (gguf(counts=(HUGE, 0)), f"announces {HUGE} tensors"),
    "huge key": (gguf(struct.pack("<Q", HUGE) + bytes(32), counts=(0, 1)), "ends inside a metadata key"),
    "huge string": (gguf(entry("k", 8, struct.pack("<Q", HUGE))), "ends inside metadata `k`"),
    "huge array": (gguf(entry("k", 9, struct.pack("<IQ", 4, HUGE))), f"announces {HUGE} numbers in metadata `k`"),
    "huge strings": (gguf(entry("k", 9, struct.pack("<IQ", 8, HUGE))), f"announces {HUGE} strings in metadata `k`"),
    "nested array": (gguf(entry("k", 9, struct.pack("<IQ", 9, 1) + bytes(64))), "metadata `k` of `PATH` has unknown type number 9"),
    "value type": (gguf(entry("k", 13, bytes(8))), "metadata `k` of `PATH` has unknown type number 13"),
    "not UTF-8": (gguf(entry("k", 8, text(b"\xff"))), "metadata `k` of `PATH` is not UTF-8"),
    "key twice": (gguf(entry("k", 4, u32(1)), entry("k", 4, u32(1))), "has metadata `k` twice"),
    "alignment": (gguf(entry("general.alignment", 4, u32(48))), "is 48, expected a power of two"),
    "alignment 0": (gguf(entry("general.alignment", 4, u32(0))), "is 0, expected a power of two"),
    "alignment type": (gguf(entry("general.alignment", 8, text("32"))), "is a str, expected a int"),
    "rank 0": (gguf(records=(record(dimensions=()),), data=FLOATS), "has 0 dimensions, expected 1 to 4"),
    "rank 5": (gguf(records=(record(dimensions=(1,) * 5),), data=FLOATS), "has 5 dimensions, expected 1 to 4"),
    "tensor twice": (gguf(records=(record(), record()), data=FLOATS), "has tensor `t` twice"),
    "no weights": (gguf(records=(record(dimensions=(32, 0)),), data=FLOATS), "has dimensions [32, 0], expected rows"),
    "half a block": (gguf(records=(record(dimensions=(48,), type_id=2),), data=FLOATS), "expected rows of whole Q4_0 blocks of 32"),
    "huge tensor": (gguf(records=(record(dimensions=(HUGE, HUGE)),), data=FLOATS), "but the file has"),
    "offset": (gguf(records=(record(offset=HUGE),), data=FLOATS), "but the file has"),
    "cut data": (gguf(records=(record(),), data=FLOATS[:-1]), "tensor `t` of `PATH` ends at byte"),
    "unknown type": (gguf(records=(record(type_id=99),), data=FLOATS), "has type number 99, which is not known"),
    "integers": (gguf(records=(record(type_id=26),), data=FLOATS), "has type I32, which cannot be dequantized"),
    "split": (gguf(entry("split.count", 2, b"\x03\x00")), "is one of 3 parts, expected a whole model"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_one_error_with_a_hint(kind, tmp_path) -> None:
    content, message = DAMAGED[kind]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error, open_gguf(path):
        pass
    assert message.replace("PATH", str(path)) in error.value.message
    assert error.value.hint


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory) -> bytes:
    return tiny_gguf.write_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf", weights="Q4_1").path.read_bytes()


def read_all(path) -> None:
    with open_gguf(path) as file:
        model = gguf_model.describe(file)
        gguf_tokenizer.rebuild(file.metadata, model.config["vocab_size"], model.config["max_position_embeddings"])
        for placement in model.placements:
            file.half(placement.source)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.0, 1.0, exclude_max=True))
@example(share=0.0)
@example(share=0.99999)
def test_wherever_a_file_is_cut_it_is_refused(share, tiny_file, tmp_path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_file[: int(share * len(tiny_file))])
    with pytest.raises(CheckpointError):
        read_all(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 9000), noise=st.binary(min_size=1, max_size=8))
def test_noise_in_the_header_never_ends_in_another_error(place, noise, tiny_file, tmp_path) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(tiny_file[:place] + noise + tiny_file[place + len(noise) :])
    try:
        read_all(path)
    except QuantkitError as error:
        assert error.message
