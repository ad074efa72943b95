"""Model folders as people have them: read right, or refused with the file and the tensor that is at fault."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import raw_safetensors as raw
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.checkpoint.header import TORCH_DTYPES
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.errors import CheckpointError, FormatError, UnsupportedModel
from quantkit.formats import exl2
from quantkit.formats.codec import Codes, Grid, Group, Layout, StoredTensor
from quantkit.formats.gptq import GptqCodec

INDEX = "model.safetensors.index.json"


def refusal(path: Path | str, kind: type[CheckpointError] = CheckpointError) -> CheckpointError:
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    assert caught.value.hint
    return caught.value


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


# Reading


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_is_read_as_the_library_reads_it(tmp_path: Path, family: str, shards: int) -> None:
    path = tiny.write_model(tmp_path, family, dtype="bfloat16", shards=shards, tokenizer=False)
    expected: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        expected |= load_file(file)
    checkpoint = quantkit.open_checkpoint(path)
    assert sorted(checkpoint.names()) == sorted(expected)
    assert checkpoint.config == json.loads((path / "config.json").read_text())
    assert checkpoint.quantization is None
    assert checkpoint.notes == ()
    assert checkpoint.stored_bytes == sum(tensor.nbytes for tensor in expected.values())
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
        info = checkpoint.info(name)
        assert (info.dtype, info.shape, info.file.parent) == (tensor.dtype, tuple(tensor.shape), path)
    for name in checkpoint.linears():
        assert torch.equal(checkpoint.dense(name), expected[f"{name}.weight"])
        stored = checkpoint.linear(name)
        assert torch.equal(stored.dequantize(), expected[f"{name}.weight"].T)
        assert (stored.bias is None) == (f"{name}.bias" not in expected)


def test_linears_are_in_model_order_and_without_routers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_model(tmp_path, "Qwen2MoeForCausalLM", num_hidden_layers=1, num_experts=2))
    mlp = ("gate_proj", "up_proj", "down_proj")
    assert checkpoint.linears() == [
        *(f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"),
        *(f"model.layers.0.mlp.experts.{expert}.{name}" for expert in (0, 1) for name in mlp),
        *(f"model.layers.0.mlp.shared_expert.{name}" for name in mlp),
    ]


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_every_dtype_that_torch_has(tmp_path: Path, dtype: str) -> None:
    data = bytes(range(48)) if dtype != "BOOL" else bytes([0, 1] * 24)
    size = torch.empty((), dtype=TORCH_DTYPES[dtype]).element_size()
    table = {
        "scalar": raw.entry(0, size, [], dtype),
        "none": raw.entry(size, size, [0, 3], dtype),
        "rest": raw.entry(size, 48, [48 // size - 1, 1], dtype),
    }
    raw.write(tmp_path / "model.safetensors", table, data)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        read = checkpoint.tensor(name)
        assert read.dtype == tensor.dtype == TORCH_DTYPES[dtype]
        assert read.shape == tensor.shape
        assert torch.equal(read.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))


def test_a_dtype_that_is_not_supported_is_named_when_it_is_read(tmp_path: Path) -> None:
    raw.write(tmp_path / "model.safetensors", {"a.weight": raw.entry(0, 4, [2, 2], "F8_E4M3")}, bytes(4))
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    for read in (checkpoint.info, checkpoint.tensor):
        with pytest.raises(CheckpointError, match=r"tensor `a\.weight` in .* is stored as F8_E4M3, which is not supported"):
            read("a.weight")


def test_opening_reads_no_tensor(tmp_path: Path) -> None:
    huge = 2**40
    path = raw.write(tmp_path / "model.safetensors", {"a": raw.entry(0, huge)})
    os.truncate(path, path.stat().st_size + huge)  # a hole: no disk is used
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.info("a").shape == (huge,)
    assert checkpoint.stored_bytes == huge


def test_a_tensor_is_in_memory_of_its_own(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_model(tmp_path))
    first = checkpoint.tensor("model.norm.weight")
    kept = first.clone()
    first.zero_()
    assert torch.equal(checkpoint.tensor("model.norm.weight"), kept)


def test_other_files_of_the_folder_do_not_matter(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path, tokenizer=False)
    for name in ("tokenizer.json", "expected.safetensors", "generation_config.json", "pytorch_model.bin"):
        (path / name).write_bytes(b"garbage")
    assert len(open_checkpoint(path).names()) == 21


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_model(tmp_path, num_hidden_layers=1)
    expected = load_file(path / "model.safetensors")["model.norm.weight"]
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, targets, start: whole(file, [targets[0][:7]], start))
    assert torch.equal(open_checkpoint(path).tensor("model.norm.weight"), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_part_of_a_matrix_reads_no_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "model", dtype=dtype))
    name, read = "model.layers.1.mlp.down_proj.weight", []
    whole = checkpoint.tensor(name)
    original = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], start: int) -> int:
        read.append(original(descriptor, buffers, start))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    for rows, columns in ((range(3, 41), None), (range(64), range(32, 96)), (range(5, 6), range(128))):
        read.clear()
        part = checkpoint.part(name, rows, columns)
        expected = whole[rows.start : rows.stop, columns.start if columns else 0 : columns.stop if columns else None]
        assert torch.equal(part, expected)
        assert sum(read) == part.nbytes
    for rows, columns in ((range(60, 65), None), (range(3), range(120, 130))):
        with pytest.raises(CheckpointError, match=r"has shape \[64, 128\], expected at least"):
            checkpoint.part(name, rows, columns)
    with pytest.raises(CheckpointError, match="expected at least"):
        checkpoint.part("model.norm.weight", range(3))


def test_a_disk_that_fails_is_named_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(tiny.write_model(tmp_path))

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"model\.safetensors` cannot be read: Input/output error"):
        checkpoint.tensor("model.norm.weight")


@pytest.mark.parametrize("change", ["append", "replace", "cut", "remove"])
def test_a_file_that_changes_after_it_was_opened(tmp_path: Path, change: str) -> None:
    file = tiny.write_model(tmp_path) / "model.safetensors"
    checkpoint = open_checkpoint(tmp_path)
    content = file.read_bytes()
    file.unlink()
    written = {"append": content + b"\0", "replace": content, "cut": content[:-4]}
    if change in written:
        file.write_bytes(written[change])
    with pytest.raises(CheckpointError, match=r"changed after it was opened|No such file"):
        checkpoint.tensor("model.norm.weight")


# Folders of links


def link_like_the_hub_cache(model: Path, cache: Path) -> Path:
    """The files of a model as blobs, and a snapshot of links to them; returns the snapshot."""
    snapshot = cache / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "models--org--name" / "blobs").mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, cache / "models--org--name" / "blobs" / f"blob{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob{number}")
    return snapshot


def test_a_snapshot_of_links_is_read_like_the_files(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", shards=3)
    linked = open_checkpoint(link_like_the_hub_cache(model, tmp_path / "cache"))
    plain = open_checkpoint(model)
    assert linked.names() == plain.names()
    assert all(torch.equal(linked.tensor(name), plain.tensor(name)) for name in plain.names())
    assert [path.name for path in linked.side_files()] == [path.name for path in plain.side_files()]


def test_dangling_links_are_named_at_once(tmp_path: Path) -> None:
    snapshot = link_like_the_hub_cache(tiny.write_model(tmp_path / "model", shards=3), tmp_path / "cache")
    for name in ("config.json", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        (snapshot / name).resolve().unlink()
    message = refusal(snapshot).message
    assert message.count(" → `../../blobs/") == 3


def test_a_dangling_link_to_what_is_not_needed_is_a_note(tmp_path: Path) -> None:
    snapshot = link_like_the_hub_cache(tiny.write_model(tmp_path / "model"), tmp_path / "cache")
    (snapshot / "generation_config.json").resolve().unlink()
    checkpoint = open_checkpoint(snapshot)
    assert len(checkpoint.notes) == 1
    assert f"`{snapshot / 'generation_config.json'}` → `../../blobs/" in checkpoint.notes[0]
    assert "generation_config.json" not in [path.name for path in checkpoint.side_files()]


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_files_that_are_not_needed_may_be_absent(tmp_path: Path, name: str) -> None:
    (tiny.write_model(tmp_path) / name).unlink()
    assert open_checkpoint(tmp_path).notes == ()


def test_the_folder_itself_is_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("gone")
    assert refusal(tmp_path / "model").message == f"`{tmp_path / 'model'}` is a link to `gone`, which does not exist"


# What is wrong with a folder


def cut_a_shard(folder: Path) -> str:
    file = shard_of(folder, "model.norm.weight")
    os.truncate(file, file.stat().st_size - 1)
    return f"`{file}` is cut short: tensor `"


def point_a_shard_to_lfs(folder: Path) -> str:
    file = shard_of(folder, "model.norm.weight")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    return f"`{file}` is a git-LFS pointer, not the weights it points to"


def remove_a_shard(folder: Path) -> str:
    file = shard_of(folder, "model.norm.weight")
    file.unlink()
    return f"missing: `{file}`, named in `{folder / INDEX}`"


def take_a_tensor_out_of_its_shard(folder: Path) -> str:
    file = shard_of(folder, "model.norm.weight")
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    return f"tensor `model.norm.weight` is not in `{file}`, where `{folder / INDEX}` has it"


def put_a_tensor_in_another_shard(folder: Path) -> str:
    first = shard_of(folder, "model.embed_tokens.weight")
    index = json.loads((folder / INDEX).read_text())
    last = shard_of(folder, "model.norm.weight")
    index["weight_map"]["model.norm.weight"] = first.name
    (folder / INDEX).write_text(json.dumps(index))
    return f"tensor `model.norm.weight` is not in `{first}`, where `{folder / INDEX}` has it; it is in `{last}`"


def put_a_tensor_in_two_shards(folder: Path) -> str:
    first, last = shard_of(folder, "model.embed_tokens.weight"), shard_of(folder, "model.norm.weight")
    save_file({**load_file(first), "model.norm.weight": torch.ones(64)}, first)
    return f"tensor `model.norm.weight` is in both `{first}` and `{last}`"


def remove_the_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return f"missing: `{folder / 'config.json'}`, which describes the model"


def spoil_the_config(folder: Path) -> str:
    (folder / "config.json").write_text('{"a": ')
    return f"`{folder / 'config.json'}` is not a valid JSON object: Expecting value"


def make_the_config_a_list(folder: Path) -> str:
    (folder / "config.json").write_text("[]")
    return f"`{folder / 'config.json'}` is not a valid JSON object: it is no object"


def make_the_config_a_folder(folder: Path) -> str:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    return f"`{folder / 'config.json'}` is not a regular file"


def replace_the_weights_by_a_pickle(folder: Path) -> str:
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    return f"`{folder}` has only pickled weights (`pytorch_model.bin`): pickled weights can run code"


def disguise_a_pickle(folder: Path) -> str:
    file = shard_of(folder, "model.norm.weight")
    torch.save({"model.norm.weight": torch.ones(64)}, file)
    return f"`{file}` is a zip archive, as pickled PyTorch weights are"


@pytest.mark.parametrize(
    "damage",
    [
        cut_a_shard,
        point_a_shard_to_lfs,
        remove_a_shard,
        take_a_tensor_out_of_its_shard,
        put_a_tensor_in_another_shard,
        put_a_tensor_in_two_shards,
        remove_the_config,
        spoil_the_config,
        make_the_config_a_list,
        make_the_config_a_folder,
        replace_the_weights_by_a_pickle,
        disguise_a_pickle,
    ],
)
def test_damage_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    folder = tiny.write_model(tmp_path, shards=3)
    message = damage(folder)
    assert refusal(folder).message.startswith(message)


def test_tensors_that_the_index_does_not_name_are_a_note(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path, shards=2)
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"].pop("lm_head.weight")
    (folder / INDEX).write_text(json.dumps(index))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.notes == (f"`{INDEX}` does not name 1 tensors of `{file}`",)
    assert checkpoint.has("lm_head.weight")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    file = tiny.write_model(tmp_path) / "model.safetensors"
    error = refusal(file)
    assert error.message == f"`{file}` is a file; a model is a folder"
    assert str(tmp_path) in str(error.hint)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "convert gguf-to-hf" in str(refusal(tmp_path / "m.gguf").hint)


@pytest.mark.parametrize("path", ["~no such user/model", "no/such/folder", "/no/such", "missing", "../missing", "a\0b", "org/na me", "-x/y"])
def test_what_is_neither_a_path_nor_an_id(path: str) -> None:
    assert refusal(path).message == f"`{path}` does not exist"


def test_an_absent_tensor_names_the_nearest(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_model(tmp_path, num_hidden_layers=1))
    for read in (checkpoint.tensor, checkpoint.info, checkpoint.linear, checkpoint.dense, checkpoint.tensors_of):
        with pytest.raises(CheckpointError) as caught:
            read("model.layers.0.mlp.up_projj")
        assert caught.value.message == f"`model.layers.0.mlp.up_projj` is not in `{tmp_path}`"
    with pytest.raises(CheckpointError) as caught:
        checkpoint.linear("layers.0.mlp.up_proj")
    assert caught.value.hint.startswith("did you mean `model.layers.0.mlp.up_proj`? if not, fetch the model again")
    assert not checkpoint.has("model.layers.0.mlp.up_projj.weight")


def test_an_absent_head_tells_of_tied_embeddings(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_model(tmp_path, tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"`lm_head` is not in") as caught:
        checkpoint.dense("lm_head")
    assert "`model.embed_tokens.weight`" in str(caught.value.hint)


def test_a_family_without_entry_still_gives_its_tensors(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path)
    change_json(folder / "config.json", architectures=["SomeModelForCausalLM"], model_type="some")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.dense("model.layers.0.mlp.up_proj").shape == (128, 64)
    with pytest.raises(UnsupportedModel, match="SomeModelForCausalLM"):
        checkpoint.linears()


# Other spellings


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def test_mixtral_under_the_names_that_transformers_has_in_memory(tmp_path: Path) -> None:
    usual = open_checkpoint(tiny.write_model(tmp_path / "usual", "MixtralForCausalLM"))
    folder = tiny.write_model(tmp_path / "other", "MixtralForCausalLM")
    names = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for old, new in names.items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        return tensors

    rewrite(folder, rename)
    other = open_checkpoint(folder)
    assert other.linears() == usual.linears()
    for name in usual.names():
        assert other.has(name)
        assert torch.equal(other.tensor(name), usual.tensor(name))
    for name in usual.linears():
        assert torch.equal(other.dense(name), usual.dense(name))
    w1 = "model.layers.0.block_sparse_moe.experts.1.w1"
    assert other.tensors_of(w1) == ["model.layers.0.mlp.experts.1.gate_proj.weight"]
    assert usual.tensors_of(w1) == [f"{w1}.weight"]


def test_phi3_in_parts(tmp_path: Path) -> None:
    whole = open_checkpoint(tiny.write_model(tmp_path / "whole", "Phi3ForCausalLM"))
    folder = tiny.write_model(tmp_path / "parts", "Phi3ForCausalLM")

    def split(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in [name for name in tensors if "qkv_proj" in name or "gate_up_proj" in name]:
            weight, parent = tensors.pop(name), name.rsplit(".", 2)[0]
            parts, sizes = ("q_proj", "k_proj", "v_proj"), (64, 32, 32)
            if "gate_up" in name:
                parts, sizes = ("gate_proj", "up_proj"), (128, 128)
            for part, piece in zip(parts, weight.split(sizes), strict=True):
                tensors[f"{parent}.{part}.weight"] = piece.contiguous()
        return tensors

    rewrite(folder, split)
    parts = open_checkpoint(folder)
    assert parts.linears() == whole.linears()
    for name in whole.linears():
        assert torch.equal(parts.dense(name), whole.dense(name))
    assert sorted(parts.tensors_of("model.layers.1.mlp.gate_up_proj")) == [
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    ]


# Quantized linears


def store(weight: Tensor, codec: GptqCodec) -> StoredTensor:
    """A weight `[out, in]` rounded to the nearest codes."""
    rows = weight.T.to(torch.float32).contiguous()
    layout = codec.layout(rows.shape[0])
    grids = [codec.fit(rows[start:stop], group.bits, None) for group, start, stop in layout.spans()]
    q = [grid.quantize(rows[start:stop]) for grid, (_, start, stop) in zip(grids, layout.spans(), strict=True)]
    codes = Codes(torch.cat(q), tuple(grids), layout, torch.arange(rows.shape[0]))
    return codec.encode(codes, None)


def quantize_folder(folder: Path, codec: GptqCodec, where: str | None = "config.json") -> dict[str, Tensor]:
    """All linears of a tiny Llama as GPTQ; the settings go to config.json, to another file, or nowhere.

    Returns what each linear now stands for, float16 `[out, in]`.
    """
    linears = open_checkpoint(folder).linears()
    meant = {}

    def quantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in linears:
            stored = store(tensors.pop(f"{name}.weight"), codec)
            meant[name] = stored.dequantize().T
            tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in stored.tensors().items()}
        return tensors

    rewrite(folder, quantize)
    if where == "config.json":
        change_json(folder / "config.json", quantization_config=codec.config())
    elif where is not None:
        (folder / where).write_text(json.dumps(codec.config()))
    return meant


@pytest.mark.parametrize("where", ["config.json", "quantize_config.json", None])
@pytest.mark.parametrize("codec", [GptqCodec(4, 32), GptqCodec(3, 64), GptqCodec(8, -1, checkpoint_format="gptq_v2")])
def test_gptq_settings_from_either_file_or_from_the_tensors(tmp_path: Path, codec: GptqCodec, where: str | None) -> None:
    folder = tiny.write_model(tmp_path)
    meant = quantize_folder(folder, codec, where)
    checkpoint = open_checkpoint(folder)
    assert bool(checkpoint.notes) == (where is None)
    for name, weight in meant.items():
        read = checkpoint.dense(name)
        assert read.dtype == torch.float16
        assert read.is_contiguous()
        assert torch.equal(read, weight)
        on_disk = [f"{name}.{suffix}" for suffix in ("g_idx", "qweight", "qzeros", "scales")]
        assert sorted(checkpoint.tensors_of(name)) == on_disk


def test_asymmetric_gptq_without_settings_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path)
    quantize_folder(folder, GptqCodec(4, 32, sym=False), None)
    with pytest.raises(FormatError, match="do not tell the settings: its zero points are asymmetric") as caught:
        open_checkpoint(folder).linear("model.layers.0.mlp.up_proj")
    assert "quantize_config.json" in str(caught.value.hint)


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path)
    quantize_folder(folder, GptqCodec(4, 32))
    (folder / "quantize_config.json").write_text(json.dumps(GptqCodec(3, 32).config()))
    assert refusal(folder).message.startswith(f"`bits` of the quantization is 4 in `{folder / 'config.json'}`, 3 in ")


def test_a_rule_that_says_dense_for_what_is_quantized(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path)
    quantize_folder(folder, GptqCodec(4, 32))
    config = GptqCodec(4, 32).config(dynamic={r"-:.*up_proj": {}})
    change_json(folder / "config.json", quantization_config=config)
    with pytest.raises(FormatError, match=r"`model\.layers\.0\.mlp\.up_proj` is stored as GPTQ, but a rule of `dynamic`"):
        open_checkpoint(folder).dense("model.layers.0.mlp.up_proj")
    assert open_checkpoint(folder).dense("model.layers.0.mlp.down_proj").shape == (64, 128)


def test_another_method_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path)
    quantize_folder(folder, GptqCodec(4, 32))
    change_json(folder / "config.json", quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32})
    with pytest.raises(FormatError, match="expected `quant_method` `gptq`, found `awq`"):
        open_checkpoint(folder).linear("model.layers.0.mlp.up_proj")


def test_a_layout_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path)
    name = "model.layers.0.mlp.up_proj"
    rewrite(folder, lambda tensors: {key.replace(f"{name}.weight", f"{name}.weight_packed"): t for key, t in tensors.items()})
    change_json(folder / "config.json", quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(FormatError, match=r"is stored as compressed-tensors \(weight_packed\), which cannot be read"):
        open_checkpoint(folder).linear(name)


def exl2_tensors(outputs: int, inputs: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes in EXL2 form, padded to a multiple of 32 outputs, and the float16 weight `[out, in]` they stand for."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (inputs, outputs), generator=generator, dtype=torch.uint8)
    scale_codes = torch.randint(0, 16, (outputs,), generator=generator, dtype=torch.uint8)
    stored = {"q_scale": scale_codes, "q_scale_max": torch.tensor(0.5, dtype=torch.float16)}
    grid = Grid(torch.zeros(outputs), torch.full((outputs,), 8, dtype=torch.int32), 15, stored)
    encoded = exl2.encode(Codes(q, (grid,), Layout((Group(4, inputs),)), torch.randperm(inputs, generator=generator)))
    return encoded.tensors(), encoded.dequantize().T


def open_with_exl2(folder: Path, stored: dict[str, dict[str, Tensor]], dropped: tuple[str, ...]) -> Checkpoint:
    """A tiny model as ExLlamaV2 leaves it: some linears replaced, `output.safetensors`, the index of the source."""

    def replace(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in dropped}
        return kept | {f"{name}.{suffix}": t.contiguous() for name, by in stored.items() for suffix, t in by.items()}

    rewrite(folder, replace)
    (folder / "model.safetensors").rename(folder / "output.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    return open_checkpoint(folder)


def test_an_exl2_head_loses_its_padding(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path, vocab_size=300)
    tensors, weight = exl2_tensors(300, 64, seed=0)
    assert tensors["q_weight"].shape[1] == 320
    checkpoint = open_with_exl2(folder, {"lm_head": tensors}, ("lm_head",))
    assert checkpoint.notes == (f"`{INDEX}` names no file of this folder and is left aside",)
    assert torch.equal(checkpoint.dense("lm_head"), weight)
    assert checkpoint.dense("lm_head").shape == (300, 64)
    assert checkpoint.linear("lm_head").out_features == 300


def test_an_exl2_model_with_its_fused_linears_in_parts(tmp_path: Path) -> None:
    """Each part has padding of its own: the true widths are those of the config."""
    folder = tiny.write_model(tmp_path, "Phi3ForCausalLM", intermediate_size=80, num_hidden_layers=1)
    parent = "model.layers.0.mlp"
    gate, gate_weight = exl2_tensors(80, 64, seed=1)
    up, up_weight = exl2_tensors(80, 64, seed=2)
    stored = {f"{parent}.gate_proj": gate, f"{parent}.up_proj": up}
    checkpoint = open_with_exl2(folder, stored, (f"{parent}.gate_up_proj",))
    assert torch.equal(checkpoint.dense(f"{parent}.gate_up_proj"), torch.cat([gate_weight, up_weight]))


def test_exl2_of_another_width_than_the_config_says(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path, vocab_size=300)
    checkpoint = open_with_exl2(folder, {"lm_head": exl2_tensors(256, 64, seed=0)[0]}, ("lm_head",))
    with pytest.raises(FormatError, match=r"`lm_head\.q_weight`: expected 300 columns, padded to 32, found 256"):
        checkpoint.linear("lm_head")


def test_what_a_codec_objects_to_is_told_with_the_files_of_the_tensors(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path)
    quantize_folder(folder, GptqCodec(4, 32))
    name = "model.layers.0.mlp.up_proj"
    file = open_checkpoint(folder).info(f"{name}.scales").file
    save_file({**load_file(file), f"{name}.scales": torch.zeros(1, 1)}, file)
    with pytest.raises(FormatError) as caught:
        open_checkpoint(folder).linear(name)
    assert caught.value.message.startswith(f"`{file}`: `{name}.scales`: expected floats")
