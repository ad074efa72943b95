"""Readers given anything: what they cannot read is an error of the tree. `tests/fuzz.py` is the coverage-guided form."""

import subprocess
import sys
from pathlib import Path

import fuzz
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SECONDS = 300
"""Of each reader in the proof: half an hour together."""
SEEDS = [pytest.param(path.parent.name, path, id=f"{path.parent.name}-{path.name}") for path in sorted(fuzz.SEEDS.glob("*/*"))]
FEW = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def test_every_reader_has_seeds_that_are_read() -> None:
    read = {reader for reader in fuzz.READERS for path in (fuzz.SEEDS / reader).iterdir() if fuzz.attempt(reader, path.read_bytes())}
    assert read >= {"safetensors", "config", "gptq", "exl2", "template"}
    assert sum(path.stat().st_size for path in fuzz.SEEDS.rglob("*")) < 64 << 10


@pytest.mark.parametrize(("reader", "path"), SEEDS)
def test_what_was_worth_keeping(reader: str, path: Path) -> None:
    fuzz.attempt(reader, path.read_bytes())


@pytest.mark.parametrize("reader", fuzz.READERS)
@FEW
@given(data=st.data())
def test_changed_seeds(reader: str, data: st.DataObject) -> None:
    """A few bytes of a sound file, and where it ends."""
    seed = data.draw(st.sampled_from(sorted((fuzz.SEEDS / reader).iterdir())))
    content = bytearray(seed.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    fuzz.attempt(reader, bytes(content[: data.draw(st.integers(0, len(content)))]))


@pytest.mark.parametrize("reader", fuzz.READERS)
@FEW
@given(content=st.binary(max_size=600))
def test_noise(reader: str, content: bytes) -> None:
    fuzz.attempt(reader, content)


@pytest.mark.proof
@pytest.mark.parametrize("reader", fuzz.READERS)
def test_under_the_fuzzer(reader: str, tmp_path: Path) -> None:
    """Needs `pip install atheris`. No crash, no hang, no allocation without a bound."""
    pytest.importorskip("atheris")
    command = [sys.executable, fuzz.__file__, reader, str(SECONDS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(tmp_path.glob("crash-*"))
    print(reader, [line for line in done.stderr.splitlines() if line.startswith("stat::")])
