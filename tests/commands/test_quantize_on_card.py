"""Quantizing on a GPU, simulated: the bytes of the CPU, nothing left behind on the card, and too little memory there."""

from pathlib import Path

import pytest
import tiny
import torch
from cuda_on_cpu import compiler
from cuda_on_cpu.launcher import ExecutorLauncher
from safetensors.torch import load_file
from simulated_card import SimulatedCard, kernels_of

from quantkit.commands.quantization import fallback, memory_limit, steps
from quantkit.commands.quantization.job import choose_placement
from quantkit.commands.quantization.outlook import foresee
from quantkit.commands.quantize import run
from quantkit.errors import BackendError, UsageError
from quantkit.kernels import cpu
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")


def quantize(model: Path, out: Path, **options):
    settings = {"samples": 8, "length": 64, "evaluate": False, "dtype": "fp32", **options}
    if settings.get("format") != "exl2":
        settings = {"group_size": 32, **settings}
    return run(QuantizeSettings(str(model), out, **settings), Silent())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch) -> None:
    """The same arithmetic on card and CPU."""
    monkeypatch.setenv("QUANTKIT_BACKEND", "reference")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("source") / "model", dtype="bfloat16")


WAYS = {
    "gptq": {},
    "act order": {"act_order": True, "sym": False},
    "fast": {"effort": "fast"},
    "float64": {"hessian_dtype": "fp64"},
    "head": {"lm_head": True},
    "exl2": {"format": "exl2", "bpw": 4.0},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_bytes_are_those_of_the_cpu(way: str, model: Path, tmp_path: Path, monkeypatch) -> None:
    quantize(model, tmp_path / "cpu", **WAYS[way])
    card = SimulatedCard()
    with card.inserted(monkeypatch):
        report = quantize(model, tmp_path / "card", device="cuda:0", **WAYS[way])
    assert same(tmp_path / "cpu", tmp_path / "card")
    assert report.calibration.device == "cuda:0"
    assert card.operations["aten::addmm_"] > 0
    assert card.live == 0


@pytest.mark.parametrize(("family", "format"), [("Qwen3MoeForCausalLM", "gptq"), pytest.param("Gemma2ForCausalLM", "exl2", marks=pytest.mark.proof)])
def test_other_families(family: str, format: str, tmp_path: Path, monkeypatch) -> None:
    """Experts, and capped logits in a backward pass with bfloat16; where Hessians are summed as on the card."""
    monkeypatch.setattr(cpu, "HAS_PAIR_PRODUCTS", False)
    source = tiny.write_model(tmp_path / "model", family, dtype="bfloat16")
    own = {"bpw": 4.5} if format == "exl2" else {"effort": "fast"}  # a CPU takes gradients of attention another way
    options = {"format": format, "dtype": "bf16", **own}
    quantize(source, tmp_path / "cpu", **options)
    with SimulatedCard().inserted(monkeypatch):
        quantize(source, tmp_path / "card", device="cuda", **options)
    assert same(tmp_path / "cpu", tmp_path / "card")


def test_tuning_and_the_comparison(model: Path, tmp_path: Path, monkeypatch) -> None:
    options = {"effort": "best", "bits": 3, "evaluate": True, "samples": 4, "length": 32}
    usual = quantize(model, tmp_path / "cpu", **options)
    with SimulatedCard().inserted(monkeypatch):
        report = quantize(model, tmp_path / "card", device="cuda", **options)
    assert same(tmp_path / "cpu", tmp_path / "card")
    assert report.damage.device == "cuda"
    assert report.damage.kl_mean == pytest.approx(usual.damage.kl_mean, rel=1e-4)
    assert report.tuning.kl_after == pytest.approx(usual.tuning.kl_after, rel=1e-4)


@needs_compiler
def test_the_cuda_kernels_solve_it(tmp_path: Path, monkeypatch) -> None:
    """Grid search and rounding by the sources that a GPU runs: its codes are those of plain torch."""
    source = tiny.write_model(tmp_path / "model", dtype="float32", num_hidden_layers=1)
    quantize(source, tmp_path / "cpu", samples=2)
    monkeypatch.delenv("QUANTKIT_BACKEND")
    card, executor = SimulatedCard(), ExecutorLauncher()
    card.backend = kernels_of(card, executor)
    with card.inserted(monkeypatch):
        report = quantize(source, tmp_path / "card", device="cuda", samples=2)
    assert {"grid_error", "solve_rows"} <= {name for name, _ in executor.launched}
    assert report.backend.startswith("cuda")
    differing = sum(int((one != other).sum()) for one, other in _pairs(tmp_path / "cpu", tmp_path / "card"))
    assert differing == 0


def _pairs(one: Path, other: Path):
    first, second = weights(one), weights(other)
    return [(first[name], second[name]) for name in first]


@pytest.fixture(scope="module")
def usual(model: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("usual") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_BACKEND", "reference")
        quantize(model, out)
    return out


class Heard(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def on_card(model: Path, out: Path, monkeypatch, limit: int = 1 << 40, **options):
    heard, card = Heard(), SimulatedCard(limit)
    settings = {"samples": 8, "length": 64, "evaluate": False, "dtype": "fp32", "group_size": 32, **options}
    with card.inserted(monkeypatch):
        report = run(QuantizeSettings(str(model), out, device="cuda:0", **settings), heard)
    assert card.live == 0
    return report, card, heard.lines


def test_too_little_memory_is_gone_around(model: Path, usual: Path, tmp_path: Path, monkeypatch) -> None:
    """At each limit the bytes are the same; what did not fit was done with less, and it is said."""
    options = {"lm_head": True, "effort": "fast", "samples": 16}
    quantize(model, tmp_path / "usual", **options)
    whole, card, heard = on_card(model, tmp_path / "whole", monkeypatch, **options)
    assert (whole.fallbacks, whole.device_peak_memory_bytes, card.refused) == ((), card.peak, 0)
    assert any("has been tried on a simulated one only" in line for line in heard)
    assert any("MiB are needed of `cuda:0`" in line for line in heard)
    monkeypatch.setattr(memory_limit, "device_peak", lambda *_, **__: 0)  # what is free is found out by trying
    met = set()
    for share in (0.9, 0.5, 0.2, 0.01):
        out = tmp_path / f"{share}"
        report, less, heard = on_card(model, out, monkeypatch, int(share * card.peak), **options)
        assert same(out, tmp_path / "usual"), share
        assert less.peak <= share * card.peak
        for found in report.fallbacks:
            met.add(found.did)
            assert f"{found.step}: the GPU had too little memory, done with {found.did}" in report.remarks()
        assert report.as_json()["fallbacks"] == [{"step": one.step, "did": one.did} for one in report.fallbacks]
        assert bool(report.fallbacks) == bool(less.refused)
        assert bool(report.fallbacks) == any("going on with" in line for line in heard)
    assert met == {fallback.SMALLER, fallback.SINGLE, fallback.CPU}


def test_the_least_is_not_left_for_the_rest_of_the_model(model: Path, tmp_path: Path, monkeypatch) -> None:
    """The CPU is for one step: the next begins on the card, and finds it free again."""
    solve, seen = fallback.Descent.run, []

    def run_once(self, do, **options):
        if self._step == "block 0" and not seen:
            seen.append(self)
            self._at = len(self._levels) - 1
            self._met = fallback.CPU
        return solve(self, do, **options)

    monkeypatch.setattr(fallback.Descent, "run", run_once)
    report, card, _ = on_card(model, tmp_path / "out", monkeypatch, effort="fast")
    assert [(one.step, one.did) for one in report.fallbacks] == [("block 0", fallback.CPU)]
    assert card.operations["aten::addmm_"]


def test_a_job_killed_while_it_falls_back_goes_on(model: Path, usual: Path, tmp_path: Path, monkeypatch) -> None:
    _, card, _ = on_card(model, tmp_path / "whole", monkeypatch)
    found = []

    def die(self, whole: bool) -> None:
        found.append(self._step)
        if self._step == "block 1":
            raise KeyboardInterrupt
        usually(self, whole)

    usually = fallback.Descent._descend
    limit = int(0.1 * card.peak)
    with monkeypatch.context() as patch:
        patch.setattr(fallback.Descent, "_descend", die)
        with pytest.raises(KeyboardInterrupt):
            on_card(model, tmp_path / "out", monkeypatch, limit)
    assert found[-1] == "block 1"
    assert not (tmp_path / "out").exists()
    report, _, heard = on_card(model, tmp_path / "out", monkeypatch, limit)
    assert any("1 of 2 blocks are quantized" in line for line in heard)
    assert same(tmp_path / "out", usual)
    assert report.fallbacks[1].step.startswith("gradients"), "what the killed process noted is in the report"


def test_other_faults_of_the_card_are_said(model: Path, tmp_path: Path, monkeypatch) -> None:
    def fail(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(steps, "solve_block", fail)
    with pytest.raises(BackendError, match=r"^`cuda:0` failed: CUDA error: an illegal memory access") as caught:
        on_card(model, tmp_path / "out", monkeypatch)
    assert "--device cpu" in caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling", "CUDA_ERROR_OUT_OF_MEMORY"])
def test_every_name_of_it_is_known(words: str) -> None:
    assert fallback.lacks_memory(RuntimeError(words))
    assert not fallback.lacks_memory(RuntimeError("CUDA error: invalid argument"))


def test_the_outlook_tells_the_memory_of_the_card(model: Path, tmp_path: Path, monkeypatch) -> None:
    settings = QuantizeSettings(str(model), tmp_path / "out", samples=8, length=64, group_size=32, dtype="fp32", device="cuda")
    _, done, _ = on_card(model, tmp_path / "done", monkeypatch)
    card = SimulatedCard()
    with card.inserted(monkeypatch):
        found = foresee(settings, Silent())
    assert found.as_json()["device_peak_memory_bytes"] == pytest.approx(done.peak, rel=0.15)
    assert found.as_json()["fallbacks"] == []
    with SimulatedCard(int(0.05 * done.peak)).inserted(monkeypatch):
        less = foresee(settings, Silent())
    assert less.as_json()["fallbacks"] == [{"step": "rehearsal", "did": fallback.CPU}]
    assert ["too much for the GPU", "goes on with the CPU"] in less.rows()


def test_what_is_refused(model: Path, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(UsageError, match="`--max-memory` does not hold with `--device cuda:0`"):
        on_card(model, tmp_path / "out", monkeypatch, max_memory=1 << 30)
    for device, kind in (("cuda:3", BackendError), ("cuda:0,cuda:1", UsageError), ("cuda:x", UsageError)):
        with SimulatedCard().inserted(monkeypatch), pytest.raises(kind):
            quantize(model, tmp_path / "out", device=device)


def test_a_card_without_bfloat16_works_in_float32(model: Path, tmp_path: Path, monkeypatch) -> None:
    for capability, dtype in (((7, 5), "fp32"), ((8, 0), "bf16")):
        with SimulatedCard(capability=capability).inserted(monkeypatch):
            assert choose_placement("cuda", "auto").dtype_name == dtype


def test_auto_is_the_cpu_and_says_why(monkeypatch) -> None:
    with SimulatedCard().inserted(monkeypatch):
        monkeypatch.delenv("QUANTKIT_BACKEND")
        found = choose_placement("auto", "fp32")
    assert found.device == "cpu"
    assert found.reason == "no device was named; `--device cuda` is the GPU, where quantizing has not been tried on a card"
