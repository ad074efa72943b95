"""Adapters applied while the model runs: the same as merged ones, as PEFT's own, and only for who asked for them."""

import math

import pytest
import tiny
import torch
from tiny_lora import write_adapter

import quantkit
from quantkit.checkpoint.adapter import open_adapter
from quantkit.checkpoint.merged import merge
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.errors import CheckpointError, FormatError, UsageError
from quantkit.progress import Silent
from quantkit.runtime.adapters import AdapterSet
from quantkit.runtime.generator import Generator
from quantkit.runtime.load import load, load_model
from quantkit.runtime.request import Request
from quantkit.runtime.tokenizer import Tokenizer

IDS = torch.tensor([[5, 40, 17, 200, 33, 101, 6]])
BLOCK = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
MLP = {"gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128)}
EVERYWHERE = {
    f"model.layers.{layer}.{part}.{name}": shape
    for layer in range(2)
    for part, shapes in (("self_attn", BLOCK), ("mlp", MLP))
    for name, shape in shapes.items()
}


def ranked(modules, rank):
    return {name: (*shape, rank) for name, shape in modules.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Three, of other ranks, targets and scales."""
    path = tmp_path_factory.mktemp("adapters")
    write_adapter(path / "a", ranked(EVERYWHERE, 8), lora_alpha=1)
    write_adapter(path / "b", {"lm_head": (320, 64, 4), "model.layers.1.mlp.up_proj": (128, 64, 4)}, seed=1, r=4, lora_alpha=0.5)
    queries = {name: shape for name, shape in EVERYWHERE.items() if name.endswith("q_proj")}
    write_adapter(path / "c", ranked(queries, 16), seed=2, r=16, lora_alpha=0.5, use_rslora=True)
    return [(open_adapter(path / name), weight) for name, weight in (("a", 0.7), ("b", 1.0), ("c", -0.4))]


def applied(folder, adapters):
    model = load(folder)
    chosen = AdapterSet.of(adapters)
    chosen.check(model.config, model.architecture, folder)
    return chosen.applied(model)


@pytest.mark.parametrize("chosen", [[0], [1], [2], [0, 1, 2], [2, 0]], ids=str)
def test_on_the_fly_is_as_merged(chosen, folder, adapters):
    chosen = [adapters[index] for index in chosen]
    merged = load_model(open_checkpoint(folder), adapters=chosen)
    assert (applied(folder, chosen)(IDS) - merged(IDS)).abs().max() < 1e-5
    assert (merged(IDS) - load(folder)(IDS)).abs().max() > 0.01


@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM"])
def test_biases_fused_linears_and_experts(family, tmp_path):
    """An adapter of every linear that can be quantized; experts see their own tokens only."""
    folder = tiny.write_model(tmp_path / "model", family)
    checkpoint = open_checkpoint(folder)
    specs = [spec for spec in checkpoint.architecture.linears(checkpoint.model_config) if spec.quantizable]
    write_adapter(tmp_path / "a", {spec.name: (spec.out_features, spec.in_features, 8) for spec in specs}, lora_alpha=1)
    chosen = [(open_adapter(tmp_path / "a"), 0.5)]
    merged = load_model(checkpoint, adapters=chosen)
    assert (applied(folder, chosen)(IDS) - merged(IDS)).abs().max() < 2e-5
    assert len(applied(folder, chosen).linears) == len(specs)


def test_weights_are_shared_and_the_model_stays_as_it_is(folder, adapters):
    model = load(folder)
    before = model(IDS)
    other = AdapterSet.of(adapters).applied(model)
    assert not torch.equal(other(IDS), before) and torch.equal(model(IDS), before)
    for name, linear in model.linears.items():
        assert other.linears[name].stored is linear.stored
    assert AdapterSet().applied(model) is model


def test_a_quantized_model_with_adapters(folder, adapters, tmp_path):
    """The same as adding to its dequantized weights, which cannot be merged into codes."""
    quantkit.quantize(folder, tmp_path / "gptq", group_size=32, effort="nearest", evaluate=False, progress=Silent())
    quantkit.convert("gptq-to-hf", tmp_path / "gptq", tmp_path / "dense", progress=Silent())
    plain, dense = load(tmp_path / "gptq")(IDS), load(tmp_path / "dense")(IDS)
    found = applied(tmp_path / "gptq", adapters)(IDS)
    expected = load_model(open_checkpoint(tmp_path / "dense"), adapters=adapters)(IDS)
    rounding = (plain - dense).abs().max()  # what the kernels round without adapters
    assert (found - expected).abs().max() < 3 * rounding + 1e-5 < (found - plain).abs().max() / 10
    with pytest.raises(FormatError, match="is quantized") as caught:
        merge(open_checkpoint(tmp_path / "gptq"), adapters)
    assert "on the fly" in caught.value.hint


def test_each_request_has_its_own(folder, adapters):
    generator = Generator(load(folder), Tokenizer.open(folder))
    first, second = AdapterSet.of(adapters[:1]), AdapterSet.of(adapters[1:])
    prompt = IDS[0].tolist()

    def run(adapters):
        return generator.run(Request(prompt, 10, adapters=adapters)).token_ids

    plain = run(AdapterSet())
    answers = [plain, run(first), run(second)]
    assert len(set(answers)) == 3
    assert [run(AdapterSet()), run(first), run(second)] == answers
    assert generator.adapted(first) is generator.adapted(AdapterSet.of(adapters[:1]))


def test_keys_tell_contents_and_weights_apart(adapters, tmp_path):
    (a, _), (b, _) = adapters[:2]
    keys = [AdapterSet.of(parts).key for parts in ([(a, 1.0)], [(a, 0.5)], [(b, 1.0)], [(a, 1.0), (b, 1.0)], [])]
    assert len(set(keys)) == 5 and keys[-1] == ""
    write_adapter(tmp_path / "a", ranked(EVERYWHERE, 8), lora_alpha=1)
    assert AdapterSet.of([(open_adapter(tmp_path / "a"), 1.0)]).key == keys[0], "the same bytes elsewhere"
    write_adapter(tmp_path / "other", ranked(EVERYWHERE, 8), lora_alpha=32)
    assert AdapterSet.of([(open_adapter(tmp_path / "other"), 1.0)]).key != keys[0]


@pytest.mark.parametrize(
    ("modules", "config", "message"),
    [
        ({"model.layers.0.self_attn.q_proj": (64, 32, 8)}, {}, r"adapts `model.layers.0.self_attn.q_proj.weight` as \[64, 32\]"),
        ({"model.layers.7.self_attn.q_proj": (64, 64, 8)}, {}, "adapts `model.layers.7.self_attn.q_proj.weight`, which is not in"),
        ({"model.layers.0.self_attn.q_proj": (64, 64, 8)}, {"r": 4}, r"q_proj.lora_A.weight` in `.*` has rank 8, its config says 4"),
    ],
)
def test_wrong_ranks_shapes_and_targets_are_named(modules, config, message, folder, tmp_path):
    write_adapter(tmp_path / "a", modules, **config)
    with pytest.raises(CheckpointError, match=message):
        applied(folder, [(open_adapter(tmp_path / "a"), 1.0)])


def test_what_can_only_be_merged_says_so(folder, tmp_path):
    norm = torch.full((64,), 2.0)
    write_adapter(tmp_path / "a", ranked(EVERYWHERE, 8), extra={"base_model.model.model.norm.weight": norm})
    adapter = open_adapter(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"replaces `model.norm.weight`, which cannot be done") as caught:
        applied(folder, [(adapter, 1.0)])
    assert "--merge-lora" in caught.value.hint
    merged = load_model(open_checkpoint(folder), adapters=[(adapter, 1.0)])
    assert torch.equal(merged.head.norm.weight, norm)
    with pytest.raises(UsageError, match=r"has no weight of 0\.5"):
        merge(open_checkpoint(folder), [(adapter, 0.5)])


def test_an_embedding_that_is_the_head_as_well(tmp_path):
    folder = tiny.write_model(tmp_path / "model", tie_word_embeddings=True)
    extra = {f"base_model.model.model.embed_tokens.lora_embedding_{part}": torch.ones(shape) for part, shape in (("A", (8, 320)), ("B", (64, 8)))}
    write_adapter(tmp_path / "a", {}, extra=extra)
    with pytest.raises(CheckpointError, match="which is the head of"):
        merge(open_checkpoint(folder), [(open_adapter(tmp_path / "a"), 1.0)])


# What PEFT makes of the same folders.


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft")


def write_by_peft(peft, model, path, seed, **config):
    """Random in both matrices, saved by PEFT itself."""
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = 0.03 * torch.randn(parameter.shape, generator=generator)
    wrapped.save_pretrained(path, save_embedding_layers=False)
    return wrapped.unload()


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_logits_are_those_of_peft(family, peft, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tiny.write_model(tmp_path / "model", family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {
        "a": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        "b": {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "up_proj"], "use_rslora": True},
        "c": {
            "r": 2,
            "lora_alpha": 2,
            "target_modules": ["o_proj", "gate_proj", "lm_head"],
            "rank_pattern": {"layers.1.mlp.gate_proj": 6},
            "alpha_pattern": {"o_proj": 5},
        },
    }
    for seed, (name, config) in enumerate(settings.items()):
        model = write_by_peft(peft, model, tmp_path / name, seed, **config)
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "a", adapter_name="a")
    for name in "bc":
        wrapped.load_adapter(tmp_path / name, adapter_name=name)
    opened = {name: open_adapter(tmp_path / name) for name in settings}
    with torch.no_grad():
        for name, adapter in opened.items():
            wrapped.set_adapter(name)
            assert (applied(folder, [(adapter, 1.0)])(IDS) - wrapped(IDS).logits).abs().max() < 1e-5, name
        wrapped.base_model.set_adapter(["a", "b", "c"])
        three = wrapped(IDS).logits
        found = applied(folder, [(adapter, 1.0) for adapter in opened.values()])(IDS)
        assert (found - three).abs().max() < 1e-5
        weights = {"a": 0.5, "b": -1.5, "c": 2.0}
        for name, weight in weights.items():
            for module in wrapped.modules():
                if hasattr(module, "set_scale") and name in getattr(module, "scaling", {}):
                    module.set_scale(name, weight)
        found = applied(folder, [(adapter, weights[name]) for name, adapter in opened.items()])(IDS)
        assert (found - wrapped(IDS).logits).abs().max() < 1e-5
        assert not math.isclose(float((found - three).abs().max()), 0.0)
