import json
import subprocess
import sys

import torch

from quantkit import cli
from quantkit.version import VERSION


def test_json_names_versions_and_the_backend_with_its_reason(capsys) -> None:
    assert cli.run(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["quantkit"] == VERSION
    assert found["healthy"] is True
    assert found["backend"] in {"cpu", "cuda"}
    assert found["backend_reason"]
    versions = {package["name"]: package["version"] for package in found["packages"]}
    assert versions["torch"] == torch.__version__
    assert captured.err == ""


def test_table_is_for_people(capsys) -> None:
    assert cli.run(["doctor"]) == 0
    assert "backend" in capsys.readouterr().out


def test_absent_package_says_what_is_lost(tmp_path) -> None:
    """A process in which `gguf` cannot be found stays healthy and names what no longer works."""
    program = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'gguf' else find(name, package)\n"
        "from quantkit import cli\n"
        "sys.exit(cli.run(['doctor', '--json']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    gguf = next(package for package in json.loads(done.stdout)["packages"] if package["name"] == "gguf")
    assert gguf == {"name": "gguf", "version": None, "needed_for": "`quantkit convert gguf-to-hf`"}


def test_a_backend_that_cannot_be_had_is_said(monkeypatch, capsys) -> None:
    monkeypatch.setenv("QUANTKIT_BACKEND", "cuda")
    cli.run(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    if not torch.cuda.is_available():
        assert found["backend"] == "none"
        assert "cuda" in found["backend_reason"].lower()
