"""Routes that read what is no model of this tool: pickles and adapters; and EXL2 back to GPTQ."""

import math
import pickle
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny_lora import write_adapter

import quantkit
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.errors import CheckpointError, FormatError, UsageError
from quantkit.formats.gptq import GptqTensor
from quantkit.progress import Silent

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


def convert(route: str, source: Path, out: Path, **options):
    return quantkit.convert(route, source, out, progress=Silent(), **options)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model", dtype="float32")


def pickled(model: Path, *, files: int = 1, **extra: object) -> dict[str, torch.Tensor]:
    """The weights of a model as torch saves them, in place of its safetensors."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = list(tensors)
    for number in range(files):
        name = "pytorch_model.bin" if files == 1 else f"pytorch_model-{number + 1:05d}-of-{files:05d}.bin"
        torch.save({**{key: tensors[key] for key in names[number::files]}, **extra}, model / name)
    return tensors


@pytest.mark.parametrize("files", [1, 3])
def test_pickles_become_safetensors(files: int, model: Path, tmp_path: Path) -> None:
    tensors = pickled(model, files=files)
    (model / "training_args.bin").write_bytes(b"no weights")
    report = convert("pickle-to-safetensors", model, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert report.facts["files_before"] == files
    assert not list((tmp_path / "out").glob("*.bin"))
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(model: Path, tmp_path: Path) -> None:
    pickled(model)

    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"model.norm.weight": Attack()}, model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="could run code: refused"):
        convert("pickle-to-safetensors", model, tmp_path / "out")
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match=r"refused|cannot be read"):
        convert("pickle-to-safetensors", model, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_what_is_no_file_of_weights_is_refused(model: Path, tmp_path: Path) -> None:
    tensors = pickled(model, step=7)
    with pytest.raises(CheckpointError, match="`step`, a int and no tensor"):
        convert("pickle-to-safetensors", model, tmp_path / "out")
    (model / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(CheckpointError, match=r"cannot be read|refused"):
        convert("pickle-to-safetensors", model, tmp_path / "out")
    (model / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="has no `pytorch_model"):
        convert("pickle-to-safetensors", model, tmp_path / "out")
    assert tensors
    assert not (tmp_path / "out").exists()


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, model / "pytorch_model.bin")
    report = convert("pickle-to-safetensors", model, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert "once more" in report.remarks[0]


def changes(model: Path, out: Path) -> dict[str, torch.Tensor]:
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    return {
        name.removesuffix(".weight"): (after[name] - before[name]).double()
        for name in before
        if not torch.equal(after[name], before[name])
    }


@pytest.mark.parametrize(("rslora", "scale"), [(False, 16 / 8), (True, 16 / math.sqrt(8))])
def test_alpha_and_rslora(rslora: bool, scale: float, model: Path, tmp_path: Path) -> None:
    products = write_adapter(tmp_path / "a", {Q: (64, 64, 8), UP: (128, 64, 8)}, use_rslora=rslora)
    convert("merge-lora", model, tmp_path / "out", adapters=(str(tmp_path / "a"),))
    found = changes(model, tmp_path / "out")
    assert found.keys() == products.keys()
    for module, product in products.items():
        assert torch.allclose(found[module], scale * product, atol=1e-5)


def test_several_adapters_with_weights_and_patterns(model: Path, tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "a", {Q: (64, 64, 8)})
    second = write_adapter(
        tmp_path / "b", {Q: (64, 64, 4), UP: (128, 64, 2)}, seed=1, r=4, rank_pattern={"up_proj": 2}, alpha_pattern={"up_proj": 6}
    )
    convert("merge-lora", model, tmp_path / "out", adapters=(f"{tmp_path / 'a'}=0.5", f"{tmp_path / 'b'}=-1"))
    found = changes(model, tmp_path / "out")
    assert torch.allclose(found[Q], 0.5 * 2 * first[Q] - 4 * second[Q], atol=1e-5)
    assert torch.allclose(found[UP], -3 * second[UP], atol=1e-5)


def test_embeddings_and_modules_that_were_saved_whole(model: Path, tmp_path: Path) -> None:
    a, b = torch.randn(8, 320), torch.randn(64, 8)
    norm = torch.full((64,), 2.0)
    extra = {
        "base_model.model.model.embed_tokens.lora_embedding_A": a,
        "base_model.model.model.embed_tokens.lora_embedding_B": b,
        "base_model.model.model.norm.weight": norm,
    }
    write_adapter(tmp_path / "a", {}, extra=extra)
    convert("merge-lora", model, tmp_path / "out", adapters=(str(tmp_path / "a"),))
    assert torch.allclose(changes(model, tmp_path / "out")["model.embed_tokens"], 2 * (b @ a).T.double(), atol=1e-4)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"], norm)
    with pytest.raises(UsageError, match=r"replaces `model.norm.weight` as a whole"):
        convert("merge-lora", model, tmp_path / "other", adapters=(f"{tmp_path / 'a'}=0.5",))


REFUSED = [
    ({"peft_type": "IA3"}, {Q: (64, 64, 8)}, "type IA3"),
    ({"use_dora": True}, {Q: (64, 64, 8)}, "`use_dora`"),
    ({"bias": "all"}, {Q: (64, 64, 8)}, "trains biases"),
    ({"r": 4}, {Q: (64, 64, 8)}, "its config says 4"),
    ({}, {Q: (64, 32, 8)}, r"adapts .* as \[64, 32\]"),
    ({}, {"model.layers.9.self_attn.q_proj": (64, 64, 8)}, "which is not in"),
]


@pytest.mark.parametrize(("config", "modules", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_adapters_that_cannot_be_merged(config, modules, message, model: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", modules, **config)
    with pytest.raises(CheckpointError, match=message):
        convert("merge-lora", model, tmp_path / "out", adapters=(str(tmp_path / "a"),))
    assert not (tmp_path / "out").exists()


def test_other_refusals_of_merging(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no adapter"):
        convert("merge-lora", model, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"adapter_config.json"):
        convert("merge-lora", model, tmp_path / "out", adapters=(str(model),))
    write_adapter(tmp_path / "a", {Q: (64, 64, 8)}, extra={"base_model.model.x.lora_magnitude_vector": torch.ones(3)})
    with pytest.raises(CheckpointError, match="is not understood"):
        convert("merge-lora", model, tmp_path / "out", adapters=(str(tmp_path / "a"),))
    quantkit.quantize(model, tmp_path / "gptq", group_size=32, effort="nearest", evaluate=False, progress=Silent())
    with pytest.raises(FormatError, match="is quantized"):
        convert("merge-lora", tmp_path / "gptq", tmp_path / "out", adapters=(str(tmp_path / "a"),))


def test_exl2_to_gptq(model: Path, tmp_path: Path) -> None:
    text = {"samples": 4, "length": 64}
    quantkit.quantize(model, tmp_path / "exl2", format="exl2", bpw=6.0, evaluate=False, progress=Silent(), **text)
    report = convert("exl2-to-gptq", tmp_path / "exl2", tmp_path / "gptq", bits=8, group_size=32, evaluate=False, **text)
    before, after = open_checkpoint(tmp_path / "exl2"), open_checkpoint(tmp_path / "gptq")
    assert all(isinstance(after.linear(name), GptqTensor) for name in after.linears())
    assert torch.equal(after.dense("lm_head"), before.dense("lm_head"))
    assert report.linears[0].error < 0.02
    assert {linear.name for linear in report.linears} == set(before.linears())
    ids = torch.arange(30)[None]
    left, right = quantkit.load(tmp_path / "exl2")(ids), quantkit.load(tmp_path / "gptq")(ids)
    assert float((left - right).abs().mean()) < 0.02 * float(left.std())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exl2", "gptq", "model"]


def test_adapters_of_what_the_files_call_by_another_name_are_not_left_out_in_silence(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", "MixtralForCausalLM")
    file = source / "model.safetensors"
    tensors = load_file(file)
    for there, here in ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")):
        tensors = {name.replace(there, here): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, {"format": "pt"})
    name = "model.layers.0.block_sparse_moe.experts.0.w1"
    outputs, inputs = tensors["model.layers.0.mlp.experts.0.gate_proj.weight"].shape
    write_adapter(tmp_path / "a", {name: (outputs, inputs, 8)})
    with pytest.raises(CheckpointError, match=r"another name|not in"):
        convert("merge-lora", source, tmp_path / "out", adapters=(str(tmp_path / "a"),))
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_a_tied_embedding_would_change_the_head(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", tie_word_embeddings=True)
    vocab, hidden = load_file(source / "model.safetensors")["model.embed_tokens.weight"].shape
    extra = {
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(8, vocab),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.ones(hidden, 8),
    }
    write_adapter(tmp_path / "a", {}, extra=extra)
    with pytest.raises(CheckpointError, match="which is the head"):
        convert("merge-lora", source, tmp_path / "out", adapters=(str(tmp_path / "a"),))
