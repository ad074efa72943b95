"""Folders that appear whole or not at all, in the bytes that every reader of safetensors expects."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from quantkit.checkpoint.reader import open_checkpoint
from quantkit.checkpoint.writer import CheckpointWriter


@pytest.mark.parametrize("shard_bytes", [2**30, 50_000])
def test_a_copy_has_the_same_tensors_and_side_files(tmp_path: Path, shard_bytes: int) -> None:
    source = open_checkpoint(tiny.write_model(tmp_path / "in", "Qwen2ForCausalLM", dtype="bfloat16"))
    with CheckpointWriter(tmp_path / "out", source=source.path, shard_bytes=shard_bytes) as writer:
        for name in source.names():
            writer.add(name, source.tensor(name))
        files = writer.finish(source.config, source.side_files())
    copy = open_checkpoint(tmp_path / "out")
    assert copy.config == source.config
    assert sorted(copy.names()) == sorted(source.names())
    by_library = {}
    for file in files:
        if file.suffix == ".safetensors":
            by_library |= load_file(file)
    for name in source.names():
        assert torch.equal(copy.tensor(name), source.tensor(name))
        assert torch.equal(by_library[name], source.tensor(name))
    for path in source.side_files():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert (tmp_path / "out" / "model.safetensors").exists() == (shard_bytes == 2**30)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}
