"""Rules by pattern: what is written, what readers are told, and which patterns are mistakes."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

import quantkit
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.quantization.report import QuantizeReport
from quantkit.commands.quantization.rules import as_dynamic, deciding, read_rules, require_used
from quantkit.commands.quantize import run
from quantkit.errors import FormatError, UsageError
from quantkit.formats.gptq_config import GptqConfig
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings

IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(7))
LLAMA = [
    f"model.layers.{layer}.{part}"
    for layer in range(2)
    for part in (
        *(f"self_attn.{role}_proj" for role in "qkvo"),
        *(f"mlp.{role}_proj" for role in ("gate", "up", "down")),
    )
]


def quantize(model: Path, out: Path, **options) -> QuantizeReport:
    settings = {"group_size": 32, "effort": "fast", "samples": 4, "length": 32, "evaluate": False, **options}
    return run(QuantizeSettings(str(model), out, **settings), Silent())


def config_of(folder: Path) -> dict:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config == json.loads((folder / "quantize_config.json").read_text())
    return config


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("source") / "model", hidden_size=128, intermediate_size=256)


def test_each_linear_gets_what_its_first_rule_says(model: Path, tmp_path: Path) -> None:
    report = quantize(
        model,
        tmp_path / "out",
        rule=(".*layers.0.*down_proj:bits=8,group_size=64", r".*down_proj:bits=3", ".*q_proj:sym=false,desc_act=true"),
        skip=(r"model\.layers\.\d+\.self_attn\.o_proj$",),
    )
    checkpoint = open_checkpoint(tmp_path / "out")
    config = GptqConfig.read(config_of(tmp_path / "out"))
    expected = {"down_proj": (3, 32, True, False), "q_proj": (4, 32, False, True)}
    for name in checkpoint.linears():
        suffixes = {tensor.rpartition(".")[2] for tensor in checkpoint.tensors_of(name)}
        found = config.for_module(name)
        if name.endswith("o_proj"):
            assert found is None and suffixes == {"weight"}
            continue
        wanted = expected.get(name.rpartition(".")[2], (4, 32, True, False))
        wanted = (8, 64, True, False) if name == "model.layers.0.mlp.down_proj" else wanted
        assert found is not None and "qweight" in suffixes
        assert (found.bits, found.group_size, found.sym, found.act_order) == wanted
    assert {linear.name: linear.bits for linear in report.linears}["model.layers.1.mlp.down_proj"] == 3
    assert (
        "`self_attn.o_proj` (2×) stays dense: `--skip 'model\\.layers\\.\\d+\\.self_attn\\.o_proj$'`"
        in report.remarks()
    )
    sizes = sum(
        tensor.numel() * tensor.itemsize for name in checkpoint.linears() for tensor in tensors(checkpoint, name)
    )
    assert report.plan.stored_bits == 8 * sizes
    assert quantkit.load(tmp_path / "out")(IDS).isfinite().all()


def tensors(checkpoint, name: str) -> list[torch.Tensor]:
    return [checkpoint.tensor(tensor) for tensor in checkpoint.tensors_of(name)]


def test_dynamic_has_negative_rules_first_and_only_what_was_said(model: Path, tmp_path: Path) -> None:
    rules = (".*up_proj:bits=8", ".*gate_proj:act_order=true")
    report = quantize(model, tmp_path / "out", rule=rules, skip=".*v_proj")
    config = config_of(tmp_path / "out")
    assert list(config["dynamic"].items()) == [
        ("-:.*v_proj", {}),
        ("+:.*up_proj", {"bits": 8}),
        ("+:.*gate_proj", {"desc_act": True}),
    ]
    assert config["checkpoint_format"] == "gptq"
    said = report.as_json()
    assert (said["rule"], said["skip"]) == ([".*up_proj:bits=8", ".*gate_proj:act_order=true"], [".*v_proj"])
    assert config["modules_in_block_to_quantize"] == [
        [f"self_attn.{role}_proj" for role in "qko"] + [f"mlp.{role}_proj" for role in ("gate", "up", "down")]
    ]


def test_transformers_is_told_nothing_that_is_not_so(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "one block", skip=(r".*layers\.0.*v_proj",))
    assert "modules_in_block_to_quantize" not in config_of(tmp_path / "one block")
    quantize(model, tmp_path / "all")
    assert {"dynamic", "modules_in_block_to_quantize"}.isdisjoint(config_of(tmp_path / "all"))


def test_one_asymmetric_linear_makes_all_zero_points_v2(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out", rule=(".*v_proj:sym=false",))
    config = config_of(tmp_path / "out")
    assert (config["sym"], config["checkpoint_format"]) == (True, "gptq_v2")
    assert quantkit.load(tmp_path / "out")(IDS).isfinite().all()


def test_rules_speak_of_names_on_disk(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", "MixtralForCausalLM")
    quantize(source, tmp_path / "out", rule=(r".*experts\.1\.w2:bits=8",), skip=(r".*experts\.\d+\.w1",))
    config = config_of(tmp_path / "out")
    assert "modules_in_block_to_quantize" not in config
    checkpoint = open_checkpoint(tmp_path / "out")
    widths = {name: checkpoint.linear(name).bits_per_weight for name in checkpoint.linears() if ".layers.0." in name}
    eight = [name for name, bits in widths.items() if 8 < bits < 12]
    assert eight == ["model.layers.0.block_sparse_moe.experts.1.w2"]
    assert quantkit.load(tmp_path / "out")(IDS).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (
            {"rule": ["down_proj:bits=8"]},
            "matches none of 14 linears, only the middle of `model.layers.0.mlp",
            ".*down_proj",
        ),
        ({"rule": [".*mlp.downproj:bits=8"]}, "matches none of 14 linears", "`model.layers.0.mlp.down_proj`"),
        ({"rule": [".*self_attn.qproj:bits=8"]}, "matches none", "self_attn.q_proj`"),
        ({"skip": ["nothing"]}, "`--skip 'nothing'` matches none", "did you mean `model.layers.0."),
        ({"skip": ["lm_head"]}, "`--skip 'lm_head'` matches none", "did you mean"),
        ({"rule": [".*:bits=8", ".*q_proj:bits=3"]}, "takes all 2 linears that it matches", "narrower one first"),
        ({"skip": [".*q_proj"], "rule": [".*q_proj:bits=3"]}, "takes all 2 linears", "comes before rules"),
        ({"rule": [".*q_proj"]}, "does not say what to change", "--rule"),
        ({"rule": [".*q_proj:bits"]}, "does not say what to change", "--rule"),
        ({"rule": [".*q_proj:width=3"]}, "changes `width`", "bits, group_size, sym, act_order"),
        ({"rule": [".*q_proj:bits=3,bits=4"]}, "says `bits` twice", "once"),
        ({"rule": [".*q_proj:bits=three"]}, "expected a whole number for `bits`, found `three`", "--rule"),
        ({"rule": [".*q_proj:sym=1"]}, "expected true or false for `sym`, found `1`", "--rule"),
        ({"rule": [":bits=3"]}, "has no pattern", ".*"),
        ({"skip": ["(q_proj"]}, "`(q_proj` is no regular expression", "bracket"),
    ],
)
def test_mistakes_are_named_with_what_may_have_been_meant(
    options: dict, message: str, hint: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        quantize(model, tmp_path / "out", **options)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["bits=5", "group_size=0", "bits=6,group_size=64"])
def test_a_rule_for_what_no_file_holds(change: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"`--rule '\.\*q_proj:"):
        quantize(model, tmp_path / "out", rule=(f".*q_proj:{change}",))
    assert list(tmp_path.iterdir()) == []


def test_skipping_everything_is_an_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no linear that can be quantized: `--skip '\.\*'`"):
        quantize(model, tmp_path / "out", skip=(".*",))


PATTERNS = st.sampled_from(
    [r".*q_proj", r".*layers\.1\.", r"model\.layers\.\d+\.mlp", r".*(k|v)_proj", r".*", r".*down"]
)


@given(
    rules=st.lists(st.tuples(PATTERNS, st.sampled_from([2, 3, 8])), max_size=4), skips=st.lists(PATTERNS, max_size=2)
)
def test_a_reader_of_dynamic_decides_as_the_plan_did(rules: list[tuple[str, int]], skips: list[str]) -> None:
    read = read_rules([f"{pattern}:bits={bits}" for pattern, bits in rules], skips)
    try:
        require_used(read, LLAMA)
    except UsageError:
        return
    config = GptqConfig.read({"quant_method": "gptq", "bits": 4, "dynamic": as_dynamic(read)})
    for name in LLAMA:
        rule, found = deciding(read, name), config.for_module(name)
        assert (found is None) == (rule is not None and rule.changes is None)
        assert found is None or found.bits == (rule.changes["bits"] if rule and rule.changes else 4)
