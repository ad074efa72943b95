"""The degeneration probe on a real model, SmolLM2-135M-Instruct: the healthy pass, the broken do not. Figures: docs/results/evaluation.md."""

import os
import shutil
from pathlib import Path

import faulty_cache
import pytest
import smollm2
import torch
from safetensors.torch import load_file, save_file

from quantkit.commands import quantize
from quantkit.evaluators.conversation import Frame, bundled_prompts
from quantkit.evaluators.probe import FormatResult, judge_alone, mean, probe, talk_all, tells_alone
from quantkit.progress import Silent
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.load import load
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import QuantizeSettings

pytestmark = pytest.mark.proof

ZEROED = "model.layers.8."
SEEDS = range(6)
LATE, LONG = 480, 800
LATE_PROMPTS = ("rain", "garden", "door code", "France")


@pytest.fixture(scope="module")
def folder() -> Path:
    given = os.environ.get("QUANTKIT_SMOLLM2")
    return Path(given) if given else smollm2.for_test()


@pytest.fixture(scope="module")
def model(folder):
    return load(folder, dtype="bf16")


@pytest.fixture(scope="module")
def asked(folder):
    prompts, follow_ups = bundled_prompts(quick=False)
    return Frame(Tokenizer.open(folder), follow_ups), prompts


@pytest.fixture(scope="module")
def original(model, asked):
    """The model and its own conversations."""
    frame, prompts = asked
    return model, talk_all(model, frame, prompts, CachePlan())[0]


def show(name: str, result: FormatResult) -> None:
    loops = {way: f"{sum(t.looping for t in talks)} of {len(talks)}" for way in ("greedy", "sampled") if (talks := [t for t in result.talks if t.way == way])}
    judged = [talk.symptoms.entropy for talk in result.talks if tells_alone(talk)]
    short = [talk.symptoms.missing_stop for talk in result.talks if talk.prompt.short]
    looked = [talk.found for talk in result.talks if talk.found is not None]
    print(
        f"{name}: {result.verdict} {result.findings}; alone {judge_alone(result.talks) or 'healthy'}; looping {loops}; entropy {mean(judged):.2f}; "
        f"short without an end {sum(short)} of {len(short)}; checks {sum(looked)} of {len(looked)}; KL {result.kl}; excess {result.loop_excess}"
    )


def test_the_original_is_healthy_alone(original) -> None:
    _, talks = original
    result = FormatResult("bf16", tuple(talks), None, judge_alone(talks))
    show("original", result)
    assert result.verdict == "healthy"


def test_four_bits_are_healthy(folder, original, asked, tmp_path) -> None:
    quantize.run(QuantizeSettings(str(folder), tmp_path / "four", group_size=64, samples=32, evaluate=False), Silent())
    frame, prompts = asked
    result = probe(load(tmp_path / "four", dtype="bf16"), frame, prompts, CachePlan(), reference=original)
    show("4 bits", result)
    assert result.verdict == "healthy"
    assert not judge_alone(result.talks)


def test_two_bits_rounded_to_nearest_are_degenerate(folder, original, asked, tmp_path) -> None:
    settings = QuantizeSettings(str(folder), tmp_path / "two", bits=2, group_size=64, effort="nearest", evaluate=False)
    quantize.run(settings, Silent())
    frame, prompts = asked
    result = probe(load(tmp_path / "two", dtype="bf16"), frame, prompts, CachePlan(), reference=original)
    show("2 bits, nearest", result)
    assert result.verdict == "degenerate"
    assert judge_alone(result.talks)


def test_a_zeroed_block_is_degenerate(folder, original, asked, tmp_path) -> None:
    broken = shutil.copytree(folder, tmp_path / "zeroed")
    tensors = load_file(broken / "model.safetensors")
    zeroed = {name: torch.zeros_like(weight) if name.startswith(ZEROED) and "proj" in name else weight for name, weight in tensors.items()}
    save_file(zeroed, broken / "model.safetensors", metadata={"format": "pt"})
    frame, prompts = asked
    result = probe(load(broken, dtype="bf16"), frame, prompts, CachePlan(), reference=original)
    show("block 8 zeroed", result)
    assert result.verdict == "degenerate"


def test_a_cache_that_loses_values_is_degenerate(original, asked, monkeypatch) -> None:
    """Every second append; the checks of needles and short answers are printed beside what the probe finds."""
    frame, prompts = asked
    faulty_cache.plant(monkeypatch)
    result = probe(original[0], frame, prompts, CachePlan(), reference=original)
    show("values of every second append lost", result)
    assert result.verdict == "degenerate"


def test_short_answers_and_needles_miss_a_cache_that_loses_values_late(model, asked, monkeypatch) -> None:
    """The same fault from one position on, behind the needles and their answers: the checks see nothing, the probe does."""
    frame, _ = asked
    prompts = [prompt for prompt in bundled_prompts(quick=True)[0] if prompt.name in LATE_PROMPTS]
    theirs, _ = talk_all(model, frame, prompts, CachePlan(), tokens=LONG)
    faulty_cache.plant(monkeypatch, first=LATE)
    result = probe(model, frame, prompts, CachePlan(), reference=(model, theirs), tokens=LONG)
    show(f"values of every second append lost from position {LATE} on", result)
    checks = [talk.found for talk in result.talks if talk.found is not None]
    assert checks == [talk.found for talk in theirs if talk.found is not None]
    assert result.verdict == "degenerate"


def test_false_alarms_over_a_hundred_healthy_generations(model, asked) -> None:
    frame, prompts = asked
    flagged, verdicts, count = [], [], 0
    for seed in SEEDS:
        talks, _ = talk_all(model, frame, prompts, CachePlan(), seed=1000 * seed, ways=("sampled",))
        count += len(talks)
        verdicts.append(judge_alone(talks))
        for talk in talks:
            found = talk.symptoms
            if talk.looping or found.collapsed_rate > 0.5 or (found.early_stop and not talk.prompt.short) or found.missing_stop:
                flagged.append((seed, talk.prompt.name, talk.prompt.alone, round(found.loop_rate, 2), found.early_stop, found.missing_stop))
    alone = [one for one in flagged if one[2]]
    print(f"{count} generations: {len(flagged)} with a symptom, {len(alone)} of them on prompts that are judged alone: {flagged}; verdicts {verdicts}")
    assert count >= 100
    assert not any(verdicts)
