"""Disks that fail: every write, sync and rename may be refused, cut short or interrupted, and nothing is lost or wrong."""

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import tiny

from quantkit.commands import quantize
from quantkit.errors import QuantkitError
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings

TEXT = {"samples": 2, "length": 16, "effort": "fast", "group_size": 32, "evaluate": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("source") / "model", dtype="bfloat16")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    run(model, out)
    return digests(out)


def run(model: Path, out: Path) -> None:
    quantize.run(QuantizeSettings(str(model), out, **TEXT), Silent())


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


class Failing:
    """`os.NAME`, which raises from its n-th call on; or at the n-th alone."""

    def __init__(self, name: str, number: int, at: int, *, once: bool) -> None:
        self.calls = 0
        self._real, self._number, self._at, self._once = getattr(os, name), number, at, once

    def __call__(self, *values: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == self._at or (self.calls > self._at and not self._once):
            raise OSError(self._number, os.strerror(self._number))
        return self._real(*values, **named)


@pytest.fixture(scope="module")
def calls(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often an undisturbed run calls what."""
    counting = {name: Failing(name, 0, 1 << 40, once=True) for name in {name for name, _, _ in FAULTS}}
    with pytest.MonkeyPatch.context() as patch:
        for name, counted in counting.items():
            patch.setattr(os, name, counted)
        run(model, tmp_path_factory.mktemp("counted") / "out")
    return {name: counted.calls for name, counted in counting.items()}


FAULTS = [
    ("pwrite", errno.ENOSPC, False),
    ("pwrite", errno.EIO, True),
    ("fsync", errno.EIO, True),
    ("fsync", errno.ENOSPC, False),
    ("replace", errno.EIO, True),
    ("rename", errno.EROFS, False),
    ("preadv", errno.EIO, True),
]


@pytest.mark.parametrize(("call", "number", "once"), FAULTS)
def test_an_error_of_the_disk_is_told_and_the_job_goes_on(
    call: str,
    number: int,
    once: bool,
    calls: dict[str, int],
    model: Path,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = digests(model)
    for at in sorted({1 + calls[call] // 2, calls[call]}):
        out = tmp_path / f"{at}"
        with monkeypatch.context() as patch:
            patch.setattr(os, call, Failing(call, number, at, once=once))
            with pytest.raises(QuantkitError) as caught:
                run(model, out)
        assert os.strerror(number) in caught.value.message and caught.value.hint
        assert digests(model) == source
        if not out.exists():  # the last sync comes when the folder has its place
            run(model, out)
        assert digests(out) == expected


@pytest.mark.parametrize(("call", "most"), [("pwrite", 7), ("preadv", 100)])
def test_short_writes_and_reads_are_completed(
    call: str, most: int, model: Path, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., int] = getattr(os, call)

    def short(descriptor: int, data: Any, offset: int) -> int:
        part = data[:most] if call == "pwrite" else [data[0][:most]]
        return real(descriptor, part, offset)

    monkeypatch.setattr(os, call, short)
    run(model, tmp_path / "out")
    assert digests(tmp_path / "out") == expected


def test_signals_during_system_calls_change_nothing(model: Path, expected: dict[str, str], tmp_path: Path) -> None:
    """EINTR at any call: the signal has a handler, and comes 500 times a second."""
    heard = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        run(model, tmp_path / "out")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard and digests(tmp_path / "out") == expected


def test_a_place_that_cannot_be_written_is_refused_before_work(model: Path, tmp_path: Path) -> None:
    for out in (Path("/proc/quantkit/out"), Path("/sys/quantkit")):
        with pytest.raises(QuantkitError) as caught:
            run(model, out)
        assert str(out.parent) in caught.value.message and caught.value.hint


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A tmpfs that is given a size in bytes, again and again."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(place)], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a tmpfs")

    def resize(size: int) -> Path:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)
        return place

    yield resize
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.proof
def test_a_full_tmpfs_at_twenty_levels(
    model: Path, expected: dict[str, str], small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before work where the space is known to be too little; and where it runs out on the way, as when somebody
    else has taken it, the job is kept and goes on."""
    source = digests(model)
    enough = 4 << 20
    disk = small_disk(enough)
    run(model, disk / "out")
    used = sum(path.stat().st_blocks * 512 for path in disk.rglob("*"))
    most = 2 * used  # the result, and the job until then
    errors = []
    for level in range(1, 21):
        for path in sorted(disk.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        small_disk(max(4096, most * level // 24))
        with monkeypatch.context() as patch:
            if level % 4:
                patch.setattr(quantize, "require_space", lambda *needs: None)
            try:
                run(model, disk / "out")
            except QuantkitError as error:
                assert "No space left" in error.message or "are free there" in error.message, error.message
                assert error.hint and "space" in error.hint
                assert not (disk / "out").exists() and not list(disk.glob(".out*"))
                errors.append(level)
        assert digests(model) == source
        small_disk(enough)
        run(model, disk / "out")
        assert digests(disk / "out") == expected
    assert len(errors) >= 15, errors
