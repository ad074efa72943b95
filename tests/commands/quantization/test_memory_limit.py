"""`--max-memory`: less is held at once, and the result stays the same, byte for byte."""

import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny

import quantkit
from quantkit import heap
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.measure import run as measure
from quantkit.commands.quantization import block, effort, hessians, memory_limit
from quantkit.commands.quantization.job import choose_placement, open_subject
from quantkit.commands.quantization.memory_budget import DEFAULT, FEW_PREDICTIONS, FEW_TOKENS, Budget
from quantkit.commands.quantization.memory_limit import budgets, limited, peak
from quantkit.commands.quantize import run
from quantkit.errors import CalibrationError, UsageError
from quantkit.progress import Silent
from quantkit.settings import MeasureSettings, QuantizeSettings

TEXT = {"samples": 6, "length": 32}
LEAST = Budget(walk_tokens=32, backward_tokens=32, hessian_bytes=0, spill_bytes=0, apart=True)
"""With as many predictions at a time as usual: with fewer, the bytes are the same on some processors only."""


@pytest.fixture(params=["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def model(request, tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model", request.param, dtype="bfloat16")


@pytest.fixture
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the limit, the least is held."""
    monkeypatch.setattr(memory_limit, "budgets", lambda subject: iter([LEAST]))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def numbers(found: object, place: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a JSON document, by its place there."""
    if isinstance(found, dict | list):
        for name, part in found.items() if isinstance(found, dict) else enumerate(found):
            yield from numbers(part, f"{place}/{name}")
    elif isinstance(found, int | float):
        yield place, found


def test_the_heap_is_sparing_no_longer_than_the_limit_holds(tmp_path: Path, least: None, monkeypatch) -> None:
    model, seen = tiny.write_model(tmp_path / "model", dtype="bfloat16"), []
    for name in ("spare", "settle"):
        monkeypatch.setattr(heap, name, partial(seen.append, name))
    quantkit.quantize(model, tmp_path / "out", group_size=32, evaluate=False, max_memory=1 << 40, progress=Silent(), **TEXT)
    assert seen == ["spare", "settle"]
    with pytest.raises(CalibrationError):
        quantkit.quantize(model, tmp_path / "less", group_size=32, evaluate=False, max_memory=1 << 20, progress=Silent(), **TEXT)
    quantkit.quantize(model, tmp_path / "free", group_size=32, evaluate=False, progress=Silent(), **TEXT)
    assert seen == ["spare", "settle", "settle"]


@pytest.mark.parametrize("options", [{"group_size": 32}, {"format": "exl2", "bpw": 5.0}, {"group_size": 32, "act_order": True}])
def test_the_same_bytes_in_less_memory(model: Path, options: dict, tmp_path: Path, least: None, monkeypatch) -> None:
    """A mixture says that this need not be so: products of few rows may be rounded otherwise, if not on every machine.
    Tuning, which a limit leaves out, is left out here without one too."""
    monkeypatch.setitem(effort.EFFORTS, "default", replace(effort.EFFORTS["default"], tunes=0))
    usual = run(QuantizeSettings(str(model), tmp_path / "usual", evaluate=False, **TEXT, **options), Silent())
    limit = {"max_memory": 1 << 40, "evaluate": False}
    less = run(QuantizeSettings(str(model), tmp_path / "less", **limit, **TEXT, **options), Silent())
    mixture = open_checkpoint(model).model_config.experts is not None
    assert FEW_TOKENS not in usual.remarks()
    assert (FEW_TOKENS in less.remarks()) == mixture
    if mixture:
        errors = {linear.name: linear.error for linear in usual.linears}
        assert {linear.name: linear.error for linear in less.linears} == pytest.approx(errors, rel=0.2)
    else:
        assert contents(tmp_path / "less") == contents(tmp_path / "usual")


def test_fewer_predictions_at_a_time_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.write_model(tmp_path / "model", dtype="bfloat16")
    heard = {}
    for name, budget in (("few", replace(LEAST, logits_at_once=320)), ("usual", LEAST)):
        monkeypatch.setattr(memory_limit, "budgets", lambda subject, budget=budget: iter([budget]))
        for how in ("default", "fast"):
            out = tmp_path / f"{name}-{how}"
            settings = QuantizeSettings(str(model), out, evaluate=False, max_memory=1 << 40, effort=how, group_size=32, **TEXT)
            heard[name, how] = FEW_PREDICTIONS in run(settings, Silent()).remarks()
    assert heard == {("few", "default"): True, ("few", "fast"): False, ("usual", "default"): False, ("usual", "fast"): False}


def test_nothing_of_a_stage_outlives_it(tmp_path: Path, least: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.write_model(tmp_path / "model", dtype="bfloat16")
    made: list[weakref.ref] = []
    seen: list[int] = []

    def noted(call):
        def made_of(*given, **named):
            result = call(*given, **named)
            parts = result if isinstance(result, list) else [result]
            for part in parts:
                made.append(weakref.ref(part.codes.q if hasattr(part, "codes") else part.lower))
            return result

        return made_of

    def observe(*given, **named):
        seen.append(len(made))
        assert not [each for each in made if each() is not None]
        return observed(*given, **named)

    observed = hessians._observe
    monkeypatch.setattr(hessians, "_observe", observe)
    monkeypatch.setattr(hessians, "factor", noted(hessians.factor))
    monkeypatch.setattr(block, "solve_in_parts", noted(block.solve_in_parts))
    settings = QuantizeSettings(str(model), tmp_path / "out", group_size=32, evaluate=False, max_memory=1 << 40, **TEXT)
    run(settings, Silent())
    assert seen == [0, 4, 6, 9, 11, 15, 17, 20]


def test_a_measurement_is_the_same_too(model: Path, tmp_path: Path, least: None) -> None:
    measure(MeasureSettings(str(model), tmp_path / "usual.json", **TEXT), Silent())
    measure(MeasureSettings(str(model), tmp_path / "less.json", max_memory=1 << 40, **TEXT), Silent())
    less, usual = ((tmp_path / f"{name}.json").read_bytes() for name in ("less", "usual"))
    if open_checkpoint(model).model_config.experts is None:
        assert less == usual
    else:
        assert dict(numbers(json.loads(less))) == pytest.approx(dict(numbers(json.loads(usual))), rel=0.2)


def test_the_roomiest_budget_that_fits_is_taken(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = QuantizeSettings(str(model), model, samples=128, length=512)
    subject = open_subject(open_checkpoint(model), settings, choose_placement("cpu", "fp32"))
    monkeypatch.setattr(memory_limit, "resident", lambda: 1000)
    needs = {budget: 1000 + peak(limited_to(subject, budget), weighs=True) for budget in budgets(subject)}
    usual = next(iter(needs))
    judged = peak(limited_to(subject, usual), weighs=False, measures=True) - peak(limited_to(subject, usual), weighs=False)
    assert judged > 0, "layouts are judged by Hessians of their own"
    assert list(needs.values()) == sorted(needs.values(), reverse=True) and next(iter(needs)) == DEFAULT
    assert limited(subject, None, weighs=True) is subject
    for limit in (max(needs.values()), min(needs.values())):
        chosen = limited(subject, limit, weighs=True).budget
        assert chosen == next(budget for budget, need in needs.items() if need <= limit)
    with pytest.raises(CalibrationError, match="is not enough: at least") as caught:
        limited(subject, min(needs.values()) - 1, weighs=True)
    assert "--max-memory" in caught.value.hint and "--length 256" in caught.value.hint


def limited_to(subject, budget):
    from dataclasses import replace

    return replace(subject, budget=budget)


def test_an_excess_is_told() -> None:
    said: list[str] = []

    class Heard(Silent):
        def say(self, line: str) -> None:
            said.append(line)

    memory_limit.tell_excess(None, 1 << 40, Heard())
    memory_limit.tell_excess(2 << 20, 2 << 20, Heard())
    assert not said
    memory_limit.tell_excess(2 << 20, 3 << 20, Heard())
    assert said == ["note: `--max-memory` was exceeded: 3 MiB were taken, 2 MiB allowed"]


def test_what_it_is_not_held_over_is_refused(model: Path, tmp_path: Path) -> None:
    for options, word in (({}, "--no-eval"), ({"evaluate": False, "effort": "best"}, "--effort default")):
        with pytest.raises(UsageError) as caught:
            run(QuantizeSettings(str(model), tmp_path / "out", max_memory=1 << 40, group_size=32, **TEXT, **options), Silent())
        assert word in caught.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
