"""A conversion that was made before is known by the same command, and by no other."""

from pathlib import Path

import pytest
import tiny_gptq
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.commands.conversion.report import ConvertReport
from quantkit.errors import CheckpointError
from quantkit.progress import Silent


def convert(route: str, source: Path, out: Path, **options: object) -> ConvertReport:
    return quantkit.convert(route, source, out, progress=Silent(), **options)


@pytest.mark.parametrize(
    ("route", "options"),
    [
        ("gptq-to-hf", {}),
        ("gptq-to-exl2", {"bpw": 5.0, "data_free": True, "evaluate": False}),
        ("gptq-to-exl2", {"bpw": 5.0, "samples": 2, "length": 16, "evaluate": False}),
    ],
)
def test_the_same_command_knows_its_result(route: str, options: dict, tmp_path: Path) -> None:
    source, out = tiny_gptq.write_model(tmp_path / "in"), tmp_path / "out"
    first = convert(route, source, out, **options)
    times = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    again = convert(route, source, out, **options)
    assert again.way.startswith("finished before") and again.written == first.written
    assert times == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="is another result: input was") as caught:
        convert(route, source, out, **options)
    assert "--overwrite" in caught.value.hint and "`-o`" not in caught.value.hint
    assert not convert(route, source, out, overwrite=True, **options).way.startswith("finished")
    tensors = load_file(out / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="its tensors were changed afterwards"):
        convert(route, source, out, **options)
