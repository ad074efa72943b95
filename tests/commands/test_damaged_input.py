"""Damaged inputs: each is an error of the tree that names file and tensor, soon, in little memory, with nothing written.

The cases are in `tests/damaged.py`, which also writes docs/results/damaged-input.md.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import damaged
import pytest

from quantkit.errors import QuantkitError

PAGE = Path(__file__).parents[2] / "docs" / "results" / "damaged-input.md"
AS_COMMANDS = 20
# Told without a path of the input: numbers that go wrong while a model runs, with the layer that made them; no input.
WITHOUT_PLACE = {
    "NaN in `model.layers.0.self_attn.q_proj.weight`, to be read",
    "NaN in `model.layers.1.input_layernorm.weight`, to be read",
    "NaN in `lm_head.weight`, to be read",
    "model: leading out",
    "model: an id, offline",
}


def exit_codes(of: type[QuantkitError]) -> set[int]:
    return {of.exit_code}.union(*(exit_codes(each) for each in of.__subclasses__()))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    damaged.write_models(folder)
    damaged.warm_up(folder)
    return folder


@pytest.fixture(scope="module")
def cases(models: Path) -> dict[str, damaged.Case]:
    return {case.name: case for case in damaged.cases(models)}


NAMES = re.findall(r"^\| (.*?) \| (?:B\d+)? \| \d", PAGE.read_text(), re.MULTILINE)


def test_the_page_lists_every_case(cases: dict[str, damaged.Case]) -> None:
    assert list(cases) == NAMES, "run `python tests/damaged.py > docs/results/damaged-input.md`"
    assert len(NAMES) >= 150


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_input_is_refused(name: str, cases: dict[str, damaged.Case], models: Path, tmp_path: Path) -> None:
    case = cases[name]
    seen = damaged.see(case, models, tmp_path / "w")
    assert seen.code in exit_codes(QuantkitError) - {1}, seen.stderr
    for said in case.says:
        assert said in seen.stderr
    assert "Traceback" not in seen.stderr and "hint:" in seen.stderr
    assert (str(tmp_path / "w") in seen.stderr.partition("hint:")[0]) != (name in WITHOUT_PLACE)
    assert not seen.written
    assert seen.memory_bytes <= damaged.LIMIT_BYTES


@pytest.mark.parametrize("name", NAMES[:: len(NAMES) // AS_COMMANDS + 1])
def test_as_a_command(name: str, cases: dict[str, damaged.Case], models: Path, tmp_path: Path) -> None:
    case = cases[name]
    arguments = damaged.lay_out(case, models, tmp_path / "w")
    before = damaged.listing(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "quantkit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode in exit_codes(QuantkitError) - {1}, done.stderr
    assert "Traceback" not in done.stderr
    for said in case.says:
        assert said in done.stderr + (done.stdout if case.command[0] == "check" else "")
    assert damaged.listing(tmp_path) == before
