"""What quantkit writes is read by its peers, with equal logits: every setting that both can hold.

The peers live in their own environment: `make peers` builds it, `make proof` runs this.
"""

import itertools
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_lonely_mixture, write_model

import quantkit
from quantkit import cli
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.spelling import respelled

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("QUANTKIT_PEERS", ROOT / ".venv-peers")) / "bin" / "python"
READERS = ("transformers", "gptqmodel")

# Root mean square, as a share of the logits' own. transformers multiplies in float32 from weights that are equal bit for
# bit: only the order of sums differs. GPTQModel computes in float16. Rounding to 8 bits would already cost 2e-2.
TOLERANCE = {"transformers": 1e-5, "gptqmodel": 5e-3}

pytestmark = pytest.mark.proof


@dataclass(frozen=True)
class Case:
    """What to quantize, how, and who can read it; `respell`: names as transformers has them in memory, not on disk."""

    name: str
    options: tuple[str, ...]
    readers: tuple[str, ...] = READERS
    family: str = "LlamaForCausalLM"
    tied: bool = False
    respell: bool = False
    intermediate: int = 256


def _settings() -> list[Case]:
    """Widths × group sizes × symmetry × act-order × format. Where groups have 64 rows the last of `down_proj` has 32."""
    cases = []
    for bits, group_size, symmetry, act_order, written in itertools.product(
        (2, 3, 4, 8), (32, 64, -1), ("sym", "asym"), (False, True), ("gptq", "gptq_v2")
    ):
        options = ["--bits", str(bits), "--group-size", str(group_size), f"--{symmetry}", "--checkpoint-format", written]
        readers = set(READERS)
        if symmetry == "asym" and written == "gptq":
            readers.discard("gptqmodel")  # it takes such files from itself alone
        if bits == 4 and group_size != 32:
            readers.discard("transformers")  # the kernel that it chooses on a CPU multiplies wrongly
        name = f"w{bits}-g{group_size}-{symmetry}{'-act' if act_order else ''}-{written}"
        options += ["--act-order"] if act_order else []
        intermediate = 288 if group_size == 64 else 256
        cases.append(Case(name, tuple(options), tuple(sorted(readers)), intermediate=intermediate))
    return cases


GPTQMODEL = ("gptqmodel",)
# Each with one expert that no token reaches.
MIXTURES = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM")
CASES = [
    *_settings(),
    Case("rules", ("--rule", ".*down_proj:bits=8,group_size=64", "--rule", ".*k_proj:bits=3"), GPTQMODEL),
    Case("rules-act-asym", ("--rule", ".*o_proj:act_order=true", "--rule", ".*up_proj:sym=false")),
    Case("skip-a-kind", ("--skip", ".*v_proj")),
    Case("skip-in-one-block", ("--skip", r".*layers\.1\..*down_proj"), GPTQMODEL),
    Case("head", ("--lm-head",), GPTQMODEL),
    Case("head-8-bit", ("--lm-head", "--rule", "lm_head:bits=8,group_size=64"), GPTQMODEL),
    Case("tied", (), tied=True),
    Case("untied", ("--untie-head",), tied=True),
    Case("untied-head", ("--untie-head", "--lm-head"), GPTQMODEL, tied=True),
    Case("rotated", ("--rotate", "--untie-head"), tied=True),
    Case("rotated-biases", ("--rotate",), family="Qwen2ForCausalLM"),
    Case("rotated-head", ("--rotate", "--untie-head", "--lm-head"), GPTQMODEL, tied=True),
    Case("qwen2-moe", (), GPTQMODEL, "Qwen2MoeForCausalLM"),
    Case("qwen3-moe", (), GPTQMODEL, "Qwen3MoeForCausalLM"),
    Case("mixtral-in-other-words", (), GPTQMODEL, "MixtralForCausalLM", respell=True),
    *(
        Case(f"{name}-experts-skipped", ("--skip", r".*experts\.\d+"), ("transformers",), family)
        for name, family in zip(("qwen2-moe", "qwen3-moe", "mixtral"), MIXTURES, strict=True)
    ),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """Each case as a folder, with the token ids to probe it with."""
    assert PEERS.exists(), f"no peers at {PEERS}: run `make peers`"
    folder = tmp_path_factory.mktemp("peers")
    ids = torch.randint(0, 200, (2, 24), generator=torch.Generator().manual_seed(1))

    @cache
    def model(family: str, tied: bool, respell: bool, intermediate: int) -> Path:
        path = folder / f"{family}{tied}{respell}{intermediate}"
        write = write_lonely_mixture if family in MIXTURES else write_model
        write(path, family, hidden_size=128, intermediate_size=intermediate, tie_word_embeddings=tied)
        if respell:
            tensors = load_file(path / "model.safetensors")
            save_file({respelled(name): tensor for name, tensor in tensors.items()}, path / "model.safetensors")
        return path

    folders = {}
    for case in CASES:
        source, out = model(case.family, case.tied, case.respell, case.intermediate), folder / case.name
        options = ["--group-size", "32", "--effort", "fast", "--samples", "8", "--length", "64", "--no-eval", *case.options]
        assert cli.run(["quantize", str(source), "-o", str(out), *options]) == 0, case.name
        save_file({"input_ids": ids}, out / "probe.safetensors")
        folders[case.name] = out
    return folders


@pytest.fixture(scope="module", params=READERS)
def reader(request, written) -> str:
    own = [str(written[case.name]) for case in CASES if request.param in case.readers]
    command = [str(PEERS), str(Path(__file__).with_name("logits.py")), request.param, *own]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_peer_reads_the_same_model(case: Case, reader: str, written: dict[str, Path]) -> None:
    if reader not in case.readers:
        pytest.skip(f"{reader} cannot read it: docs/results/readers.md")
    folder = written[case.name]
    refusal = folder / f"read-by-{reader}.txt"
    assert not refusal.exists(), refusal.read_text()
    theirs = load_file(folder / f"read-by-{reader}.safetensors")
    own = quantkit.load(folder)(load_file(folder / "probe.safetensors")["input_ids"])
    assert (own - theirs.pop("logits")).square().mean().sqrt() < TOLERANCE[reader] * own.std()
    checkpoint = quantkit.open_checkpoint(folder)
    quantized = [name for name in checkpoint.names() if name.endswith(".qweight")]
    assert reader == "transformers" or set(theirs) == {name.removesuffix(".qweight") for name in quantized}
    for name, weight in theirs.items():
        assert torch.equal(_linear(checkpoint, name), weight), name


def _linear(checkpoint: Checkpoint, on_disk: str) -> torch.Tensor:
    names = {respelled(name): name for name in checkpoint.linears()}
    return checkpoint.dense(names.get(on_disk, on_disk))


def test_half_of_the_scales_are_negative(written: dict[str, Path]) -> None:
    """Of symmetric files: whatever passes above is read with them."""
    scales = quantkit.open_checkpoint(written["w4-g32-sym-gptq"]).tensor("model.layers.0.mlp.down_proj.scales")
    assert 0.3 < (scales < 0).float().mean() < 0.7
