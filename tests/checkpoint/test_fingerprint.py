"""One fingerprint for one model, another for any other."""

from pathlib import Path

import tiny
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.fingerprint import fingerprint
from quantkit.checkpoint.reader import open_checkpoint


def test_shards_do_not_matter_but_every_weight_does(tmp_path: Path) -> None:
    whole = fingerprint(open_checkpoint(tiny.write_model(tmp_path / "a", seed=3)))
    assert len(whole) == 64
    assert fingerprint(open_checkpoint(tiny.write_model(tmp_path / "b", seed=3, shards=2))) == whole
    assert fingerprint(open_checkpoint(tiny.write_model(tmp_path / "c", seed=4))) != whole
    assert fingerprint(open_checkpoint(tiny.write_model(tmp_path / "d", seed=3, dtype="bfloat16"))) != whole
    file = tmp_path / "a" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][-1] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    assert fingerprint(open_checkpoint(tmp_path / "a")) != whole
