"""The head: quantized when asked, untied when asked, and its bytes counted."""

import json
from pathlib import Path

import pytest
import tiny
import torch

import quantkit
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.quantization.report import QuantizeReport
from quantkit.commands.quantize import run
from quantkit.errors import FormatError, UsageError
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings

IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(7))
HEAD = "lm_head"


def quantize(model: Path, out: Path, **options) -> QuantizeReport:
    text = {} if options.get("effort") == "nearest" else {"samples": 4, "length": 32}
    settings = {"bits": 8, "group_size": 32, "effort": "fast", "evaluate": False, **text, **options}
    return run(QuantizeSettings(str(model), out, **settings), Silent())


def size_of(folder: Path, module: str) -> int:
    checkpoint = open_checkpoint(folder)
    return sum(checkpoint.tensor(name).nbytes for name in checkpoint.tensors_of(module))


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def free(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("free") / "model", dtype="bfloat16")


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("tied") / "model", dtype="bfloat16", tie_word_embeddings=True)


@pytest.mark.parametrize("effort", ["nearest", "fast"])
def test_a_head_is_quantized_like_any_linear(effort: str, free: Path, tmp_path: Path) -> None:
    report = quantize(free, tmp_path / "out", lm_head=True, effort=effort)
    before, after = open_checkpoint(free).dense(HEAD).float(), open_checkpoint(tmp_path / "out").dense(HEAD).float()
    assert 0 < (after - before).abs().max() < 0.01 * before.abs().max()
    assert config_of(tmp_path / "out")["quantization_config"]["lm_head"] is True
    assert report.linears[-1].name == HEAD and report.plan.head is not None
    assert report.plan.head.stored_bits == 8 * size_of(tmp_path / "out", HEAD)
    assert report.plan.added_bits == 0 and report.plan.stored_bits == sum(
        one.stored_bits for one in report.plan.linears
    )
    own, reference = quantkit.load(tmp_path / "out")(IDS), quantkit.load(free)(IDS)
    assert (own - reference).square().mean().sqrt() < 0.05 * reference.std()


def test_a_rule_may_speak_of_the_head(free: Path, tmp_path: Path) -> None:
    report = quantize(free, tmp_path / "out", bits=3, lm_head=True, rule=("lm_head:bits=8,group_size=64",))
    assert {linear.name: linear.bits for linear in report.linears}[HEAD] == 8
    assert config_of(tmp_path / "out")["quantization_config"]["dynamic"] == {"+:lm_head": {"bits": 8, "group_size": 64}}
    assert open_checkpoint(tmp_path / "out").linear(HEAD).bits_per_weight == pytest.approx(8 + 24 / 64 + 32 / 320)
    report = quantize(free, tmp_path / "skipped", lm_head=True, skip=("lm_head",))
    assert report.plan.head is None
    assert config_of(tmp_path / "skipped")["quantization_config"]["lm_head"] is False
    assert open_checkpoint(tmp_path / "skipped").tensors_of(HEAD) == ["lm_head.weight"]


@pytest.mark.parametrize("lm_head", [False, True])
def test_a_tied_head_gets_a_weight_of_its_own_when_asked_and_its_bytes_are_counted(
    lm_head: bool, tied: Path, tmp_path: Path
) -> None:
    plain = quantize(tied, tmp_path / "tied")
    report = quantize(tied, tmp_path / "out", untie_head=True, lm_head=lm_head)
    assert config_of(tmp_path / "tied")["tie_word_embeddings"] is True
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
    added = size_of(tmp_path / "out", HEAD)
    assert report.plan.added_bits == 8 * added
    assert report.as_json()["plan"]["added_bytes"] == added
    assert ["added by a head of its own", f"{added / 2**20:.1f} MiB"] in report.rows()
    weights = sum(linear.weights for linear in report.plan.linears)
    assert report.bits_per_weight == pytest.approx(plain.bits_per_weight + 8 * added / weights)
    assert report.parameters == plain.parameters
    assert report.file_bits_per_weight > plain.file_bits_per_weight + 7.9 * added / report.parameters
    after = open_checkpoint(tmp_path / "out")
    embedding = after.tensor("model.embed_tokens.weight")
    assert torch.equal(embedding, open_checkpoint(tied).tensor("model.embed_tokens.weight"))
    assert torch.equal(after.dense(HEAD), embedding) == (not lm_head)
    logits, before = quantkit.load(tmp_path / "out")(IDS), quantkit.load(tmp_path / "tied")(IDS)
    assert torch.equal(logits, before) or lm_head
    assert (logits - before).square().mean().sqrt() < 0.02 * before.std()


def test_a_head_is_left_alone_unless_asked(free: Path, tied: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="head of this model is its embedding") as caught:
        quantize(tied, tmp_path / "out", lm_head=True)
    assert "--untie-head" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="a weight of its own already"):
        quantize(free, tmp_path / "out", untie_head=True)
    assert list(tmp_path.iterdir()) == []


def test_a_head_that_cannot_be_packed_is_an_error(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", vocab_size=300)
    with pytest.raises(
        FormatError, match="`lm_head` cannot be quantized: 300 output features are not a multiple of 32"
    ):
        quantize(source, tmp_path / "out", lm_head=True)
    quantize(source, tmp_path / "out")
