"""The routes that keep every weight: equal bit for bit over random shapes, groups and orders, and on files of others."""

import hashlib
import json
import tempfile
from pathlib import Path

import pytest
import tiny
import tiny_gptq
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.checkpoint.shard import ShardWriter
from quantkit.errors import CheckpointError, FormatError, UsageError
from quantkit.progress import Silent

GOLDEN = Path(__file__).parents[1] / "golden"
FEW = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

GPTQ = st.fixed_dictionaries(
    {
        "bits": st.sampled_from([2, 3, 4, 8]),
        "group_size": st.sampled_from([-1, 32, 64, 96]),
        "sym": st.booleans(),
        "act_order": st.booleans(),
        "seed": st.integers(0, 99),
        "hidden_size": st.sampled_from([64, 128]),
        "intermediate_size": st.sampled_from([64, 96, 160]),
    }
)


def convert(route: str, source: Path, out: Path, **options):
    return quantkit.convert(route, source, out, progress=Silent(), **options)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.dense(name) for name in checkpoint.linears()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@FEW
@given(GPTQ)
def test_gptq_both_conventions_and_back(options) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        first = tiny_gptq.write_model(path / "v1", **options)
        report = convert("gptq-to-gptq-v2", first, path / "v2")
        assert report.exact == 7
        assert json.loads((path / "v2" / "config.json").read_text())["quantization_config"]["checkpoint_format"] == "gptq_v2"
        convert("gptq-v2-to-gptq", path / "v2", path / "again")
        assert same(weights(first), weights(path / "v2"))
        before, after = load_file(first / "model.safetensors"), load_file(path / "again" / "model.safetensors")
        assert same(before, after)


@FEW
@given(GPTQ, st.sampled_from(["fp16", "fp32"]))
def test_gptq_to_dense(options, dtype) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        source = tiny_gptq.write_model(path / "gptq", checkpoint_format="gptq_v2", least_zero=0, **options)
        assert convert("gptq-to-hf", source, path / "hf", dtype=dtype).exact == 7
        written = load_file(path / "hf" / "model.safetensors")
        for name, weight in weights(source).items():
            assert torch.equal(written[f"{name}.weight"].to(torch.float16), weight)
            assert written[f"{name}.weight"].dtype == {"fp16": torch.float16, "fp32": torch.float32}[dtype]
        assert "quantization_config" not in json.loads((path / "hf" / "config.json").read_text())


@FEW
@given(st.sampled_from([-1, 32, 64]), st.booleans(), st.sampled_from([64, 128]), st.integers(0, 99))
def test_awq_to_gptq(group_size, sym, hidden, seed) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        shape = {"hidden_size": hidden, "intermediate_size": 192}
        expected = tiny_gptq.write_awq(path / "awq", group_size=group_size, sym=sym, seed=seed, **shape)
        report = convert("awq-to-gptq", path / "awq", path / "gptq")
        assert report.exact == 7
        assert same({name: weight.T.contiguous() for name, weight in expected.items()}, weights(path / "gptq"))
        config = json.loads((path / "gptq" / "config.json").read_text())["quantization_config"]
        assert (config["sym"], config["checkpoint_format"]) == (sym, "gptq" if sym else "gptq_v2")


@pytest.mark.parametrize("case", sorted(path.stem for path in (GOLDEN / "gptq").glob("*.safetensors")))
def test_layers_of_other_tools_keep_their_weights(case: str, tmp_path: Path) -> None:
    """To the other convention, by the digests of the tool that wrote them; and back where that can be."""
    with safe_open(GOLDEN / "gptq" / f"{case}.safetensors", "pt") as file:
        metadata = file.metadata()
        quantization, digests = json.loads(metadata["quantization_config"]), json.loads(metadata["dequantized_sha256"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = {**tiny.make_config("LlamaForCausalLM"), "quantization_config": quantization}
    (source / "config.json").write_text(json.dumps(config))
    second = quantization.get("checkpoint_format") == "gptq_v2"
    routes = ["gptq-v2-to-gptq", "gptq-to-gptq-v2"] if second else ["gptq-to-gptq-v2", "gptq-v2-to-gptq"]
    try:
        convert(routes[0], source, tmp_path / "other")
    except FormatError as error:
        assert second, "v2 holds every zero point"
        assert "zero point of 0" in error.message
        assert not (tmp_path / "other").exists()
        return
    other = open_checkpoint(tmp_path / "other")
    for name, digest in digests.items():
        weight = other.linear(name).dequantize().T.contiguous() + 0.0
        assert hashlib.sha256(weight.numpy().tobytes()).hexdigest() == digest, name


def test_awq_of_gptqmodel(tmp_path: Path) -> None:
    """By the digests of the weights that its own kernel multiplies with."""
    source = GOLDEN / "awq" / "model-gm-w4-g32"
    digests = json.loads((source / "dequantized_sha256.json").read_text())
    assert convert("awq-to-gptq", source, tmp_path / "gptq").exact == len(digests) == 14
    for name, weight in weights(tmp_path / "gptq").items():
        assert hashlib.sha256((weight + 0.0).numpy().tobytes()).hexdigest() == digests[name], name


@pytest.mark.parametrize("model", ["exl2/tiny-llama", "exl2/llama-3.3bpw"])
def test_exl2_of_exllamav2_to_dense(model: str, tmp_path: Path) -> None:
    with safe_open(GOLDEN / f"{model}.expected.safetensors", "pt") as file:
        digests = file.metadata()
    report = convert("exl2-to-hf", GOLDEN / model, tmp_path / "hf")
    assert report.exact == len(digests) == 15
    written = load_file(tmp_path / "hf" / "model.safetensors")
    for name, digest in digests.items():
        assert hashlib.sha256(written[f"{name}.weight"].numpy().tobytes()).hexdigest() == digest, name
    expected = load_file(GOLDEN / f"{model}.expected.safetensors")
    logits = quantkit.load(tmp_path / "hf")(expected["input_ids"])
    assert float((logits - expected["logits_ref_fp32"]).abs().max()) < 1e-3


def test_a_tied_model_with_a_head_of_its_own_is_untied(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", tie_word_embeddings=True)
    quantkit.quantize(
        source, tmp_path / "exl2", format="exl2", bpw=6.0, samples=4, length=64, evaluate=False, progress=Silent()
    )
    report = convert("exl2-to-hf", tmp_path / "exl2", tmp_path / "hf", dtype="fp32")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is False
    assert any("apart from the embedding" in remark for remark in report.remarks)
    ids = torch.arange(30)[None]
    assert torch.allclose(quantkit.load(tmp_path / "hf")(ids), quantkit.load(tmp_path / "exl2")(ids), atol=1e-3)


@pytest.mark.parametrize("family", ["Phi3ForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM"])
def test_families_with_fused_or_renamed_linears(family: str, tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", family)
    quantkit.quantize(source, tmp_path / "gptq", group_size=32, effort="nearest", evaluate=False, progress=Silent())
    convert("gptq-to-hf", tmp_path / "gptq", tmp_path / "hf", dtype="fp32")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    assert same({n: w.half() for n, w in weights(tmp_path / "hf").items()}, weights(tmp_path / "gptq"))


def test_bf16_is_rounded_and_says_so(tmp_path: Path) -> None:
    source = tiny_gptq.write_model(tmp_path / "gptq", dtype="float32")
    report = convert("gptq-to-hf", source, tmp_path / "hf", dtype="bf16")
    assert report.exact == 0
    assert report.way == "rounded once, bfloat16"
    assert any("rounded to bfloat16" in remark for remark in report.remarks)
    for name, weight in weights(source).items():
        assert torch.equal(open_checkpoint(tmp_path / "hf").dense(name), weight.to(torch.bfloat16))


def test_values_beyond_the_dtype_are_refused(tmp_path: Path) -> None:
    source = tiny_gptq.write_model(tmp_path / "gptq", dtype="float32")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=r"model.norm.weight.*beyond float16"):
        convert("gptq-to-hf", source, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["gptq"]


def test_what_a_convention_cannot_hold_is_refused(tmp_path: Path) -> None:
    source = tiny_gptq.write_model(tmp_path / "v2", sym=False, checkpoint_format="gptq_v2", least_zero=0)
    with pytest.raises(FormatError, match=r"qzeros.*zero point of 0"):
        convert("gptq-v2-to-gptq", source, tmp_path / "v1")
    with pytest.raises(CheckpointError, match="`gptq_v2` already"):
        convert("gptq-to-gptq-v2", source, tmp_path / "v1")
    assert [path.name for path in tmp_path.iterdir()] == ["v2"]


@pytest.mark.parametrize("route", ["gptq-to-gptq-v2", "awq-to-gptq"])
def test_a_linear_without_its_codes_is_missed(route: str, tmp_path: Path) -> None:
    write = tiny_gptq.write_model if route.startswith("gptq") else tiny_gptq.write_awq
    write(tmp_path / "in")
    (file,) = (tmp_path / "in").glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj.qweight"))
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, file, metadata={"format": "pt"})
    with pytest.raises((FormatError, CheckpointError), match=f"`{name}`"):
        convert(route, tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_linear_in_two_forms_is_refused(tmp_path: Path) -> None:
    tiny_gptq.write_model(tmp_path / "in")
    (file,) = (tmp_path / "in").glob("*.safetensors")
    name = "model.layers.0.mlp.down_proj"
    save_file({**load_file(file), f"{name}.weight": torch.zeros(64, 128)}, file, metadata={"format": "pt"})
    with pytest.raises(FormatError, match=f"`{name}` in .* is both dense and GPTQ"):
        convert("gptq-to-gptq-v2", tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_awq_of_another_layout_is_refused(tmp_path: Path) -> None:
    tiny_gptq.write_awq(tmp_path / "awq")
    config = json.loads((tmp_path / "awq" / "config.json").read_text())
    for change, message in (({"version": "gemv"}, "layout `gemv`"), ({"bits": 8}, "8 bits")):
        changed = {**config, "quantization_config": {**config["quantization_config"], **change}}
        (tmp_path / "awq" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(FormatError, match=message):
            convert("awq-to-gptq", tmp_path / "awq", tmp_path / "gptq")


@pytest.mark.parametrize(
    ("route", "message"),
    [("gptq-to-hf", "no linear in GPTQ form"), ("exl2-to-hf", "no linear in EXL2"), ("awq-to-gptq", "no AWQ"),
     ("gptq-to-gptq-v2", "no GPTQ model")],
)  # fmt: skip
def test_a_dense_model_is_refused(route: str, message: str, tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model")
    with pytest.raises(CheckpointError, match=message):
        convert(route, source, tmp_path / "out")


def test_shards_and_back(tmp_path: Path) -> None:
    source = tiny_gptq.write_model(tmp_path / "gptq", dtype="bfloat16")
    report = convert("shard", source, tmp_path / "parts", shard_size="40kB")
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert report.facts["files"] == len(files) > 2
    assert all(file.stat().st_size < 60_000 for file in files)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())["weight_map"]
    assert convert("unshard", tmp_path / "parts", tmp_path / "whole").facts == {"files": 1, "files_before": len(files)}
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "whole" / "model.safetensors")
    assert same(before, after)
    assert index.keys() == before.keys()
    assert same(weights(tmp_path / "parts"), weights(source))


def test_settings_in_a_file_of_their_own_go_along(tmp_path: Path) -> None:
    source = tiny_gptq.write_model(tmp_path / "gptq")
    config = json.loads((source / "config.json").read_text())
    (source / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (source / "config.json").write_text(json.dumps(config))
    convert("unshard", source, tmp_path / "out")
    assert same(weights(tmp_path / "out"), weights(source))


@pytest.mark.parametrize("text", ["", "4", "0GiB", "-1GB", "4 bananas", "GiB"])
def test_what_is_no_size(text: str, tmp_path: Path) -> None:
    source = tiny_gptq.write_model(tmp_path / "gptq")
    if text == "4":  # four bytes: each tensor a file of its own
        assert convert("shard", source, tmp_path / "out", shard_size=text).facts["files"] > 20
        return
    with pytest.raises(UsageError, match="is no size"):
        convert("shard", source, tmp_path / "out", shard_size=text)


FREE = {"bpw": 5.0, "data_free": True, "evaluate": False}


@pytest.mark.parametrize(
    ("route", "options"), [("gptq-to-hf", {}), ("gptq-to-gptq-v2", {}), ("shard", {}), ("gptq-to-exl2", FREE)]
)
def test_a_full_disk_leaves_nothing(route: str, options, tmp_path: Path, monkeypatch) -> None:
    source = tiny_gptq.write_model(tmp_path / "gptq")
    write, written = ShardWriter._write, []

    def fills(self, name, tensor) -> None:
        written.append(name)
        if len(written) == 6:
            raise OSError(28, "No space left on device")
        write(self, name, tensor)

    monkeypatch.setattr(ShardWriter, "_write", fills)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        convert(route, source, tmp_path / "out", **options)
    assert "free some space" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["gptq"]
    monkeypatch.undo()
    convert(route, source, tmp_path / "out", **options)


def test_one_linear_in_memory_at_a_time(tmp_path: Path, monkeypatch) -> None:
    """Reading the next linear begins when nothing of the last one is held any more."""
    import weakref

    from quantkit.checkpoint.reader import Checkpoint

    source = tiny_gptq.write_model(tmp_path / "gptq", hidden_size=128, intermediate_size=256)
    read, alive = Checkpoint.tensor, []
    most = []

    def counts(self, name):
        most.append(sum(held() is not None for held in alive))
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Checkpoint, "tensor", counts)
    for route, options in (("gptq-to-hf", {}), ("gptq-to-gptq-v2", {}), ("gptq-to-exl2", FREE)):
        alive.clear()
        most.clear()
        convert(route, source, tmp_path / route, **options)
        assert max(most) <= 8, route  # the tensors of one linear in two forms
