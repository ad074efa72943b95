"""Named data sets, without a network: one is in the cache, the others nowhere."""

import json
import socket
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow
import pytest

from quantkit.calibration.dataset import read_dataset
from quantkit.errors import CalibrationError

ROWS = [f"{number:04}" for number in range(9)]


@pytest.fixture(autouse=True)
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """No name has an address; what was looked up all the same."""
    asked: list[object] = []

    def no_address(host: object, *more: object, **options: object) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    return asked


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    return tmp_path


def keep(cache: Path, **columns: list) -> None:
    """What the library leaves in its cache of `Salesforce/wikitext`, split `test`."""
    folder = cache / "Salesforce___wikitext" / "wikitext-2-raw-v1" / "0.0.0" / "0123456789abcdef"
    folder.mkdir(parents=True)
    table = datasets.Dataset.from_dict(columns)
    with pyarrow.OSFile(str(folder / "wikitext-test.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.data.schema) as stream:
        stream.write_table(table.data.table)
    described = {
        "builder_name": "wikitext",
        "dataset_name": "wikitext",
        "config_name": "wikitext-2-raw-v1",
        "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0},
        "features": table.features.to_dict(),
        "splits": {"test": {"name": "test", "num_bytes": 1, "num_examples": len(table), "dataset_name": "wikitext"}},
    }
    (folder / "dataset_info.json").write_text(json.dumps(described))


@pytest.mark.parametrize("name", ["wikitext2", "someone/corpus", "corpus"])
def test_without_network_and_cache_it_fails_at_once(name: str, lookups: list[object]) -> None:
    with pytest.raises(CalibrationError) as caught:
        read_dataset(name, "test")
    asked_for = {"wikitext2": "Salesforce/wikitext"}.get(name, name)
    assert caught.value.message.startswith(f"data set `{asked_for}` cannot be read: the hub cannot be reached (")
    assert caught.value.message.endswith("and the local cache has no such data set")
    assert "FILE" in str(caught.value.hint)
    assert len(lookups) <= 2, "one question, which a client may put in two ways"
    assert not datasets.config.HF_HUB_OFFLINE


def test_the_cache_serves_without_network(cache: Path, lookups: list[object]) -> None:
    keep(cache, text=ROWS)
    assert read_dataset("wikitext2", "test") == ROWS
    assert read_dataset("wikitext2", "test", limit=10) == ROWS[:3]
    shuffled = read_dataset("wikitext2", "test", seed=1)
    assert sorted(shuffled) == ROWS != shuffled == read_dataset("wikitext2", "test", seed=1)
    assert len(lookups) <= 8
    assert not datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize("columns", [{"body": ROWS}, {"text": [1, 2]}])
def test_a_dataset_without_text_lists_its_columns(cache: Path, columns: dict[str, list]) -> None:
    keep(cache, **columns)
    with pytest.raises(CalibrationError, match=f"`Salesforce/wikitext` has no column `text` of strings, only `{next(iter(columns))}`"):
        read_dataset("wikitext2", "test")


def test_a_hub_that_answers_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` says of a data set that it could ask for is passed on, one line of it."""
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, path: path)

    def refuse(*names: str, **options: object) -> None:
        assert (names, options) == (("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test", "streaming": True})
        raise ValueError("Bad split: test\n(and a long story)")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(CalibrationError, match=r"data set `Salesforce/wikitext` cannot be read: Bad split: test$"):
        read_dataset("wikitext2", "test")


@pytest.mark.parametrize("name", ["", "a b", "ünïcode", "a/b/c"])
def test_what_cannot_be_a_name_is_called_so(name: str, lookups: list[object]) -> None:
    with pytest.raises(CalibrationError, match="is no name of a data set") as caught:
        read_dataset(name, "test")
    assert "organisation/name" in str(caught.value.hint)
    assert not lookups


def test_without_the_library_the_hint_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CalibrationError, match="`datasets` is not installed") as caught:
        read_dataset("someone/corpus", "test")
    assert "FILE" in str(caught.value.hint)
