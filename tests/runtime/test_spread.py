"""Layers on several devices, without several GPUs: `cpu` beside `meta`, where tensors have no numbers but may not be
mixed with others, shows that states move; `cpu` twice that results stay."""

import pytest
import tiny
import torch

import quantkit
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.errors import BackendError, RequestError, UsageError
from quantkit.models.transformer import Model
from quantkit.runtime import load as load_module
from quantkit.runtime import spread
from quantkit.runtime.cache import CacheView
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.load import load, load_model
from quantkit.runtime.page_store import PageStore
from quantkit.runtime.placement import Placement
from quantkit.runtime.ranks import Ranks
from quantkit.runtime.share_source import weight_bytes
from quantkit.runtime.spread import Room, devices_of, place_layers, weight_bytes_by_layer

IDS = torch.tensor([[5, 40, 17, 200, 33, 8]])


@pytest.mark.parametrize(
    ("rooms", "places"),
    [
        ([50], "aaaa"),
        ([49, 20], "aaab"),
        ([30, 20], "aabb"),
        ([10, 40], "bbbb"),
        ([30, 9, 20], "aacc"),
        ([20, 10, 10, 10], "abcd"),
        ([29, 19, 20], "abcc"),
    ],
)
def test_the_first_device_is_filled_first(rooms, places):
    """Ten bytes of embedding and head, four layers of ten."""
    found = place_layers([10] * 4, 10, [Room(name, free) for name, free in zip("abcd", rooms, strict=False)])
    assert "".join(found) == places


def test_layers_of_different_sizes_stay_in_order():
    assert place_layers([5, 20, 5, 5], 0, [Room("a", 12), Room("b", 26), Room("c", 9)]) == ("a", "b", "b", "c")


@pytest.mark.parametrize(("rooms", "placed"), [([49], 3), ([30, 19], 3), ([9, 1000], 0), ([-5, 1000], 0)])
def test_what_does_not_fit_is_refused_with_the_numbers(rooms, placed):
    gib = 2**30
    given = [Room(f"cuda:{index}", free * gib) for index, free in enumerate(rooms)]
    message = rf"\(10\.00 GiB\) and 4 layers .*\(40\.00 GiB, .*{rooms[0]}\.00 GiB on `cuda:0`.*: {placed} layers do"
    with pytest.raises(RequestError, match=message) as caught:
        place_layers([10 * gib] * 4, 10 * gib, given)
    assert "name more devices" in caught.value.hint


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM"])
def test_bytes_are_those_that_the_loaded_model_has(family, tmp_path):
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "model", family))
    layers, ends = weight_bytes_by_layer(checkpoint, checkpoint.model_config.num_layers, torch.float32)
    found = weight_bytes(load_model(checkpoint, "cpu", "fp32"))
    assert len(set(layers)) == 1 and sum(layers) + ends == pytest.approx(found, rel=0.01)
    halves, _ = weight_bytes_by_layer(checkpoint, checkpoint.model_config.num_layers, torch.bfloat16)
    assert halves[0] == layers[0] / 2


def test_words_for_devices(monkeypatch):
    assert devices_of("cpu") == ("cpu",) and devices_of("cuda:1, cuda:0")[0] == "cuda:1"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices_of("cuda") == ("cuda:0", "cuda:1", "cuda:2") and devices_of("cuda:2") == ("cuda:2",)
    with pytest.raises(UsageError, match="several kinds"):
        devices_of("cpu,cuda:0")
    for absent in ("cuda:3", "cuda:x", "cuda:-1"):
        with pytest.raises(BackendError, match=f"no `{absent}`, 3 devices"):
            devices_of(f"cuda:0,{absent}")
    for twice in ("cuda:1,cuda:1", "cuda,cuda:0", "cuda,cuda"):
        with pytest.raises(UsageError, match="names a device twice"):
            devices_of(twice)
    assert Placement.choose("cpu,cpu").dtype == torch.float32


def test_several_processes_take_no_list_of_devices(tmp_path):
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "model"))
    with pytest.raises(UsageError, match="for a model that 2 processes share"):
        load_model(checkpoint, "cpu,cpu", ranks=Ranks(0, 2))


def split(monkeypatch, folder, layer_cache: int = 0) -> list[str]:
    """Memory for one layer on the first device; the devices that layers are then read to, in words."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.model_config
    layers, ends = weight_bytes_by_layer(checkpoint, config.num_layers, torch.float32)
    working = load_module.activation_bytes(config, 2048, 2048, 1, 4)
    frees = iter([working + ends + layers[0] + layer_cache, working + 10 * layers[0] + 10 * layer_cache])
    monkeypatch.setattr(load_module, "free_bytes", lambda device: next(frees))
    read = []
    places = place_layers

    def noted(*arguments):
        read.extend(places(*arguments))
        return tuple(read)

    monkeypatch.setattr(load_module, "place_layers", noted)
    return read


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("form", [None, "int8"])
def test_logits_are_those_of_one_device(family, form, tmp_path, monkeypatch):
    folder = tiny.write_model(tmp_path / "model", family)
    whole = load(folder)
    places = split(monkeypatch, folder)
    parted = load(folder, "cpu,cpu")
    assert places == ["cpu"] * whole.config.num_layers
    results = []
    for model in (whole, parted):
        pool = CachePlan(form).pool_of(model, [300])
        view = CacheView(pool, [CacheSequence(pool, 300)])
        results.append([model.forward(part, cache=view) for part in IDS.split(4, dim=1)])
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


def test_a_layer_goes_where_its_bytes_and_its_cache_fit(tmp_path, monkeypatch):
    folder = tiny.write_model(tmp_path / "model")
    monkeypatch.setattr(load_module, "devices_of", lambda device: ("cpu", "meta"))
    places = split(monkeypatch, folder, layer_cache=10**6)
    model = load_model(open_checkpoint(folder), "cpu", layer_cache=10**6)
    assert places == ["cpu", "meta"] == [device.type for device in model.devices]
    assert spread.told(model.devices) == "layers: 1 on `cpu`, 1 on `meta`" and spread.told(model.devices[:1]) is None
    assert model.embedding.weight.device.type == model.head.norm.weight.device.type == "cpu"


@pytest.mark.parametrize("form", [None, "int8", "k8v4"])
def test_states_and_pages_are_where_their_layer_is(form, tmp_path, monkeypatch):
    """Nothing mixes devices up to the very end, where states without numbers cannot come back."""
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "model", num_hidden_layers=4))
    places = ("cpu", "cpu", "meta", "meta")
    model = Model.load(checkpoint, checkpoint.model_config, checkpoint.architecture, torch.float32, "cpu", places)
    pool = CachePlan(form).pool_of(model, [300])
    stored = {}
    put = PageStore.put

    def noted(store, layer, position, keys, values):
        put(store, layer, position, keys, values)
        stored[layer] = (keys.codes.device.type, store.get(layer, 0, 1)[0].codes.device.type)

    monkeypatch.setattr(PageStore, "put", noted)
    view = CacheView(pool, [CacheSequence(pool, 300)])
    with pytest.raises(NotImplementedError, match="meta"):
        model.forward(IDS, cache=view)
    assert stored == {layer: (place, place) for layer, place in enumerate(places)}
    assert pool.use.cache_bytes == CachePlan(form).layer_bytes(model.config, 300, torch.float32) * 4


def test_generate_and_queue_run_on_parts(tmp_path, monkeypatch):
    folder = tiny.write_model(tmp_path / "model")
    options = {"max_new_tokens": 12, "ignore_eos": True}
    expected = quantkit.generate(folder, "the thing", device="cpu", **options).completion.token_ids
    frees = []
    monkeypatch.setattr(load_module, "free_bytes", lambda device: frees.append(device) or 2**32)
    assert quantkit.generate(folder, "the thing", device="cpu,cpu", **options).completion.token_ids == expected
    assert frees == ["cpu", "cpu"]
    (tmp_path / "f.jsonl").write_text('{"prompt": "the thing"}\n')
    report = quantkit.generate(folder, device="cpu,cpu", prompts_file=tmp_path / "f.jsonl", **options)
    assert report.answers[0][1].completion.token_ids == expected
    monkeypatch.setattr(load_module, "free_bytes", lambda device: 1000)
    with pytest.raises(RequestError, match="do not fit into"):
        quantkit.generate(folder, "the thing", device="cpu,cpu", **options)
    assert spread.LAYER.search("model.layers.12.mlp.up_proj.weight")[1] == "12"
