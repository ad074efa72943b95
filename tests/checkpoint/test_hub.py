"""Models by id, from a hub that runs here: what is fetched, what is not, and what is said when it fails."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import tiny
import torch

from quantkit.checkpoint import hub
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """The few answers of a hub that a download needs, for the models in one folder; keeps what it was asked for."""

    def __init__(self, models: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.models = models
        self.fetched: list[str] = []
        self.status = 200

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.answer(send_body=True)

    def do_HEAD(self) -> None:
        self.answer(send_body=False)

    def answer(self, send_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        found = self.server.status == 200
        body, headers = b"", {}
        if path.startswith("/api/models/"):
            name = "/".join(path.split("/")[3:5])
            model = self.server.models / name
            found = found and model.is_dir()
            if found:
                body = json.dumps(self.tree(model) if "/tree/" in path else self.listing(name, model)).encode()
        else:
            organisation, name, _, _, *inner = path.strip("/").split("/")
            file = self.server.models / organisation / name / "/".join(inner)
            found = found and file.is_file()
            if found:
                body = file.read_bytes()
                headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
                if send_body:
                    self.server.fetched.append("/".join(inner))
        self.send_response(200 if found else self.server.status if self.server.status != 200 else 404)
        if not found:
            headers = {"X-Error-Code": {403: "GatedRepo", 500: ""}.get(self.server.status, "RepoNotFound")}
        for key, value in {**headers, "Content-Length": str(len(body)), "Content-Type": "application/json"}.items():
            self.send_header(key, value)
        self.end_headers()
        if send_body:
            self.wfile.write(body)

    def listing(self, name: str, model: Path) -> dict[str, Any]:
        files = [{"rfilename": str(path.relative_to(model))} for path in sorted(model.rglob("*")) if path.is_file()]
        return {"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "private": False, "tags": []}

    def tree(self, model: Path) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": str(path.relative_to(model)), "size": path.stat().st_size, "oid": "0" * 40}
            for path in sorted(model.rglob("*"))
            if path.is_file()
        ]

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with no models yet, which the library takes for the real one, and an empty cache."""
    import huggingface_hub
    from huggingface_hub import constants

    server = Hub(tmp_path / "hub")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.address)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    assert huggingface_hub.HfApi().endpoint == server.address
    yield server
    server.shutdown()
    server.server_close()


def refusal(work: Callable[[], Any]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        work()
    assert caught.value.hint
    return caught.value


def test_a_model_is_fetched_by_its_id_and_nothing_else(tmp_path: Path, server: Hub) -> None:
    model = tiny.write_model(tmp_path / "hub" / "org" / "tiny-1.0", shards=2)
    for name in ("pytorch_model.bin", "consolidated.safetensors", ".gitattributes"):
        (model / name).write_bytes(b"not needed")
    (model / "original").mkdir()
    (model / "original" / "params.json").write_text("{}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    fetched, local = open_checkpoint("org/tiny-1.0"), open_checkpoint(model)
    assert fetched.names() == local.names()
    assert all(torch.equal(fetched.tensor(name), local.tensor(name)) for name in local.names())
    assert [path.name for path in fetched.side_files()] == [path.name for path in local.side_files()]
    assert sorted(server.fetched) == [
        "additional_chat_templates/tools.jinja",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_offline_takes_what_the_cache_has(tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_model(tmp_path / "hub" / "org" / "tiny")
    error = refusal(lambda: open_checkpoint("org/tiny", offline=True))
    assert error.message == "`org/tiny` is no folder here and not in the local cache"
    assert server.fetched == []
    names = open_checkpoint("org/tiny").names()
    server.status = 500
    assert open_checkpoint("org/tiny", offline=True).names() == names
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint("org/tiny").names() == names


def test_an_existing_path_is_never_asked_for(tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_model(tmp_path / "hub" / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert "holds no safetensors files" in refusal(lambda: open_checkpoint("org/tiny")).message
    assert server.fetched == []


@pytest.mark.parametrize(
    ("status", "message", "hint"),
    [
        (404, "`org/closed` is neither a folder here nor a model of the hub", "check the name"),
        (403, "`org/closed` is closed to you", "ask for access at http://127.0.0.1"),
        (500, "`org/closed` is no folder here, and the hub failed: ", "check the network"),
    ],
)
def test_a_model_that_is_not_given(tmp_path: Path, server: Hub, status: int, message: str, hint: str) -> None:
    server.status = status
    error = refusal(lambda: open_checkpoint("org/closed"))
    assert error.message.startswith(message)
    assert str(error.hint).startswith(hint)


def test_no_hub_at_all(tmp_path: Path) -> None:
    """In a fresh process, where nothing but the reader imports the library."""
    script = "import quantkit\ntry:\n    quantkit.open_checkpoint('org/tiny')\nexcept Exception as e:\n    print(e, e.hint)"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.startswith("`org/tiny` is no folder here, and the hub failed: ")
    assert "Connection refused" in done.stdout
    assert "HF_HUB_OFFLINE=1" in done.stdout


def test_pickles_are_refused_before_they_are_fetched(tmp_path: Path, server: Hub) -> None:
    model = tiny.write_model(tmp_path / "hub" / "org" / "old")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    message = refusal(lambda: open_checkpoint("org/old")).message
    assert message.startswith("`org/old` has only pickled weights (`pytorch_model.bin`): pickled weights can run code")
    assert server.fetched == []


def test_without_the_library_a_folder_is_still_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert open_checkpoint(tiny.write_model(tmp_path)).names()
    error = refusal(lambda: open_checkpoint("org/tiny"))
    assert "hub ids need the `huggingface_hub` library, which is not installed" in error.message
    assert error.hint == "pip install huggingface_hub"


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (["model.safetensors", "adapter.safetensors"], ["model.safetensors"]),
        (["output-00001-of-00001.safetensors", "other.safetensors"], ["output-00001-of-00001.safetensors"]),
        (["b.safetensors", "a.safetensors", "onnx/c.safetensors"], ["a.safetensors", "b.safetensors"]),
    ],
)
def test_weights_are_chosen_as_in_a_folder(names: list[str], weights: list[str]) -> None:
    assert hub.choose("org/x", [*names, "config.json", "model.onnx"]) == sorted([*weights, "config.json"])
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        hub.choose("org/x", ["config.json"])
