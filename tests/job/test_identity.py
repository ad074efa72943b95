"""A model is the same while its weights, its config and what goes along are."""

import os
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.fingerprint import fingerprint
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.job import identity
from quantkit.job.identity import digest_of_text, identify, remembered


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model")


def test_weights_and_files_are_told_apart(model: Path) -> None:
    before = identify(open_checkpoint(model))
    assert before.weights == fingerprint(open_checkpoint(model))
    (model / "tokenizer_config.json").write_text("{}")
    after = identify(open_checkpoint(model))
    assert after.weights == before.weights and after.files != before.files
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, model / "model.safetensors")
    assert identify(open_checkpoint(model)).weights != before.weights


def test_a_copy_is_the_same_model(model: Path, tmp_path: Path) -> None:
    copy = tiny.write_model(tmp_path / "copy")
    assert identify(open_checkpoint(model)).files == identify(open_checkpoint(copy)).files


def test_named_templates_belong_to_it(model: Path) -> None:
    before = identify(open_checkpoint(model)).files
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    assert identify(open_checkpoint(model)).files != before


def test_untouched_files_are_not_read_again(model: Path, monkeypatch) -> None:
    known = remembered(identify(open_checkpoint(model)))
    read = []
    monkeypatch.setattr(identity, "fingerprint", lambda *given: (read.append(1), fingerprint(*given))[1])
    assert identify(open_checkpoint(model), known).weights == known["weights"]
    assert read == []
    # Equal size and time of change, other content: the time of the file system's own entry tells.
    file = model / "model.safetensors"
    status, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identify(open_checkpoint(model), known).weights != known["weights"]
    assert read == [1]


def test_a_text_is_its_tokens_in_their_rows() -> None:
    rows = torch.arange(12).reshape(3, 4)
    assert digest_of_text(rows) == digest_of_text(rows.clone())
    assert len({digest_of_text(rows), digest_of_text(rows.reshape(4, 3)), digest_of_text(rows + 1)}) == 3
