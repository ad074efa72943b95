"""Compiling kernels without a GPU: errors that can be read, and a cache that never breaks anything."""

from dataclasses import replace
from pathlib import Path

import pytest

from quantkit.errors import BackendError
from quantkit.kernels import nvrtc
from quantkit.kernels.sources import headers, source

needs_nvrtc = pytest.mark.skipif(not nvrtc.find_libraries(), reason="NVRTC is not installed")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    return tmp_path / "cuda"


@needs_nvrtc
def test_a_cubin_is_made_once(cache, monkeypatch) -> None:
    path = nvrtc.cubin_file("unpack", {"BITS": 4, "COLUMNS": 4}, 90)
    assert path.parent == cache
    assert path.read_bytes()[:4] == b"\x7fELF"
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *_: pytest.fail("compiled a second time"))
    assert nvrtc.cubin_file("unpack", {"COLUMNS": 4, "BITS": 4}, 90) == path
    assert [file.name for file in cache.iterdir()] == [path.name], "a temporary file was left behind"


@needs_nvrtc
def test_whatever_changes_the_code_changes_the_key(cache, monkeypatch) -> None:
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *_: nvrtc.Cubin(b"code", ""))
    paths = [nvrtc.cubin_file("unpack", {"BITS": 4, "COLUMNS": 4}, architecture) for architecture in (80, 90)]
    paths.append(nvrtc.cubin_file("unpack", {"BITS": 8, "COLUMNS": 4}, 90))
    changed = {**headers(), "intrin.cuh": headers()["intrin.cuh"] + "\n"}
    monkeypatch.setattr(nvrtc, "headers", lambda: changed)
    paths.append(nvrtc.cubin_file("unpack", {"BITS": 4, "COLUMNS": 4}, 90))
    monkeypatch.setattr(nvrtc.library(), "version", (99, 0))
    paths.append(nvrtc.cubin_file("unpack", {"BITS": 4, "COLUMNS": 4}, 90))
    assert len(set(paths)) == 5


@needs_nvrtc
def test_a_folder_that_cannot_be_written_is_done_without(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "file"))
    path = nvrtc.cubin_file("pack", {"BITS": 8, "COLUMNS": 1}, 80)
    assert path.read_bytes()[:4] == b"\x7fELF"
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *_: pytest.fail("compiled a second time"))
    assert nvrtc.cubin_file("pack", {"BITS": 8, "COLUMNS": 1}, 80) == path


@needs_nvrtc
def test_an_interrupted_write_is_not_taken_for_a_cubin(cache) -> None:
    path = nvrtc.cubin_file("pack", {"BITS": 4, "COLUMNS": 1}, 80)
    path.write_bytes(b"")
    assert nvrtc.cubin_file("pack", {"BITS": 4, "COLUMNS": 1}, 80).read_bytes()[:4] == b"\x7fELF"


@needs_nvrtc
def test_a_compile_error_is_one_line() -> None:
    broken = replace(source("pack"), text=source("pack").text.replace("put_code<BITS>", "put_cod<BITS>"))
    with pytest.raises(BackendError) as caught:
        nvrtc.library().compile(broken, {"BITS": 4, "COLUMNS": 1}, 90)
    assert "`pack` does not compile with `-arch=sm_90 -std=c++17 --ptxas-options=-v -DBITS=4 -DCOLUMNS=1`" in caught.value.message
    assert 'pack.cu(' in caught.value.message and '"put_cod" is undefined' in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint == "`QUANTKIT_BACKEND=reference` does the same in plain torch"


@needs_nvrtc
def test_an_architecture_that_nvrtc_does_not_know() -> None:
    with pytest.raises(BackendError, match="cannot compile for sm_60: it knows sm_75"):
        nvrtc.cubin_file("pack", {"BITS": 4, "COLUMNS": 1}, 60)


def test_no_nvrtc(monkeypatch) -> None:
    monkeypatch.setattr(nvrtc, "find_libraries", list)
    nvrtc.library.cache_clear()
    with pytest.raises(BackendError, match="is not installed") as caught:
        nvrtc.cubin_file("pack", {"BITS": 4, "COLUMNS": 1}, 80)
    assert "pip install nvidia-cuda-nvrtc" in caught.value.hint


def test_a_library_that_is_not_nvrtc(tmp_path) -> None:
    (tmp_path / "libnvrtc.so.13").write_text("not a library")
    with pytest.raises(BackendError, match="not a usable NVRTC library"):
        nvrtc.Nvrtc(tmp_path / "libnvrtc.so.13")


def test_the_newest_wheel_is_taken_first(tmp_path, monkeypatch) -> None:
    for name in ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.alt.so.12"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(nvrtc, "find_spec", lambda name: Spec)
    assert [path.name for path in nvrtc.find_libraries()][:2] == ["libnvrtc.so.13", "libnvrtc.so.12"]
