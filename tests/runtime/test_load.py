"""Loading: what is in the folder is what runs, and anything missing, misshapen or left over has an error of its own."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.errors import CheckpointError, QuantkitError, UsageError
from quantkit.formats.codec import Codes
from quantkit.formats.gptq import GptqCodec, GptqTensor
from quantkit.models import catalog
from quantkit.models.config import ModelConfig

Tensors = dict[str, torch.Tensor]
IDS = torch.arange(5, 25).reshape(2, 10)


def write_changed(path: Path, change: Callable[[Tensors], Any], family: str = "LlamaForCausalLM", **overrides: Any) -> Path:
    """A tiny model whose tensors were tampered with before they were written."""
    tensors = tiny.make_tensors(tiny.make_config(family, **overrides), 0, torch.float32)
    change(tensors)
    tiny.write_model(path, family, tokenizer=False, **overrides)
    tiny.write_tensors(path, tensors)
    return path


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (None, torch.float32),
        ("auto", torch.float32),
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtypes(dtype: Any, expected: torch.dtype, tmp_path: Path) -> None:
    model = quantkit.load(tiny.write_model(tmp_path, dtype="bfloat16", tokenizer=False), dtype=dtype)
    assert model.dtype == expected
    assert {linear.stored.tensors()["weight"].dtype for linear in model.linears.values()} == {expected}
    assert model(IDS).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float64", torch.float64, torch.int8])
def test_other_dtypes_are_refused(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        quantkit.load(tiny.write_model(tmp_path, tokenizer=False), dtype=dtype)
    assert "fp32, bf16, fp16" in str(caught.value.hint)


def test_a_tied_model_holds_its_embedding_once(tmp_path: Path) -> None:
    model = quantkit.load(tiny.write_model(tmp_path, dtype="bfloat16", tie_word_embeddings=True, tokenizer=False))
    assert model.embedding.weight.data_ptr() == model.head.linear.stored.tensors()["weight"].data_ptr()


def test_a_copy_of_the_embedding_in_a_tied_model_is_let_through(tmp_path: Path) -> None:
    def copy(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    plain = tiny.write_model(tmp_path / "plain", tie_word_embeddings=True, tokenizer=False)
    copied = write_changed(tmp_path / "copied", copy, tie_word_embeddings=True)
    assert torch.equal(quantkit.load(copied)(IDS), quantkit.load(plain)(IDS))


def test_rotary_tables_of_old_checkpoints_are_let_through(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    quantkit.load(write_changed(tmp_path, lambda tensors: tensors.update({name: torch.ones(8)})))


def rename(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.up.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")


def rename_norm(tensors: Tensors) -> None:
    tensors["model.layers.1.norm.weight"] = tensors.pop("model.layers.1.input_layernorm.weight")


FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "renamed linear": (rename, "`model.layers.1.mlp.up_proj` is not in"),
    "renamed norm": (rename_norm, "`model.layers.1.input_layernorm` is not in"),
    "no embedding": (lambda t: t.pop("model.embed_tokens.weight"), "`model.embed_tokens` is not in"),
    "no head": (lambda t: t.pop("lm_head.weight"), "`lm_head.weight` is not in"),
    "one layer too many": (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}),
        "1 tensor belongs to no part of the model that config.json describes: `model.layers.2.input_layernorm.weight`",
    ),
    "a bias too many": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        "`model.layers.0.self_attn.q_proj.bias` is not part of this model",
    ),
    "an unknown part of a linear": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.weight_scale": torch.ones(1)}),
        "1 tensor belongs to no part of the model that config.json describes",
    ),
    "a bias of a norm": (
        lambda t: t.update({"model.norm.bias": torch.ones(64), "model.x.a": torch.ones(1), "model.x.b": torch.ones(1)}),
        "3 tensors belong to no part",
    ),
    "another vocabulary": (
        lambda t: t.update({"model.embed_tokens.weight": torch.ones(318, 64)}),
        "has shape [318, 64], its config.json asks for [320, 64]",
    ),
    "another width": (
        lambda t: t.update({"model.layers.1.mlp.down_proj.weight": torch.ones(64, 96)}),
        "`model.layers.1.mlp.down_proj.weight` in `",
    ),
    "integers": (
        lambda t: t.update({"model.layers.1.mlp.down_proj.weight": torch.ones(64, 128, dtype=torch.int8)}),
        "is stored as int8, which is no plain weight",
    ),
    "bytes of a format that is not known": (
        lambda t: t.update({"model.layers.1.mlp.down_proj.weight": torch.ones(4096, 1, dtype=torch.uint8)}),
        "is stored as uint8, which is no plain weight",
    ),
    "a norm in float64": (
        lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.float64)}),
        "`model.norm.weight` in `",
    ),
    "another norm": (
        lambda t: t.update({"model.norm.weight": torch.ones(1, 64)}),
        "has shape [1, 64], its config.json asks for [64]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_missing_misshapen_and_left_over_tensors_are_named(fault: str, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    with pytest.raises(CheckpointError) as caught:
        quantkit.load(write_changed(tmp_path, change))
    assert message in str(caught.value)
    assert caught.value.hint


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.bias"
    with pytest.raises(CheckpointError, match=f"`{name}` is not in"):
        quantkit.load(write_changed(tmp_path, lambda tensors: tensors.pop(name), "Qwen2ForCausalLM"))


def test_a_bias_of_zeros_changes_nothing(tmp_path: Path) -> None:
    def add_zeros(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.down_proj.bias"] = torch.zeros(64)

    plain = tiny.write_model(tmp_path / "plain", tokenizer=False)
    assert torch.equal(quantkit.load(write_changed(tmp_path / "zeros", add_zeros))(IDS), quantkit.load(plain)(IDS))


def test_a_tied_model_with_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    def add_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = torch.ones(320, 64)

    with pytest.raises(CheckpointError, match="`tie_word_embeddings` is true") as caught:
        quantkit.load(write_changed(tmp_path, add_head, tie_word_embeddings=True))
    assert caught.value.hint == "set `tie_word_embeddings` to false in config.json"


def test_neither_tokenizer_nor_generation_config_is_needed(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path)
    expected = quantkit.load(path)(IDS)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / file).unlink()
    (path / "notes.bin").write_bytes(b"something else")
    assert torch.equal(quantkit.load(path)(IDS), expected)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_shards_make_no_difference(family: str, tmp_path: Path) -> None:
    one = tiny.write_model(tmp_path / "one", family, tokenizer=False)
    five = tiny.write_model(tmp_path / "five", family, shards=5, tokenizer=False)
    assert torch.equal(quantkit.load(one)(IDS), quantkit.load(five)(IDS))


def test_errors_name_the_config_file(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path, tokenizer=False)
    config = json.loads((path / "config.json").read_text())
    del config["rms_norm_eps"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantkitError, match=f"`rms_norm_eps` is missing in `{path}/config.json`"):
        quantkit.load(path)


def write_quantized(path: Path, family: str, **overrides: Any) -> tuple[Path, Path]:
    """A model whose linears were rounded to nearest, as GPTQ on disk, and the same model with the rounded weights."""
    codec = GptqCodec(bits=4, group_size=32)
    config = tiny.make_config(family, **overrides)
    stored = tiny.make_tensors(config, 0, torch.float32)
    rounded = dict(stored)
    specs = catalog.find(config).linears(ModelConfig.read(config))
    for module in [spec.name for spec in specs if spec.quantizable]:
        bias = stored.get(f"{module}.bias")
        weight = stored.pop(f"{module}.weight").T.contiguous()
        layout = codec.layout(weight.shape[0])
        grids = [codec.fit(weight[start:end], 4, None) for _, start, end in layout.spans()]
        q = torch.cat([grid.quantize(weight[start:end]) for grid, (_, start, end) in zip(grids, layout.spans(), strict=True)])
        tensor = codec.encode(Codes(q, tuple(grids), layout, torch.arange(weight.shape[0])), bias)
        stored |= {f"{module}.{suffix}": part for suffix, part in tensor.tensors().items()}
        rounded[f"{module}.weight"] = tensor.dequantize().T.to(torch.float32).contiguous()
        if tensor.bias is not None:
            rounded[f"{module}.bias"] = tensor.bias.to(torch.float32)
    for folder, tensors, extra in (
        (path / "gptq", stored, {"quantization_config": codec.config()}),
        (path / "dense", rounded, {}),
    ):
        tiny.write_model(folder, family, tokenizer=False, **overrides, **extra)
        tiny.write_tensors(folder, tensors)
    return path / "gptq", path / "dense"


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_quantized_linears_run_as_they_are_stored(family: str, tmp_path: Path) -> None:
    """Shapes of their own, so that a dequantized copy that anything keeps can be told from all other tensors."""
    gptq, dense = write_quantized(tmp_path, family, intermediate_size=224, moe_intermediate_size=224)
    model = quantkit.load(gptq)
    logits = model(IDS)
    expected = quantkit.load(dense)(IDS)
    assert float((logits - expected).abs().max()) < 1e-4 * float(expected.std())
    assert all(isinstance(linear.stored, GptqTensor) for linear in model.linears.values())
    del expected
    gc.collect()
    tensors = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))  # a dead proxy has no class
    kept = [item.shape for item in tensors if item.is_floating_point()]
    assert not [shape for shape in kept if sorted(shape) in ([64, 224], [64, 448])]


def test_a_lost_bias_of_a_quantized_linear_is_named(tmp_path: Path) -> None:
    gptq, _ = write_quantized(tmp_path, "Qwen2ForCausalLM")
    tensors = load_file(gptq / "model.safetensors")
    del tensors["model.layers.0.self_attn.v_proj.bias"]
    tiny.write_tensors(gptq, tensors)
    with pytest.raises(CheckpointError, match=r"`model\.layers\.0\.self_attn\.v_proj\.bias` is missing"):
        quantkit.load(gptq)
