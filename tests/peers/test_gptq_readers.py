"""What quantkit writes is read by its peers, with equal logits: every setting that both can hold.

The peers live in their own environment: `make peers` builds it, `make proof` runs this.
"""

import itertools
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_model

import quantkit
from quantkit import cli

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("QUANTKIT_PEERS", ROOT / ".venv-peers")) / "bin" / "python"
CASES = list(itertools.product((4, 3), (32, 64), ("sym", "asym"), (False, True)))

# Root mean square, as a share of the logits' own. transformers multiplies in float32 from weights that are equal bit for
# bit: only the order of sums differs. GPTQModel computes in float16. Rounding to 8 bits would already cost 2e-2.
TOLERANCE = {"transformers": 1e-5, "gptqmodel": 5e-3}

pytestmark = pytest.mark.proof


def _name(bits: int, group_size: int, symmetry: str, act_order: bool) -> str:
    return f"w{bits}-g{group_size}-{symmetry}{'-act' if act_order else ''}"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """One tiny Llama, quantized with every setting, and the token ids to probe it with."""
    assert PEERS.exists(), f"no peers at {PEERS}: run `make peers`"
    folder = tmp_path_factory.mktemp("peers")
    model = write_model(folder / "model", hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    ids = torch.randint(0, 200, (2, 24), generator=torch.Generator().manual_seed(1))
    folders = {}
    for bits, group_size, symmetry, act_order in CASES:
        name = _name(bits, group_size, symmetry, act_order)
        options = ["--bits", str(bits), "--group-size", str(group_size), f"--{symmetry}", "--samples", "16", "--length", "64"]
        options += ["--act-order"] if act_order else []
        assert cli.run(["quantize", str(model), "-o", str(folder / name), *options, "--no-eval"]) == 0
        save_file({"input_ids": ids}, folder / name / "probe.safetensors")
        folders[name] = folder / name
    return folders


@pytest.fixture(scope="module", params=["transformers", "gptqmodel"])
def reader(request, written) -> str:
    command = [str(PEERS), str(Path(__file__).with_name("logits.py")), request.param, *map(str, written.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param


@pytest.mark.parametrize("case", [_name(*case) for case in CASES])
def test_peer_reads_the_same_model(case: str, reader: str, written: dict[str, Path]) -> None:
    folder = written[case]
    theirs = load_file(folder / f"read-by-{reader}.safetensors")
    own = quantkit.load(folder)(load_file(folder / "probe.safetensors")["input_ids"])
    assert (own - theirs.pop("logits")).square().mean().sqrt() < TOLERANCE[reader] * own.std()
    checkpoint = quantkit.open_checkpoint(folder)
    assert reader == "transformers" or set(theirs) == set(checkpoint.linears()) - {"lm_head"}
    for name, weight in theirs.items():
        assert torch.equal(checkpoint.dense(name), weight), name
