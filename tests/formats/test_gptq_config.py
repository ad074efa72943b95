"""What `quantization_config` of GPTQ checkpoints says, and what in it is refused."""

import json

import pytest

from quantkit.errors import FormatError
from quantkit.formats import gptq_config
from quantkit.formats.gptq import GptqCodec
from quantkit.formats.gptq_config import GptqConfig, GptqSettings

PLAIN = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def _base(**changes) -> GptqSettings:
    return GptqConfig.read({**PLAIN, **changes}).base


def test_plain_config() -> None:
    assert GptqConfig.read(PLAIN) == GptqConfig(GptqSettings(4, 128, True, False, "gptq"))


def test_missing_keys_take_the_defaults_of_other_readers() -> None:
    for keys in ({"method": "gptq", "bits": 8}, {"bits": 8}):
        assert GptqConfig.read(keys).base == GptqSettings(8, 128, True, False, "gptq")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "gptq"),
        ({"checkpoint_format": "gptq_v2"}, "gptq_v2"),
        ({"format": "gptq_v2"}, "gptq_v2"),
        ({"checkpoint_format": "gptq_v2", "format": "gptq"}, "gptq_v2"),
        ({"checkpoint_format": None}, "gptq"),
    ],
)
def test_both_names_of_the_checkpoint_format(keys: dict, expected: str) -> None:
    assert _base(**keys).checkpoint_format == expected


def test_unknown_keys_are_ignored() -> None:
    extra = {"autoround_version": "0.16.1", "iters": 6, "provider": "auto-round", "awq_gemm_checkpoint": False, "pack_dtype": "int32"}
    assert GptqConfig.read({**PLAIN, **extra}) == GptqConfig.read(PLAIN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "awq"}, "expected `quant_method` `gptq`, found `awq` in `quantization_config`"),
        ({"checkpoint_format": "gptq_p"}, "checkpoint format `gptq_p` \\(planar codes\\) cannot be read"),
        ({"checkpoint_format": "gptq_p", "bits": 5}, "checkpoint format `gptq_p`"),
        ({"format": "marlin"}, "checkpoint format `marlin` \\(Marlin tiles\\) cannot be read"),
        ({"checkpoint_format": "bitblas"}, "checkpoint format `bitblas` \\(BitBLAS tiles\\) cannot be read"),
        ({"checkpoint_format": "gptq_v3"}, "expected `checkpoint_format` `gptq` or `gptq_v2`, found `gptq_v3`"),
        ({"is_marlin_format": True}, "weights in Marlin tiles cannot be read \\(`is_marlin_format`"),
        ({"pack_dtype": "int16"}, "expected `pack_dtype` `int32`, found `int16`"),
        *(({"bits": bits}, f"expected `bits` 2, 3, 4 or 8, found `{bits}`") for bits in (5, 6, 7, "4", True)),
        ({"bits": None}, "expected `bits` 2, 3, 4 or 8, found nothing"),
        ({"group_size": 0}, "expected `group_size` -1 or above 0, found `0`"),
        ({"group_size": "128"}, "expected `group_size` -1 or above 0, found `128`"),
        ({"sym": "yes"}, "expected true or false for `sym`, found `yes`"),
        ({"dynamic": ["x"]}, "expected an object for `dynamic`"),
        ({"dynamic": {"(": {}}}, "`dynamic` pattern `\\(` in `quantization_config` cannot be used: it is no regular expression"),
        ({"dynamic": {"x": 4}}, "expected an object for `dynamic` rule `x`, found `4`"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        GptqConfig.read({**PLAIN, **changes})
    assert caught.value.hint


def test_harmless_marlin_key_is_accepted() -> None:
    assert _base(is_marlin_format=False) == _base()


# --- dynamic rules


RULES = {
    "-:model\\.layers\\.0\\.self_attn\\.v_proj$": {},
    "+:.*\\.mlp\\.down_proj$": {"bits": 8, "group_size": 32},
    "model\\.layers\\.1\\.self_attn\\..*": {"bits": 3, "group_size": 32, "sym": False, "mse": 2.4},
    "lm_head": {"bits": 8, "desc_act": True},
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.v_proj", None),
        ("model.layers.0.self_attn.q_proj", GptqSettings(4, 128)),
        ("model.layers.1.mlp.down_proj", GptqSettings(8, 32)),
        ("model.layers.1.self_attn.v_proj", GptqSettings(3, 32, sym=False)),
        ("model.layers.11.self_attn.v_proj", GptqSettings(4, 128)),
        ("lm_head", GptqSettings(8, 128, act_order=True)),
        ("model.lm_head", GptqSettings(4, 128)),  # patterns match at the start of the name
    ],
)
def test_rules(name: str, expected: GptqSettings | None) -> None:
    config = GptqConfig.read({**PLAIN, "lm_head": True, "dynamic": RULES})
    assert config.lm_head
    assert config.for_module(name) == expected


def test_the_first_matching_rule_decides() -> None:
    config = GptqConfig.read({**PLAIN, "dynamic": {".*q_proj": {"bits": 8}, "-:.*proj": {}}})
    assert config.for_module("a.q_proj") == GptqSettings(8, 128)
    assert config.for_module("a.k_proj") is None


def test_a_rule_with_bits_that_no_file_holds_is_named() -> None:
    config = GptqConfig.read({**PLAIN, "dynamic": {"x": {"bits": 5}}}, "m/config.json")
    with pytest.raises(FormatError, match=r"found `5` in `m/config\.json: dynamic rule x`"):
        config.for_module("x")


# --- the writer of a file, where it changes the meaning of its words


@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        (["gptqmodel:6.0.3"], True),
        (["gptqmodel:7.7.0"], False),
        ("gptqmodel:4.2.5", True),
        (["quantkit:0.1.0"], False),
        (["other:1.0", "gptqmodel:5.1"], True),
        (None, False),
    ],
)
def test_old_gptqmodel_is_recognised(quantizer: object, expected: bool) -> None:
    assert _base(meta={"quantizer": quantizer}).packed_borrow is expected


# --- writing


def test_written_config_reads_back() -> None:
    for codec in (GptqCodec(4, 64), GptqCodec(3, -1, sym=False, act_order=True), GptqCodec(8, 32, checkpoint_format="gptq_v2")):
        written = json.loads(json.dumps(codec.config(dynamic=RULES)))
        assert GptqConfig.read(written).base == codec.settings


def test_written_config_has_what_each_reader_requires() -> None:
    config = GptqCodec(4, 128).config(damping=0.02, quantized_names=[["self_attn.q_proj"], ["mlp.down_proj"]])
    assert config["meta"]["quantizer"][0].startswith("quantkit:")
    del config["meta"]
    assert config == {
        "quant_method": "gptq",
        "method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
        "format": "gptq",
        "pack_dtype": "int32",
        "lm_head": False,
        "true_sequential": True,
        "static_groups": False,
        "damp_percent": 0.02,
        "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]],
    }


def test_negative_rules_are_written_first_and_no_rules_not_at_all() -> None:
    config = gptq_config.write(GptqSettings(4, 128), dynamic={"a": {"bits": 8}, "-:b": {}, "c": {"bits": 2}})
    assert list(config["dynamic"]) == ["-:b", "a", "c"]
    assert "dynamic" not in gptq_config.write(GptqSettings(4, 128))
