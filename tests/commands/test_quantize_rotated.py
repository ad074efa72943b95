"""`quantkit quantize --rotate`: what comes out says what the original says, its bytes are counted, and it resumes."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.check import check
from quantkit.commands.measure import run as measure
from quantkit.commands.quantization import end
from quantkit.commands.quantization.outlook import foresee
from quantkit.commands.quantization.rates import run_rates
from quantkit.commands.quantization.report import QuantizeReport
from quantkit.commands.quantization.resumption import Finished
from quantkit.commands.quantize import run
from quantkit.errors import CheckpointError, PlanError, UnsupportedModel, UsageError
from quantkit.progress import Silent
from quantkit.settings import MeasureSettings, QuantizeSettings

FAMILIES = [family for family in tiny.FAMILIES if not family.startswith("Gemma")]
IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(7))
TEXT = {"samples": 4, "length": 32}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def settings(model: Path, out: Path, **options) -> QuantizeSettings:
    usual = {"rotate": True, "evaluate": False, "bits": 8, "group_size": 32, "effort": "fast", **TEXT}
    if options.get("effort") == "nearest":
        usual = {name: value for name, value in usual.items() if name not in TEXT}
    if options.get("format") == "exl2":
        usual = {name: value for name, value in usual.items() if name not in ("bits", "group_size")}
    return QuantizeSettings(str(model), out, **(usual | options))


def quantize(model: Path, out: Path, **options) -> QuantizeReport | Finished:
    return run(settings(model, out, **options), Silent())


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def error(folder: Path, reference: Path) -> float:
    """Of the logits, relative to their spread."""
    own, expected = quantkit.load(folder)(IDS), quantkit.load(reference)(IDS)
    return float((own - expected).square().mean().sqrt() / expected.std())


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("tied") / "model", dtype="bfloat16", tie_word_embeddings=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_quantized_in_its_rotated_form(family: str, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", family)
    report = quantize(model, tmp_path / "out", effort="nearest")
    assert error(tmp_path / "out", model) < 0.05
    found = open_checkpoint(tmp_path / "out")
    assert set(found.tensor("model.layers.1.post_attention_layernorm.weight").tolist()) == {1.0}
    assert report.as_json()["rotate"] is True and report.plan.added_bits == 0
    assert ["rotated", "by seed 0, norms in the linears"] in report.rows()
    linear = found.linears()[0]
    assert not torch.allclose(found.dense(linear).float(), open_checkpoint(model).dense(linear), atol=0.1)
    assert check(tmp_path / "out").faults == ()


@pytest.mark.parametrize("lm_head", [False, True])
def test_a_tied_model_gets_a_head_of_its_own_whose_bytes_are_counted(
    lm_head: bool, tied: Path, tmp_path: Path
) -> None:
    plain = quantize(tied, tmp_path / "plain", rotate=False)
    report = quantize(tied, tmp_path / "out", untie_head=True, lm_head=lm_head, evaluate=True)
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
    after = open_checkpoint(tmp_path / "out")
    added = sum(after.tensor(name).nbytes for name in after.tensors_of("lm_head"))
    assert report.plan.added_bits == 8 * added and report.as_json()["plan"]["added_bytes"] == added
    weights = sum(linear.weights for linear in report.plan.linears)
    assert report.bits_per_weight == pytest.approx(plain.bits_per_weight + 8 * added / weights)
    assert report.parameters == plain.parameters
    assert report.file_bits_per_weight > plain.file_bits_per_weight + 7.9 * added / report.parameters
    assert error(tmp_path / "out", tied) < 0.05
    assert report.damage is not None and report.damage.kl_mean < 0.01
    if not lm_head:
        head, embedding = after.tensor(HEAD).float(), after.tensor(EMBEDDING).float()
        assert head.shape == embedding.shape and not torch.allclose(head, embedding, atol=0.01)


def test_what_is_measured_is_the_damage_to_the_original(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    compare = end.divergence.compare

    def watched(reference, candidate, windows, progress):
        seen.append(reference)
        return compare(reference, candidate, windows, progress)

    monkeypatch.setattr(end.divergence, "compare", watched)
    quantize(tied, tmp_path / "out", untie_head=True, effort="nearest", evaluate=True)
    (reference,) = seen
    assert torch.equal(reference.embedding.weight, open_checkpoint(tied).tensor(EMBEDDING))


def test_rules_act_order_and_gradients_work_on_the_rotated_model(tied: Path, tmp_path: Path) -> None:
    options = {"rule": (".*down_proj:bits=4",), "skip": (".*v_proj",), "act_order": True}
    report = quantize(tied, tmp_path / "out", untie_head=True, effort="default", **options)
    assert report.gradients is not None and len(report.plan.dense) == 2
    assert error(tmp_path / "out", tied) < 0.2
    dense = open_checkpoint(tmp_path / "out").tensor("model.layers.0.self_attn.v_proj.weight")
    assert dense.dtype == torch.bfloat16
    assert not torch.equal(dense, open_checkpoint(tied).tensor("model.layers.0.self_attn.v_proj.weight"))


def test_best_effort_tunes_the_rotated_model(tied: Path, tmp_path: Path) -> None:
    report = quantize(tied, tmp_path / "out", untie_head=True, effort="best", bits=3, samples=8)
    assert report.tuning is not None
    assert error(tmp_path / "out", tied) < 0.8


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tied: Path, tmp_path: Path) -> None:
    options = {"untie_head": True, "effort": "nearest"}
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        quantize(tied, tmp_path / name, seed=seed, **options)
    one, again, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "again", "other"))
    assert one == again != other


def test_rotation_and_seed_are_among_the_facts_of_a_result(tied: Path, tmp_path: Path) -> None:
    options = {"untie_head": True, "effort": "nearest"}
    quantize(tied, tmp_path / "out", **options)
    assert isinstance(quantize(tied, tmp_path / "out", **options), Finished)
    with pytest.raises(CheckpointError, match="rotate"):
        quantize(tied, tmp_path / "out", rotate=False, **options)
    with pytest.raises(CheckpointError, match="seed"):
        quantize(tied, tmp_path / "out", seed=1, **options)


def test_what_cannot_be_rotated_is_refused_before_work(tied: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="head of this model is its embedding: rotated, they are two") as caught:
        quantize(tied, tmp_path / "out")
    assert "--untie-head" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="head of this model is its embedding: rotated") as caught:
        quantize(tied, tmp_path / "out", format="exl2", bpw=4.0, head_bits=16)
    assert "--head-bits 8" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []
    gemma = tiny.write_model(tmp_path / "gemma", "Gemma3ForCausalLM")
    with pytest.raises(UnsupportedModel, match="`Gemma3ForCausalLM` cannot be rotated"):
        quantize(gemma, tmp_path / "out", untie_head=True)
    free = tiny.write_model(tmp_path / "free")
    with pytest.raises(UsageError, match="a weight of its own already"):
        quantize(free, tmp_path / "out", untie_head=True)
    quantize(free, tmp_path / "quantized", effort="nearest")
    with pytest.raises(CheckpointError, match="is already quantized"):
        quantize(tmp_path / "quantized", tmp_path / "out")


def test_a_head_that_is_a_second_copy_of_the_embedding_must_be_one(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(model / "model.safetensors")
    tiny.write_tensors(model, {**tensors, HEAD: tensors[EMBEDDING].clone()})
    quantize(model, tmp_path / "out", untie_head=True, effort="nearest")
    assert error(tmp_path / "out", model) < 0.05
    tiny.write_tensors(model, {**tensors, HEAD: tensors[EMBEDDING] * 2})
    with pytest.raises(CheckpointError, match="`tie_word_embeddings` is true"):
        quantize(model, tmp_path / "other", untie_head=True, effort="nearest")


def test_a_dry_run_foresees_the_added_head(tied: Path, tmp_path: Path) -> None:
    asked = settings(tied, tmp_path / "out", untie_head=True)
    outlook = foresee(asked, Silent())
    report = quantize(tied, tmp_path / "out", untie_head=True)
    assert outlook.plan.added_bits == report.plan.added_bits > 0
    assert outlook.as_json()["rotate"] is True
    assert abs(outlook.disk.result - sum(file.stat().st_size for file in (tmp_path / "out").iterdir())) < 20_000


def test_exl2_is_measured_and_quantized_in_the_same_rotation(tied: Path, tmp_path: Path) -> None:
    options = {"format": "exl2", "bpw": 6.0, "effort": "fast", "measurement": tmp_path / "m.json"}
    measure(MeasureSettings(str(tied), tmp_path / "m.json", rotate=True, **TEXT), Silent())
    quantize(tied, tmp_path / "out", **options)
    assert error(tmp_path / "out", tied) < 0.2
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
    for other, typed in (({"rotate": False}, ""), ({"seed": 1}, " --rotate --seed 1")):
        with pytest.raises(PlanError, match="another model") as caught:
            quantize(tied, tmp_path / "other", **(options | other))
        assert f"`quantkit measure {tied}{typed} -o" in (caught.value.hint or "")
    reports = run_rates(settings(tied, tmp_path / "rates", **options), [5.0, 6.0], Silent()).reports
    assert [error(report.out, tied) < 0.3 for report in reports] == [True, True]
