"""Measuring on a GPU, simulated: the file of the CPU, and what is said where the memory there is not enough."""

from pathlib import Path

import pytest
import tiny
from simulated_card import SimulatedCard

from quantkit.commands.measure import run
from quantkit.progress import Silent
from quantkit.settings import MeasureSettings

TEXT = {"samples": 6, "length": 64, "dtype": "fp32"}


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch) -> None:
    """The same arithmetic on card and CPU."""
    monkeypatch.setenv("QUANTKIT_BACKEND", "reference")


@pytest.mark.parametrize("family", ["LlamaForCausalLM", pytest.param("Qwen3MoeForCausalLM", marks=pytest.mark.proof)])
def test_the_measurement_is_that_of_the_cpu(family: str, tmp_path: Path, monkeypatch) -> None:
    model = tiny.write_model(tmp_path / "model", family, dtype="bfloat16")
    usual = run(MeasureSettings(str(model), tmp_path / "cpu.json", **TEXT), Silent())
    card = SimulatedCard()
    with card.inserted(monkeypatch):
        there = run(MeasureSettings(str(model), tmp_path / "card.json", device="cuda", **TEXT), Silent())
    assert there.measurement == usual.measurement
    assert there.fallbacks == ()
    assert card.live == 0
    peak = card.peak
    for share in (0.1,):
        card = SimulatedCard(limit_bytes=int(share * peak))
        with card.inserted(monkeypatch):
            less = run(MeasureSettings(str(model), tmp_path / f"{share}.json", device="cuda", **TEXT), Silent())
        assert less.measurement == usual.measurement
        assert less.as_json()["fallbacks"]
        assert card.refused
    told = [(fallback.step, fallback.did) for fallback in less.fallbacks]
    assert told == [
        ("all steps", "single rows, Hessians and linears one by one"),  # where the estimate lets it begin
        ("gradients to check", "the CPU"),
    ]
