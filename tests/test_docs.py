"""The docs are held to the code: generated pages are fresh, and the README's commands run."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import tiny_gguf

from quantkit import cli

ROOT = Path(__file__).parents[1]


def _generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "reference" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["commands.md", "errors.md", "map.md"])
def test_reference_is_fresh(name) -> None:
    generator = _generator()
    assert (ROOT / "docs" / "reference" / name).read_text() == generator.PAGES[name](), "run `make docs`"


def _tour() -> list[str]:
    """The `quantkit …` lines of the README's shell blocks, in order."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("quantkit ")]


def test_everything_in_the_readme_runs(tmp_path, monkeypatch, capsys) -> None:
    """On a tiny model in place of the real one, in the README's own order, with its own names; Python at the end."""
    # Groups of 64 rows need wider linears than the usual tiny model has; windows of 512 tokens a longer context.
    shape = {"hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 1024}
    tiny_gguf.write_model(tmp_path / "SmolLM2-135M-Instruct.gguf", **shape)
    (tmp_path / "notes.txt").write_text("A group of rows shares its scales, and each row its place. " * 200)
    monkeypatch.chdir(tmp_path)
    lines = _tour()
    assert len(lines) >= 6
    for line in lines:
        assert cli.run(shlex.split(line)[1:]) == 0, f"{line}\n{capsys.readouterr().err}"
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(program, names)
    assert names["report"].bits_per_weight < 4
    assert names["weight"].shape == (192, 128)
