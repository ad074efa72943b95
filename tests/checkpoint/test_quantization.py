"""Quantization settings from either of their places, or from both where they agree."""

import json
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.quantization import read_quantization
from quantkit.errors import CheckpointError

SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"}


def put(folder: Path, content: dict[str, Any], name: str = "quantize_config.json") -> None:
    (folder / name).write_text(json.dumps(content))


def test_neither_place(tmp_path: Path) -> None:
    assert read_quantization(tmp_path, {}) is None
    assert read_quantization(tmp_path, {"quantization_config": None}) is None


def test_config_alone(tmp_path: Path) -> None:
    assert read_quantization(tmp_path, {"quantization_config": SETTINGS}) == SETTINGS


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "quantization_config.json"])
def test_the_quantizers_own_file_alone(tmp_path: Path, name: str) -> None:
    put(tmp_path, SETTINGS, name)
    assert read_quantization(tmp_path, {}) == SETTINGS


def test_each_says_what_the_other_leaves_out(tmp_path: Path) -> None:
    put(tmp_path, {"bits": 4, "group_size": 128, "format": "gptq_v2", "true_sequential": True, "sym": None})
    said = {"quant_method": "gptq", "bits": 4, "desc_act": False}
    assert read_quantization(tmp_path, {"quantization_config": said}) == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "format": "gptq_v2",
        "true_sequential": True,
    }


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("bits", 3),
        ("group_size", 64),
        ("quant_method", "awq"),
        ("sym", False),
        ("desc_act", True),
        ("dynamic", {"x": {"bits": 8}}),
        ("pack_dtype", "int16"),
    ],
)
def test_a_contradiction_names_the_key_both_values_and_both_files(tmp_path: Path, key: str, other: Any) -> None:
    full = {**SETTINGS, "sym": True, "desc_act": False, "dynamic": {}, "pack_dtype": "int32"}
    put(tmp_path, {**full, key: other})
    with pytest.raises(CheckpointError) as caught:
        read_quantization(tmp_path, {"quantization_config": full})
    words = f"{full[key]!r} in `{tmp_path / 'config.json'}`, {other!r} in `{tmp_path / 'quantize_config.json'}`"
    assert caught.value.message == f"`{key}` of the quantization is {words}"
    assert caught.value.hint


def test_two_names_of_one_setting_are_compared(tmp_path: Path) -> None:
    put(tmp_path, {"bits": 4, "format": "gptq"})
    with pytest.raises(CheckpointError, match="`checkpoint_format` of the quantization is 'gptq_v2' in "):
        read_quantization(tmp_path, {"quantization_config": SETTINGS})


def test_facts_of_the_run_may_differ(tmp_path: Path) -> None:
    put(tmp_path, {**SETTINGS, "damp_percent": 0.1, "meta": {"uri": "a"}})
    said = {**SETTINGS, "damp_percent": 0.01, "meta": {"uri": "b"}}
    assert read_quantization(tmp_path, {"quantization_config": said}) == said


def test_settings_that_are_no_object(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no object but `'gptq'`"):
        read_quantization(tmp_path, {"quantization_config": "gptq"})
