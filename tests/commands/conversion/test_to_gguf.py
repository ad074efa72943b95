"""GGUF written here: read back by our own reader, block by block against the source, and refused where it would lie."""

import json
from pathlib import Path

import pytest
import tiny
import tiny_gptq
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import quantkit
from quantkit.checkpoint.gguf import open_gguf
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.errors import CheckpointError, UnsupportedModel, UsageError
from quantkit.progress import Silent

SMALL = {"vocab_size": 276}


def convert(route: str, source: Path, out: Path, **options):
    return quantkit.convert(route, source, out, progress=Silent(), **options)


FAMILIES = [
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("LlamaForCausalLM", {"head_dim": 32}),
    ("MistralForCausalLM", {}),
    ("Qwen2ForCausalLM", {}),
    ("Qwen3ForCausalLM", {}),
]


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
def test_f16_there_and_back(family: str, overrides, tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", family, dtype="float16", **SMALL, **overrides)
    report = convert("hf-to-gguf", source, tmp_path / "m.gguf")
    assert report.linears == ()
    convert("gguf-to-hf", tmp_path / "m.gguf", tmp_path / "back")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ids = torch.arange(5, 40)[None]
    assert torch.allclose(quantkit.load(source)(ids), quantkit.load(tmp_path / "back")(ids), atol=1e-4)
    text = "The inner of an ocean, in 1984."
    own, other = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (source, tmp_path / "back"))
    assert own.encode(text).ids == other.encode(text).ids


@pytest.mark.parametrize(("kind", "most"), [("Q8_0", 0.01), ("Q4_0", 0.12), ("Q4_1", 0.1)])
def test_rounded_types_say_what_they_lose(kind: str, most: float, tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", dtype="float32", **SMALL)
    report = convert("hf-to-gguf", source, tmp_path / "m.gguf", type=kind)
    assert len(report.linears) == 14
    assert 0 < report.linears[-1].error <= report.linears[0].error < most
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.tensors["blk.0.ffn_up.weight"].type_name == kind
        name = "model.layers.0.mlp.up_proj"
        weight = open_checkpoint(source).dense(name)
        missed = (file.single("blk.0.ffn_up.weight") - weight).norm() / weight.norm()
    assert next(linear.error for linear in report.linears if linear.name == name) == pytest.approx(float(missed))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"bits": 4, "group_size": 32}, "Q4_0"),
        ({"bits": 4, "group_size": 64}, "Q4_0"),
        ({"bits": 8, "group_size": -1}, "Q8_0"),
        ({"bits": 4, "group_size": 32, "sym": False}, "F16"),
        ({"bits": 4, "group_size": 32, "act_order": True}, "F16"),
        ({"bits": 3, "group_size": 32}, "F16"),
    ],
)
def test_gptq_stays_exact(options, kind: str, tmp_path: Path) -> None:
    source = tiny_gptq.write_model(tmp_path / "gptq", **SMALL, **options)
    report = convert("gptq-to-gguf", source, tmp_path / "m.gguf")
    assert report.exact == 7
    assert report.facts["carried_over"] == (7 if kind != "F16" else 0)
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.tensors["blk.0.attn_q.weight"].type_name == kind
    convert("gguf-to-hf", tmp_path / "m.gguf", tmp_path / "back")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "back")
    for name in before.linears():
        assert torch.equal(before.dense(name), after.dense(name)), name


def test_a_grid_that_does_not_agree_is_rounded_and_said_so(tmp_path: Path) -> None:
    source = tiny_gptq.write_model(tmp_path / "gptq", sym=False, **SMALL)
    report = convert("gptq-to-gguf", source, tmp_path / "m.gguf", type="Q4_1")
    assert report.way == "7 linears rounded"
    assert report.exact == 0
    assert len(report.linears) == 7


def test_llama3_scaling_becomes_a_table(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    source = tiny.write_model(tmp_path / "model", rope_theta=500000.0, rope_scaling=scaling, **SMALL)
    convert("hf-to-gguf", source, tmp_path / "m.gguf")
    convert("gguf-to-hf", tmp_path / "m.gguf", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["rope_scaling"] == scaling


def test_what_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    for number, (family, overrides, message) in enumerate(
        (
            ("Gemma2ForCausalLM", {}, "cannot be written as GGUF"),
            ("MistralForCausalLM", {"sliding_window": 16}, "a window of 16"),
            ("LlamaForCausalLM", {"attention_bias": True}, "has no place"),
        )
    ):
        source = tiny.write_model(tmp_path / f"model{number}", family, **SMALL, **overrides)
        with pytest.raises(UnsupportedModel, match=message):
            convert("hf-to-gguf", source, tmp_path / "m.gguf")
    source = tiny.write_model(tmp_path / "plain", **SMALL)
    with pytest.raises(UsageError, match="unknown type `Q9`"):
        convert("hf-to-gguf", source, tmp_path / "m.gguf", type="Q9")
    said = json.loads((source / "tokenizer.json").read_text())
    said["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    (source / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(UnsupportedModel, match="cuts text"):
        convert("hf-to-gguf", source, tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*.gguf*"))
    assert not list(tmp_path.glob(".*"))


def test_an_existing_file_stays_unless_asked(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", **SMALL)
    (tmp_path / "m.gguf").write_text("mine")
    with pytest.raises(CheckpointError, match="exists"):
        convert("hf-to-gguf", source, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_text() == "mine"
    convert("hf-to-gguf", source, tmp_path / "m.gguf", overwrite=True)
    with pytest.raises(CheckpointError, match="inside the model"):
        convert("hf-to-gguf", source, source / "m.gguf")


@pytest.mark.parametrize("full", [OSError(28, "No space left on device"), OSError("32768 requested and 12320 written")])
def test_a_full_disk_leaves_nothing(full: OSError, tmp_path: Path, monkeypatch) -> None:
    """The system says so; numpy, which writes the tensors, only counts."""
    import gguf

    source = tiny.write_model(tmp_path / "model", **SMALL)
    write, count = gguf.GGUFWriter.write_tensor_data, []

    def fills(self, *arguments) -> None:
        count.append(0)
        if len(count) == 5:
            raise full
        write(self, *arguments)

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fills)
    with pytest.raises(CheckpointError, match=r"cannot be written: (No space left|the disk takes no more)") as caught:
        convert("hf-to-gguf", source, tmp_path / "m.gguf")
    assert "free some space" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
