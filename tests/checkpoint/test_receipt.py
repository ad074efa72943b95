"""What was written is what is read back, or the result does not appear."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.reader import open_checkpoint
from quantkit.checkpoint.receipt import Receipt
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.errors import GateError

NORM, LINEAR = "model.norm.weight", "model.layers.0.mlp.up_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model", dtype="float16")


@pytest.fixture
def receipt(folder: Path) -> Receipt:
    receipt = Receipt()
    for name, tensor in load_file(folder / "model.safetensors").items():
        receipt.add(name, tensor)
    receipt.add_weight(LINEAR, load_file(folder / "model.safetensors")[f"{LINEAR}.weight"].T.float())
    return receipt


def change(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def test_equal_files_pass(folder: Path, receipt: Receipt) -> None:
    receipt.check(open_checkpoint(folder))


def test_one_flipped_bit_is_found(folder: Path, receipt: Receipt) -> None:
    norm = load_file(folder / "model.safetensors")[NORM]
    norm.view(torch.int16)[3] ^= 1
    change(folder, **{NORM: norm})
    with pytest.raises(GateError, match=rf"tensor `{NORM}` in `model.safetensors` is not what was written"):
        receipt.check(open_checkpoint(folder))


def test_another_dtype_of_equal_bytes_is_found(folder: Path, receipt: Receipt) -> None:
    change(folder, **{NORM: load_file(folder / "model.safetensors")[NORM].view(torch.bfloat16)})
    with pytest.raises(GateError, match=NORM):
        receipt.check(open_checkpoint(folder))


def test_an_absent_tensor_and_a_foreign_one_are_found(folder: Path, receipt: Receipt) -> None:
    change(folder, extra=torch.zeros(1))
    with pytest.raises(GateError, match="`extra` was not written, yet it is in the result"):
        receipt.check(open_checkpoint(folder))
    receipt.add("extra", torch.zeros(1))
    receipt.add("more", torch.zeros(1))
    with pytest.raises(GateError, match="`more` is missing from the result"):
        receipt.check(open_checkpoint(folder))


def test_a_weight_that_decodes_otherwise_is_found(folder: Path, receipt: Receipt) -> None:
    weight = load_file(folder / "model.safetensors")[f"{LINEAR}.weight"].T.float()
    receipt.add_weight(LINEAR, torch.where(weight == weight.max(), weight * 1.01, weight))
    with pytest.raises(GateError, match=f"`{LINEAR}` does not decode to the weight that was solved"):
        receipt.check(open_checkpoint(folder))


def test_the_sign_of_a_zero_does_not_matter() -> None:
    positive, negative = Receipt(), Receipt()
    positive.add_weight("a", torch.tensor([[0.0]]))
    negative.add_weight("a", torch.tensor([[-0.0]]))
    assert positive._weights == negative._weights


def test_a_writer_asks_before_its_folder_appears(tmp_path: Path) -> None:
    seen = []

    def refuse(folder: Path) -> None:
        seen.extend(sorted(path.name for path in folder.iterdir()))
        raise GateError("no")

    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a", torch.zeros(2))
        with pytest.raises(GateError, match="no"):
            writer.finish({"key": 1}, check=refuse)
    assert seen == ["config.json", "model.safetensors"]
    assert list(tmp_path.iterdir()) == []


def test_receipts_tell_which_tensors_differ(receipt: Receipt, folder: Path) -> None:
    other = Receipt()
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name != f"{LINEAR}.weight":
            other.add(name, tensor + 1 if name == NORM else tensor)
    assert receipt.differing(receipt) == set()
    assert receipt.differing(other) == other.differing(receipt) == {NORM, f"{LINEAR}.weight"}
