"""One file, written as its tensors arrive, and read by the library of the format."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantkit.checkpoint.header import read_header
from quantkit.checkpoint.shard import HEADER_ROOM, ShardWriter

TENSORS = {
    "odd": torch.arange(3, dtype=torch.float16),
    "a.weight": torch.randn(40, 30, generator=torch.Generator().manual_seed(0)),
    "flag": torch.tensor([True, False, True]),
    "b.weight": torch.arange(20, dtype=torch.int64),
    "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
    "none": torch.empty(0, 7),
    "words": torch.arange(5, dtype=torch.int32),
}


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    shard = ShardWriter(path)
    for name, tensor in tensors.items():
        shard.add(name, tensor)
    shard.close()
    return path


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "x", TENSORS))
    assert header.entries.keys() == TENSORS.keys()
    for name, entry in header.entries.items():
        assert entry.start % TENSORS[name].element_size() == 0
    assert header.metadata == {"format": "pt"}


def test_the_library_reads_what_was_given(tmp_path: Path) -> None:
    read = load_file(write(tmp_path / "x", TENSORS))
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_tensors_of_any_stride_and_with_gradients(tmp_path: Path) -> None:
    whole = torch.randn(6, 8, requires_grad=True)
    tensors = {"turned": whole.T, "part": whole[:, 2:5], "spread": torch.ones(1).expand(16), "odd": whole[0, :3]}
    read = load_file(write(tmp_path / "x", tensors))
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor.detach())


def test_names_of_any_script(tmp_path: Path) -> None:
    assert load_file(write(tmp_path / "x", {'é"\\\n語': torch.ones(2)})).keys() == {'é"\\\n語'}


@pytest.mark.parametrize("megabytes", [1, 40])
def test_room_that_is_left_for_the_header_is_small(tmp_path: Path, megabytes: int) -> None:
    """Small files have none; in large ones it is spaces, as the format allows."""
    path = write(tmp_path / "x", {"x": torch.ones(megabytes * 2**18), "y": torch.ones(3, dtype=torch.int8)})
    beside_data = path.stat().st_size - megabytes * 2**20
    assert beside_data < 300 if megabytes == 1 else beside_data == 8 + HEADER_ROOM + 3
    read = load_file(path)
    assert bool(read["x"].all())
    assert bool(read["y"].all())


def test_a_first_tensor_always_has_room(tmp_path: Path) -> None:
    shard = ShardWriter(tmp_path / "x")
    large, small = torch.ones(100), torch.ones(1)
    assert shard.has_room("a", large, 8)
    shard.add("a", large)
    assert not shard.has_room("b", small, 403)
    assert shard.has_room("b", small, 404)
    shard.close()
