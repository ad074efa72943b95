"""GGUF import from file to folder: weights, config and tokenizer of every family, and nothing left when it fails."""

import errno
import json
import os
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import tiny
import tiny_gguf
import tiny_gptq
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.commands import convert
from quantkit.commands.conversion.gguf_to_hf import GgufImport
from quantkit.commands.conversion.routes import ROUTES
from quantkit.errors import CheckpointError, UsageError
from quantkit.progress import Silent
from quantkit.settings import ConvertSettings


def gguf_to_hf(source, out, **options) -> GgufImport:
    return convert.run(ConvertSettings("gguf-to-hf", source, out, **options), Silent())


@pytest.mark.parametrize(
    ("family", "weights", "overrides"),
    [
        ("LlamaForCausalLM", "F16", {}),
        ("LlamaForCausalLM", "Q4_1", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("LlamaForCausalLM", "BF16", {"head_dim": 32}),
        ("MistralForCausalLM", "Q8_0", {"sliding_window": 16}),
        ("Qwen2ForCausalLM", "Q5_0", {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", "F32", {"num_key_value_heads": 1}),
    ],
)
def test_the_folder_holds_the_weights_of_the_file(family, weights, overrides, tmp_path) -> None:
    model = tiny_gguf.write_model(tmp_path / "tiny.gguf", family, weights=weights, **overrides)
    report = gguf_to_hf(model.path, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(model.tensors)
    for name, expected in model.tensors.items():
        assert written[name].dtype == torch.float16
        assert torch.equal(written[name], expected.half()), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [family]
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert report.architecture == family
    assert report.parameters == sum(tensor.numel() for tensor in model.tensors.values())
    assert report.types == Counter(weights if tensor.ndim == 2 else "F32" for tensor in model.tensors.values())


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_the_folder_is_a_checkpoint_of_its_family(family, tmp_path) -> None:
    model = tiny_gguf.write_model(tmp_path / "tiny.gguf", family, sliding_window=16 if "Mistral" in family else None)
    gguf_to_hf(model.path, tmp_path / "out")
    checkpoint = quantkit.open_checkpoint(tmp_path / "out")
    assert len(checkpoint.linears()) == 14
    up = "model.layers.1.mlp.up_proj"
    assert torch.equal(checkpoint.dense(up), model.tensors[f"{up}.weight"].half())
    tiny.write_tokenizer(tmp_path)
    original = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"] == original
    assert {path.name for path in checkpoint.side_files()} == {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"}


ROPE = {
    "plain": {},
    "theta": {"rope_theta": 500000.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}


@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_the_folder_computes_what_the_original_computes(family, rope, tmp_path) -> None:
    overrides = {**ROPE[rope], **({"sliding_window": 16} if family == "MistralForCausalLM" else {})}
    original = tiny.write_model(tmp_path / "original", family, dtype="float16", vocab_size=276, **overrides)
    source = tiny_gguf.write_model(tmp_path / "tiny.gguf", family, weights="F16", **overrides).path
    gguf_to_hf(source, tmp_path / "out")
    ids = torch.randint(0, 276, (1, 96), generator=torch.Generator().manual_seed(0))
    assert torch.equal(quantkit.load(tmp_path / "out")(ids), quantkit.load(original)(ids))


@pytest.mark.parametrize(
    ("family", "rope"),
    [("LlamaForCausalLM", "llama3"), ("MistralForCausalLM", "theta"), ("Qwen2ForCausalLM", "yarn"), ("Qwen3ForCausalLM", "linear")],
)
def test_transformers_reads_the_folder_alike(family, rope, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    overrides = {**ROPE[rope], **({"sliding_window": 16} if family == "MistralForCausalLM" else {})}
    gguf_to_hf(tiny_gguf.write_model(tmp_path / "tiny.gguf", family, **overrides).path, tmp_path / "out")
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert type(peer).__name__ == family
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("The rest of the things and others\n " * 3, return_tensors="pt")["input_ids"]
    ours = quantkit.load(tmp_path / "out")(ids)
    with torch.no_grad():
        difference = (peer(ids).logits - ours).abs().max()
    assert difference < 1e-4 * ours.std()  # fp32 sums in another order


def test_the_report_names_the_worst_rounding(tmp_path) -> None:
    model = tiny_gguf.write_model(tmp_path / "tiny.gguf", weights="F32")
    report = gguf_to_hf(model.path, tmp_path / "out")
    errors = {name: ((w - w.half().float()).abs().max() / w.abs().max()).item() for name, w in model.tensors.items()}
    worst = max(errors, key=errors.get)
    assert report.worst_tensor == worst
    assert report.rounding_error == pytest.approx(errors[worst])
    assert any("rounding" in row[0] for row in report.rows())


def test_what_float16_holds_is_not_rounded(tmp_path) -> None:
    ones = {f"blk.{layer}.{norm}.weight": np.ones(64, np.float32) for layer in (0, 1) for norm in ("attn_norm", "ffn_norm")}
    ones["output_norm.weight"] = np.ones(64, np.float32)
    model = tiny_gguf.write_model(tmp_path / "tiny.gguf", extra={name: (array, "F32") for name, array in ones.items()})
    report = gguf_to_hf(model.path, tmp_path / "out")
    assert report.rounding_error == 0.0
    assert report.worst_tensor is None


def leftovers(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_failure_in_the_middle_leaves_nothing(tmp_path) -> None:
    broken = np.full(64, np.nan, np.float32)
    model = tiny_gguf.write_model(tmp_path / "tiny.gguf", extra={"output_norm.weight": (broken, "F32")})
    with pytest.raises(CheckpointError, match=r"tensor `output_norm\.weight` .* not finite"):
        gguf_to_hf(model.path, tmp_path / "new" / "out")
    assert leftovers(tmp_path) == {"tiny.gguf"}


def test_an_unknown_tokenizer_fails_before_anything_is_written(tmp_path) -> None:
    model = tiny_gguf.write_model(tmp_path / "tiny.gguf", values={"tokenizer.ggml.pre": "bloom"})
    with pytest.raises(CheckpointError, match="`bloom`"):
        gguf_to_hf(model.path, tmp_path / "out")
    assert leftovers(tmp_path) == {"tiny.gguf"}


def test_a_folder_with_files_needs_overwrite(tmp_path) -> None:
    model = tiny_gguf.write_model(tmp_path / "tiny.gguf")
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        gguf_to_hf(model.path, out)
    assert leftovers(out) == {"notes.txt"}
    gguf_to_hf(model.path, out, overwrite=True)
    assert "config.json" in leftovers(out)
    assert "notes.txt" not in leftovers(out)


def test_the_source_is_never_replaced(tmp_path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    model = tiny_gguf.write_model(folder / "tiny.gguf")
    with pytest.raises(CheckpointError, match="must not be"):
        gguf_to_hf(model.path, folder, overwrite=True)
    assert leftovers(folder) == {"tiny.gguf"}


def test_an_unknown_route_lists_those_there_are(tmp_path) -> None:
    with pytest.raises(UsageError) as error:
        convert.run(ConvertSettings("gguf-to-gptq", tmp_path / "a", tmp_path / "b"), Silent())
    assert error.value.hint == "routes: " + ", ".join(route.name for route in ROUTES)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS])
def test_hints_of_the_disk_name_what_convert_has(code: int, tmp_path, monkeypatch) -> None:
    """It has no `-o`, of which the writers speak."""
    source = tiny.write_model(tmp_path / "model", dtype="bfloat16")

    def refuse(*_) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(CheckpointError, match="cannot be written: no") as caught:
        convert.convert("unshard", source, tmp_path / "out", progress=Silent())
    assert "as OUT" in caught.value.hint and "`-o" not in caught.value.hint


def test_a_place_that_cannot_be_is_named_before_a_measurement(tmp_path) -> None:
    source = tiny_gptq.write_model(tmp_path / "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"`.*/file` cannot be made: File exists") as caught:
        convert.convert("gptq-to-exl2", source, tmp_path / "file" / "out", bpw=5.0, evaluate=False, progress=Silent())
    assert caught.value.hint == "choose another place as OUT"


class Bars(Silent):
    """Labels of the bars, each with what was done of how much."""

    def __init__(self) -> None:
        self.done: dict[str, list[int]] = {}

    @contextmanager
    def task(self, label, total):
        done = self.done[label.partition(" ")[0]] = [0, total]

        class Task:
            def advance(self, steps=1, *, note=""):
                done[0] += steps

        yield Task()


def test_everything_that_reads_the_model_has_a_bar(tmp_path) -> None:
    """Digests of the input, measuring, writing, reading back and comparing: each takes long for a large model."""
    source, bars = tiny_gptq.write_model(tmp_path / "model"), Bars()
    options = {"bpw": 5.0, "data_free": True, "evaluate": False}
    convert.convert("gptq-to-exl2", source, tmp_path / "out", progress=bars, **options)
    assert set(bars.done) == {"read", "measure", "fingerprint", "quantize", "weight"}
    assert all(done == total > 0 for done, total in bars.done.values())
    again = Bars()
    convert.convert("gptq-to-exl2", source, tmp_path / "out", progress=again, **options)
    assert set(again.done) == {"read"}
