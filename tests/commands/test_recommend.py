"""`commands.recommend`: what fits is what the memory model adds up to, and what does not is said with a way out."""

import json
from pathlib import Path

import pytest
import tiny

from quantkit import cli
from quantkit.commands.inspection.recommend_report import GIB
from quantkit.commands.measure import run as run_measure
from quantkit.commands.recommend import run
from quantkit.errors import CheckpointError, PlanError, UsageError
from quantkit.memory import KV_FORMATS
from quantkit.progress import Silent
from quantkit.settings import MeasureSettings, RecommendSettings

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def recommended(name: str, **options):
    return run(RecommendSettings(CONFIGS / f"{name}.json", **options), Silent())


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.json")), ids=lambda file: file.stem)
def test_every_config_gets_an_answer(file: Path) -> None:
    report = run(RecommendSettings(file, vram=24 * GIB), Silent())
    assert report.context == min(32768, report.blueprint.config.context)
    for fits in report.grid:
        margins = [fit.margin for fit in fits]
        assert margins == sorted(margins, reverse=True) and list(report.contexts) == [fit.context for fit in fits]
    for fit in (fit for fits in report.grid for fit in fits):
        assert fit.margin == 24 * GIB - fit.need.total and not fit.streamed
    if report.chosen is not None:
        assert report.chosen.fits and report.chosen.context == report.context
    assert report.rows() and json.dumps(report.as_json(), allow_nan=False)


def test_a_small_model_is_left_alone() -> None:
    report = recommended("smollm2-135m", vram=24 * GIB)
    assert report.chosen.rate.format == "dense" and report.chosen.kv.name == "fp16"
    assert report.command() == "nothing: it fits as it is"


def test_enough_bits_come_before_a_faithful_cache_and_then_it_counts() -> None:
    report = recommended("qwen3-8b", vram=8 * GIB, context=16384)
    assert [(fit.kv.name, fit.rate.name) for fit in report.caches][:2] == [("fp16", "exl2 3.5"), ("int8", "exl2 5")]
    assert (report.chosen.kv.name, report.chosen.rate.name) == ("int8", "exl2 5")
    assert report.command().endswith("--format exl2 --bpw 5 --head-bits 6")
    assert report.run_command() == "quantkit generate OUT --chat Hello --kv int8"
    assert ["run by", report.run_command()] in report.rows() and report.as_json()["run_command"] == report.run_command()


def test_the_group_size_is_one_that_the_model_consists_of() -> None:
    """Inputs of SmolLM2 are 576 wide, which 128 does not divide: `quantize` would find short groups."""
    report = recommended("smollm2-135m", vram=24 * GIB)
    assert {fits[0].rate.name for fits in report.grid if fits[0].rate.format == "gptq"} == {"gptq 4/64", "gptq 8/64"}
    (four,) = (fits[0].weights for fits in report.grid if fits[0].rate.name == "gptq 4/64")
    assert four.bits_per_weight < 4.5
    usual = recommended("qwen3-8b", vram=24 * GIB)
    assert {fits[0].rate.group_size for fits in usual.grid} == {128}


def test_a_cache_that_is_asked_for_is_taken() -> None:
    report = recommended("qwen3-8b", vram=8 * GIB, context=16384, kv="q4_0")
    assert report.chosen.kv is KV_FORMATS["q4_0"] and len(report.caches) == 1


def test_nothing_fits_and_what_would() -> None:
    report = recommended("llama-3.1-70b", vram=24 * GIB, context=32768)
    assert report.chosen is None
    assert report.least.rate.name == "exl2 2.5" and report.least.kv.name == "q4_0"
    shorter = recommended("llama-3.1-70b", vram=24 * GIB, context=report.longest, kv="q4_0")
    assert shorter.chosen is not None
    assert recommended("llama-3.1-70b", vram=24 * GIB, context=report.longest + 256, kv="q4_0").chosen is None
    assert recommended("llama-3.1-70b", vram=8 * GIB, context=32768).longest is None


def test_host_memory_takes_the_older_cache() -> None:
    alone = recommended("llama-3.1-8b", vram=12 * GIB, context=131072, kv="fp16")
    assert alone.chosen is None
    report = recommended("llama-3.1-8b", vram=12 * GIB, ram=64 * GIB, context=131072, kv="fp16")
    assert report.chosen is not None and report.chosen.streamed
    assert report.run_command().endswith("--kv fp16 --kv-resident 4352")
    assert 0 <= report.chosen.margin < 12 * GIB - report.chosen.need.weights
    little = recommended("llama-3.1-8b", vram=12 * GIB, ram=8 * GIB, context=131072, kv="fp16")
    assert little.chosen is None


def test_what_fits_on_the_card_comes_before_what_is_streamed() -> None:
    report = recommended("llama-3.1-70b", vram=48 * GIB, ram=64 * GIB, context=32768, kv="fp16")
    assert report.chosen.rate.name == "exl2 4" and not report.chosen.streamed
    longer = recommended("llama-3.1-70b", vram=48 * GIB, ram=64 * GIB, context=131072, kv="fp16")
    assert longer.chosen.rate.name == "exl2 5" and longer.chosen.streamed


def test_a_cpu_keeps_dense_weights_in_float32() -> None:
    report = recommended("qwen2.5-0.5b", ram=16 * GIB, context=4096)
    dense = next(fits[0] for fits in report.grid if fits[0].rate.format == "dense")
    assert dense.weights.total == 4 * 494_032_768 and not report.budget.on_device


def test_a_batch_has_a_cache_each() -> None:
    one, four = (recommended("llama-3.1-8b", vram=24 * GIB, batch=batch, kv="int8") for batch in (1, 4))
    assert four.least.need.cache == 4 * one.least.need.cache


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"vram": 24 * GIB, "kv": "int9"},
        {"vram": 24 * GIB, "context": 131073},
        {"vram": 24 * GIB, "context": 0},
        {"vram": 24 * GIB, "batch": 0},
    ],
)
def test_what_cannot_be_meant(options: dict) -> None:
    with pytest.raises(UsageError):
        recommended("llama-3.1-8b", **options)


def test_a_measurement_names_the_damage(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", hidden_size=128, intermediate_size=256)
    file = tmp_path / "m.json"
    run_measure(MeasureSettings(str(model), file, samples=4, length=32), Silent())
    report = run(RecommendSettings(model, vram=GIB, measurement=file), Silent())
    damages = [report.expected_kl[f"exl2 {bits:g}"] for bits in (3.0, 4.0, 5.0, 6.0)]
    assert damages == sorted(damages, reverse=True) and damages[0] > damages[-1] >= 0
    assert "KL" in report.grid_columns()
    with pytest.raises(PlanError, match="measures other linears"):
        recommended("llama-3.1-8b", vram=24 * GIB, measurement=file)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        run(RecommendSettings(tmp_path, vram=GIB), Silent())


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24 * GIB), ("24", 24 * GIB), ("512MiB", GIB // 2), ("1.5g", 3 * GIB // 2)]
)
def test_the_command(text: str, size: int, capsys) -> None:
    model = str(CONFIGS / "smollm2-135m.json")
    assert cli.run(["recommend", model, "--vram", text, "--context", "4k", "--json"]) in (0, 3)
    said = json.loads(capsys.readouterr().out)
    assert said["memory_bytes"] == size and said["context"] == 4096


def test_words_and_exit_codes(capsys) -> None:
    model = str(CONFIGS / "llama-3.1-70b.json")
    assert cli.run(["recommend", model, "--vram", "24GB"]) == 3
    assert "nothing fits" in capsys.readouterr().out
    assert cli.run(["recommend", model, "--vram", "much"]) == 2
    assert cli.run(["recommend", model, "--vram", "24GB", "--context", "long"]) == 2
