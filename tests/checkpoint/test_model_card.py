"""The licence of a GGUF file reaches the folder made of it."""

from pathlib import Path

import pytest

from quantkit.checkpoint import model_card
from quantkit.checkpoint.gguf_header import Metadata


def card(**values) -> str:
    return model_card.from_gguf(Metadata({f"general.{key.replace('_', '.')}": value for key, value in values.items()}, Path("x")), "x.gguf")


def test_a_card_worked_by_hand() -> None:
    assert card(name="Tiny", license="apache-2.0", languages=["en", "de"], organization="Someone") == (
        '---\nlicense: "apache-2.0"\nlanguage: ["en", "de"]\n---\n\n'
        "# Tiny\n\nWeights of `x.gguf`, dequantized to float16.\n\n- Organization: Someone\n"
    )


def test_without_metadata_it_says_where_the_weights_are_from() -> None:
    assert card() == "# x.gguf\n\nWeights of `x.gguf`, dequantized to float16.\n"


def test_no_value_leaves_its_line() -> None:
    yaml = pytest.importorskip("yaml")
    hostile = 'a"b: c\n---\n- d #'
    text = card(license=hostile, license_name=hostile, name=hostile, author=hostile)
    front = yaml.safe_load(text.split("\n---\n")[0])
    assert front == {"license": hostile, "license_name": hostile}
    assert text.splitlines().count("---") == 2
