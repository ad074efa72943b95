"""GGUF written here is read by llama.cpp, with the perplexity of the source.

llama-cpp-python lives in the peers' environment, or in the one that QUANTKIT_LLAMA names.
"""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import smollm2
import torch

import quantkit
from quantkit.calibration.text import held_back
from quantkit.evaluators.perplexity import score
from quantkit.progress import Silent
from quantkit.runtime.load import load
from quantkit.runtime.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("QUANTKIT_LLAMA", ROOT / ".venv-peers")) / "bin" / "python"
WINDOWS, LENGTH = 4, 512
# llama.cpp rounds activations to 8 bits before it multiplies them with Q8_0.
MOST = {"F16": 0.02, "Q8_0": 0.2}

pytestmark = pytest.mark.proof


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_perplexity_is_that_of_the_weights_written(kind: str, tmp_path: Path) -> None:
    """F16 holds the source exactly. Q8_0 does not, so that its own weights, read back, are what llama.cpp should give."""
    source = smollm2.for_test()
    quantkit.convert("hf-to-gguf", source, tmp_path / "m.gguf", type=kind, progress=Silent())
    windows = held_back(Tokenizer.open(source), LENGTH, WINDOWS)
    (tmp_path / "windows.json").write_text(json.dumps(windows.tolist()))
    script = Path(__file__).with_name("llama_perplexity.py")
    command = [str(PYTHON), str(script), str(tmp_path / "windows.json"), str(tmp_path / "m.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = math.exp(json.loads(done.stdout)[str(tmp_path / "m.gguf")])
    model = source
    if kind != "F16":
        quantkit.convert("gguf-to-hf", tmp_path / "m.gguf", tmp_path / "back", progress=Silent())
        model = tmp_path / "back"
    with torch.inference_mode():
        ours = score(load(model), windows).perplexity
    assert theirs == pytest.approx(ours, abs=MOST[kind])
