"""The memory model: parameters of published models, sizes of the files that are really written, caches by hand."""

import json
from pathlib import Path

import pytest
import tiny

from quantkit import memory
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.inspection.blueprint import open_blueprint
from quantkit.commands.quantize import run
from quantkit.memory import KV_FORMATS, Rate, need, weights_at
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings

CONFIGS = Path(__file__).parent / "data" / "configs"
# As their publishers state them, or as their safetensors indexes add up.
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-2-7b": 6_738_415_616,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-9b": 9_241_705_984,
    "phi-3-mini-4k": 3_821_079_552,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
}


def config(name: str) -> Path:
    return CONFIGS / f"{name}.json"


def twin(name: str, folder: Path) -> Path:
    """A model of the same family and proportions, small enough to be written: one block, four experts."""
    raw = json.loads(config(name).read_text())
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    shape = {
        "hidden_size": 256,
        "intermediate_size": 32 * round(256 * raw["intermediate_size"] / raw["hidden_size"] / 32),
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": max(1, 8 * kv_heads // heads),
        "head_dim": 32,
        "vocab_size": 2048,
        "max_position_embeddings": 512,
        "rope_scaling": None,
        "tie_word_embeddings": raw.get("tie_word_embeddings", raw["model_type"].startswith("gemma")),
    }
    if "num_local_experts" in raw:
        shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if "moe_intermediate_size" in raw:
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
    if "shared_expert_intermediate_size" in raw:
        shape["shared_expert_intermediate_size"] = 352
    return tiny.write_model(folder, raw["architectures"][0], dtype="bfloat16", **shape)


def file_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_that_were_published(name: str) -> None:
    assert open_blueprint(config(name)).parameters == PARAMETERS[name]


def test_every_config_has_its_count() -> None:
    assert {file.stem for file in CONFIGS.glob("*.json")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_gptq_takes_what_its_files_take(name: str, tmp_path: Path) -> None:
    source = twin(name, tmp_path / "model")
    settings = {"bits": 4, "group_size": 64, "effort": "nearest", "evaluate": False}
    run(QuantizeSettings(str(source), tmp_path / "out", **settings), Silent())
    plan = open_blueprint(source)
    weights = weights_at(Rate("gptq", 4, 64), plan.config, plan.architecture)
    assert weights.total == open_checkpoint(tmp_path / "out").stored_bytes
    assert weights.total == pytest.approx(file_bytes(tmp_path / "out"), rel=0.01)
    dense = weights_at(Rate("dense", 16), plan.config, plan.architecture)
    assert dense.total == open_checkpoint(source).stored_bytes == 2 * plan.parameters


@pytest.mark.parametrize(("tied", "hidden_size"), [(False, 256), (True, 256), (False, 272)])
def test_exl2_takes_what_its_files_take(tied: bool, hidden_size: int, tmp_path: Path) -> None:
    shape = {"hidden_size": hidden_size, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    source = tiny.write_model(tmp_path / "model", dtype="bfloat16", tie_word_embeddings=tied, **shape)
    settings = {"format": "exl2", "bpw": 4.0, "samples": 4, "length": 64, "evaluate": False}
    run(QuantizeSettings(str(source), tmp_path / "out", **settings), Silent())
    plan = open_blueprint(source)
    weights = weights_at(Rate("exl2", 4.0, head_bits=6), plan.config, plan.architecture)
    assert weights.total == pytest.approx(file_bytes(tmp_path / "out"), rel=0.01)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert weights.head * 8 == checkpoint.linear("lm_head").stored_bits


def test_a_head_that_exl2_cannot_hold_stays_as_it_is(tmp_path: Path) -> None:
    raw = json.loads(config("llama-3.1-8b").read_text()) | {"hidden_size": 4100, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plan = open_blueprint(tmp_path)
    weights = weights_at(Rate("exl2", 4.0, head_bits=6), plan.config, plan.architecture)
    assert weights.head == weights.embedding == 2 * 4100 * raw["vocab_size"]


def test_a_linear_that_gptq_cannot_hold_stays_dense(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", dtype="bfloat16", intermediate_size=80)
    run(QuantizeSettings(str(source), tmp_path / "out", group_size=32, effort="nearest", evaluate=False), Silent())
    plan = open_blueprint(source)
    weights = weights_at(Rate("gptq", 4, 32), plan.config, plan.architecture)
    assert weights.total == open_checkpoint(tmp_path / "out").stored_bytes


# Caches, worked out by hand for Llama-3.1-8B: 32 layers × 8 heads × 128 numbers, keys and values


@pytest.mark.parametrize(
    ("kv", "row"),
    [("fp16", 2 * 256), ("int8", 2 * (128 + 8) + 16), ("k8v4", 128 + 8 + 64 + 8), ("q4_0", 2 * (64 + 8))],
)
def test_bytes_of_a_token(kv: str, row: int) -> None:
    llama = open_blueprint(config("llama-3.1-8b")).config
    assert KV_FORMATS[kv].bytes_per_token(llama) == 32 * 8 * row
    assert KV_FORMATS[kv].cache_bytes(llama, 1) == 256 * 32 * 8 * row
    assert KV_FORMATS[kv].cache_bytes(llama, 257, batch=3) == 3 * 512 * 32 * 8 * row


def test_the_cache_of_an_8b_model_is_known() -> None:
    """128 KiB a token in fp16, 72 at 9 bits on average, 52 at 6.5, 36 at 4.5: as the bits say."""
    llama = open_blueprint(config("llama-3.1-8b")).config
    assert [KV_FORMATS[kv].bytes_per_token(llama) / 1024 for kv in KV_FORMATS] == [128, 72, 52, 36]


def test_a_row_of_odd_width_has_a_scale_of_its_own() -> None:
    """Phi-3 has heads of 96 numbers: three scales; 80 would have three too."""
    phi = open_blueprint(config("phi-3-mini-4k")).config
    assert KV_FORMATS["int8"].bytes_per_token(phi) == 32 * 32 * (2 * (96 + 3 * 2) + 12)
    assert memory._row_bytes(80, 4) == 40 + 3 * 2


def test_formats_go_from_faithful_to_small() -> None:
    llama = open_blueprint(config("llama-3.1-8b")).config
    sizes = [kv.bytes_per_token(llama) for kv in KV_FORMATS.values()]
    assert sizes == sorted(sizes, reverse=True)


# Need


def test_need_grows_with_context_batch_and_piece() -> None:
    plan = open_blueprint(config("llama-3.1-8b"))
    weights = weights_at(Rate("exl2", 4.0, head_bits=6), plan.config, plan.architecture)
    kv = KV_FORMATS["int8"]
    one = need(plan.config, weights, kv, 8192)
    assert one.total == one.weights + one.cache + one.activations + one.overhead
    assert need(plan.config, weights, kv, 8192, batch=4).cache == 4 * one.cache
    assert need(plan.config, weights, kv, 16384).cache == 2 * one.cache
    assert need(plan.config, weights, kv, 8192, prefill=512).activations < one.activations / 3
    assert need(plan.config, weights, kv, 8192, compute_bytes=4).activations > one.activations


def test_written_out_scores_are_counted() -> None:
    """Gemma 2 caps its scores: 16 heads × 512 queries × 8192 positions, three times float32 and once half."""
    gemma = open_blueprint(config("gemma-2-9b")).config
    llama = open_blueprint(config("llama-3.1-8b")).config
    assert memory.activation_bytes(gemma, 2048, 8192, 1) > 16 * 512 * 8192 * 14
    assert memory.activation_bytes(llama, 2048, 8192, 1) == memory.activation_bytes(llama, 2048, 131072, 1)
