"""Compiled kernels on the disk: whatever became of their files, the kernel runs."""

import errno
from pathlib import Path

import numba
import numpy as np
import pytest
from numba import types
from numba.core.caching import IndexDataCacheFile

from quantkit.kernels import jit

C_SIGNATURE = types.int64(types.int64)


def make(as_c: bool):  # type: ignore[no-untyped-def]
    """A kernel, compiled or read from its files, and how often it was read."""

    def doubled(x):  # type: ignore[no-untyped-def]
        return 2 * x

    if as_c:
        made = jit.compiled_as_c(C_SIGNATURE, doubled)
        return made.ctypes(21), made.cache_hits
    made = jit.compiled(doubled)
    return made(np.int64(21)), sum(made.stats.cache_hits.values())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("as_c", [False, True])
def test_what_was_compiled_is_read_the_next_time(as_c: bool, folder: Path) -> None:
    assert make(as_c) == (42, 0)
    assert make(as_c) == (42, 1)


@pytest.mark.parametrize("as_c", [False, True])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0, 40])
def test_a_file_cut_short_is_written_anew(kind: str, left: int, as_c: bool, folder: Path) -> None:
    make(as_c)
    (file,) = folder.rglob(f"*.{kind}")
    file.write_bytes(file.read_bytes()[:left])
    assert make(as_c) == (42, 0)
    assert make(as_c) == (42, 1)


@pytest.mark.parametrize("as_c", [False, True])
def test_a_full_disk_is_no_obstacle(as_c: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "save", full)
        assert make(as_c) == (42, 0)
    assert make(as_c) == (42, 0)
    assert make(as_c) == (42, 1)


def test_what_older_sources_left_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(jit, "_state_of_sources", lambda: "0123456789ab")
        make(as_c=False)
    (old,) = {file.parent for file in folder.rglob("*.nbi")}
    other = old / "another.kernel_0123456789ab-1.py311.nbi"
    other.touch()
    make(as_c=False)
    left = sorted(file.name for file in old.iterdir())
    assert other.name in left and len(left) == 3, left
    assert not any("doubled_0123456789ab" in name for name in left)
    assert make(as_c=False) == (42, 1)
