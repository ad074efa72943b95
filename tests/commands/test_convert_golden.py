"""gptq-to-exl2 on checkpoints that GPTQModel wrote: what calibration saves beside the weights alone. Figures: docs/results/conversions.md.

`QUANTKIT_GOLDEN` names the full set of golden files: models of random weights, with the token ids they were calibrated with.
"""

import json
import os
import shutil
from pathlib import Path

import plain_exl2
import pytest
from safetensors.torch import load_file

import quantkit
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.evaluators.divergence import compare
from quantkit.progress import Silent
from quantkit.runtime.load import load
from quantkit.runtime.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif("QUANTKIT_GOLDEN" not in os.environ, reason="QUANTKIT_GOLDEN does not name a folder of golden files"),
]

ROOT = Path(os.environ.get("QUANTKIT_GOLDEN", ".")) / "gptq"
CASES = [
    "gm-w4-g128-sym-gptq", "gm-w4-g64-sym-act-gptq", "gm-w4-g32-asym-act-v2", "gm-qwen2-w4-g128-sym-gptq",
    "gm-mistral-w4-g64-asym-act-v2", "gm-w8-g128-sym-gptq",
]  # fmt: skip
RATES = (4.5, 5.0, 6.0)
CALIBRATED = 48
"""Of 64 rows; the other 16 are what both are judged by."""


@pytest.mark.parametrize("case", CASES)
def test_calibration_saves_what_the_weights_alone_lose(case: str, tmp_path: Path) -> None:
    base = ROOT / "base" / json.loads((ROOT / case / "case.json").read_text())["base"]
    source = shutil.copytree(ROOT / case, tmp_path / "source", ignore=shutil.ignore_patterns("expected.*", "case.json"))
    for file in base.glob("*token*"):
        shutil.copy(file, source)
    rows = load_file(base / "calibration.safetensors")["input_ids"].long()
    text = tmp_path / "calibration.txt"
    text.write_text(Tokenizer.open(source).decode(rows[:CALIBRATED].flatten().tolist()))
    calibration = {"calibration": str(text), "samples": CALIBRATED, "length": 127, "measurement": tmp_path / "measurement.json"}
    original, ratios = load(source), []
    for rate in RATES:
        added = []
        for name, options in (("data-free", {"data_free": True}), ("calibrated", calibration)):
            out = tmp_path / f"{name}-{rate}"
            quantkit.convert("gptq-to-exl2", source, out, bpw=rate, evaluate=False, progress=Silent(), **options)
            added.append(compare(original, load(out), rows[CALIBRATED:]).kl_mean)
            read = open_checkpoint(out)
            assert plain_exl2.require_same(out, lambda name, read=read: read.dense(name).numpy())
        ratios.append(added[1] / added[0])
        print(f"{case} {rate}: data-free {added[0]:.2e}, calibrated {added[1]:.2e}, ratio {ratios[-1]:.2f}")
    assert max(ratios) < 0.6
    assert added[1] < 6e-3
