"""A tiny Llama on the disk, loaded, and its tokenizer, once for each module that asks for them."""

import pytest
import tiny

from quantkit.runtime.load import load
from quantkit.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.open(folder)
