"""`quantkit quantize --redo`: what changes in a finished result, what does not, what is refused, and that nothing is lost."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit import cli
from quantkit.calibration import tuning
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.commands.evaluation.card import _redone
from quantkit.commands.quantization import redo
from quantkit.commands.quantization.outlook import foresee
from quantkit.commands.quantization.redo_report import RedoReport
from quantkit.commands.quantization.resumption import Finished
from quantkit.commands.quantize import run
from quantkit.commands.report import _facts
from quantkit.errors import CheckpointError, GateError, JobError, QuantkitError, UsageError
from quantkit.job import job as jobs
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings

SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "dtype": "bfloat16"}
WHOLE = {"samples": 4, "length": 32, "dtype": "fp32", "group_size": 32, "bits": 3, "effort": "fast", "evaluate": False}
TEXT = {"effort": "default", "samples": 16, "length": 64}
DOWN = r".*layers\.1\.mlp\.down_proj"
NORM = "model.norm.weight"
NAME = "model.layers.1.mlp.down_proj"


def quantize(model: Path, out: Path, **options):
    return run(QuantizeSettings(str(model), out, **(WHOLE | options)), Silent())


def again(model: Path, out: Path, pattern: str = DOWN, **options) -> RedoReport:
    """A redo: of the other options only those that are given."""
    settings = QuantizeSettings(str(model), out, redo=pattern, **{"evaluate": False, "dtype": "fp32", **options})
    return run(replace(settings, asked=frozenset(options)), Silent())


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def changed(first: Path, second: Path) -> set[str]:
    """Names of the tensors that differ, by module."""
    before, after = tensors(first), tensors(second)
    assert before.keys() == after.keys()
    return {name.rpartition(".")[0] for name in before if not torch.equal(before[name], after[name])}


def record(folder: Path) -> dict:
    return json.loads((folder / "quantkit.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("source") / "model", **SHAPE)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    quantize(model, out)
    return out


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "out")


# What changes


TIED = {"tie_word_embeddings": True}
CASES = {
    "symmetric": ("LlamaForCausalLM", {}, {}),
    "asymmetric": ("LlamaForCausalLM", {}, {"sym": False}),
    "act-order": ("Qwen2ForCausalLM", {}, {"act_order": True}),
    "group-aware": ("Qwen3ForCausalLM", {}, {"group_aware": True}),
    "rules": ("LlamaForCausalLM", {}, {"rule": (DOWN + ":bits=8,sym=false", ".*o_proj:bits=2"), "skip": (".*v_proj",)}),
    "fused": ("Phi3ForCausalLM", {}, {}),
    "mixture": ("Qwen2MoeForCausalLM", {"num_hidden_layers": 2}, {}),
    "other names": ("MixtralForCausalLM", {"num_hidden_layers": 2}, {}),
    "rotated": ("LlamaForCausalLM", TIED, {"rotate": True, "untie_head": True, "seed": 3}),
    "exl2": ("LlamaForCausalLM", TIED, {"format": "exl2", "bpw": 4.5}),
    "exl2 fused": ("Phi3ForCausalLM", {}, {"format": "exl2", "bpw": 4.5, "head_bits": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_only_what_matches_changes(case: str, tmp_path: Path) -> None:
    family, shape, options = CASES[case]
    model = tiny.write_model(tmp_path / "model", family, **(SHAPE | shape))
    form = {"group_size": 128, "bits": 4} if case.startswith("exl2") else {}
    quantize(model, tmp_path / "out", **{**form, **options})
    before = shutil.copytree(tmp_path / "out", tmp_path / "before")
    report = again(model, tmp_path / "out", r".*layers\.1\..*(down_proj|w2)$", effort="default", samples=8, seed=9)
    expected = {linear.name for linear in report.made.linears}
    assert expected and all(".layers.1." in name for name in expected)
    touched = changed(before, tmp_path / "out")
    on_disk = open_checkpoint(before)
    assert touched and touched <= {t.rpartition(".")[0] for name in expected for t in on_disk.tensors_of(name)}
    others = set(contents(before)) - {"model.safetensors", "quantkit.json"}
    assert all(contents(before)[name] == contents(tmp_path / "out")[name] for name in others)
    entry = record(tmp_path / "out")["redone"][0]
    assert entry["facts"]["effort"] == "default" and entry["facts"]["samples"] == 8
    assert record(tmp_path / "out")["facts"] == record(before)["facts"]
    assert record(tmp_path / "out")["tensors"] != record(before)["tensors"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "out."))] == []


def test_the_head_is_redone_where_it_is_quantized(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out", lm_head=True, effort="nearest", **{"samples": 128, "length": 512})
    before = shutil.copytree(tmp_path / "out", tmp_path / "before")
    report = again(model, tmp_path / "out", "lm_head", effort="fast", samples=4, length=32)
    assert changed(before, tmp_path / "out") == {"lm_head"}
    (linear,) = report.made.linears
    assert linear.error < linear.error_before


def test_the_head_of_exl2_that_was_an_embedding_is_redone(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", **SHAPE, **TIED)
    quantize(model, tmp_path / "out", format="exl2", bpw=4.5, head_bits=3, group_size=128, bits=4)
    before = shutil.copytree(tmp_path / "out", tmp_path / "before")
    again(model, tmp_path / "out", "lm_head", samples=9)
    assert changed(before, tmp_path / "out") == {"lm_head"}
    assert record(tmp_path / "out")["redone"][0]["facts"]["bpw"] == 4.5


def test_inputs_are_those_that_the_quantized_blocks_before_give(model: Path, whole: Path, out: Path) -> None:
    """As they were when all of it was quantized: the same codes."""
    report = again(model, out, r".*layers\.1\.self_attn\.[qkv]_proj")
    assert len(report.made.linears) == 3 and changed(whole, out) == set()
    assert all(linear.error == pytest.approx(linear.error_before, rel=1e-3) for linear in report.made.linears)
    again(model, out, DOWN)
    assert changed(whole, out) == set()


def test_blocks_behind_the_last_linear_are_not_walked(model: Path, out: Path, monkeypatch) -> None:
    seen = []
    commit = jobs.Job._commit
    monkeypatch.setattr(jobs.Job, "_commit", lambda self, step: (seen.append(step.name), commit(self, step)))
    again(model, out, r".*layers\.1\.")
    assert seen == ["quantize 0", "quantize 1"]


def test_the_error_before_is_that_of_the_weight_that_was_there(model: Path, out: Path) -> None:
    old, original = (open_checkpoint(path).linear(NAME).dequantize().float() for path in (out, model))
    (linear,) = again(model, out, effort="nearest").made.linears
    new = open_checkpoint(out).linear(NAME).dequantize().float()
    for found, weight in ((linear.error_before, old), (linear.error, new)):
        assert found == pytest.approx(float((original - weight).square().sum() / original.square().sum()), rel=1e-4)


def test_what_was_rounded_to_nearest_gets_better(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out", effort="nearest", **{"samples": 128, "length": 512})
    report = again(model, tmp_path / "out", ".*down_proj", effort="default", samples=8, length=64)
    assert len(report.made.linears) == 3
    assert all(linear.error < linear.error_before for linear in report.made.linears)
    (table,) = (rows for title, _, rows in report.tables() if title.startswith("relative error"))
    assert [row[0] for row in table] == [f"model.layers.{block}.mlp.down_proj" for block in range(3)]
    assert all(row[4].startswith("-") for row in table)


def test_best_tunes_the_scales_of_what_is_redone_alone(model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tuning, "BATCH_TOKENS", 128)
    text = {"samples": 16, "length": 64, "bits": 2, "sym": False}
    quantize(model, tmp_path / "out", effort="best", **text)
    before, default = (shutil.copytree(tmp_path / "out", tmp_path / name) for name in ("before", "default"))
    assert not torch.equal(tensors(before)[NORM], tensors(model)[NORM]), "norms are tuned"
    report = again(model, tmp_path / "out", ".*down_proj")
    assert report.made.effort == "best" and report.made.tuning is not None and report.made.tuning.kept
    again(model, default, ".*down_proj", effort="default")
    names = {f"model.layers.{block}.mlp.down_proj" for block in range(3)}
    assert changed(before, tmp_path / "out") == changed(before, default) == names
    apart, tuned = tensors(default), tensors(tmp_path / "out")
    assert {name for name in tuned if not torch.equal(tuned[name], apart[name])} == {f"{name}.scales" for name in names}


# Judged


def test_a_redo_that_makes_the_model_worse_is_not_kept_and_said(model: Path, tmp_path: Path, capsys) -> None:
    quantize(model, tmp_path / "out", bits=2, effort="default", samples=16, length=64)
    before = contents(tmp_path / "out")
    command = ["quantize", str(model), "-o", str(tmp_path / "out"), "--redo", ".*", "--effort", "nearest", "--dtype", "fp32"]
    assert cli.run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["redo"]["kept"] is False and found["redo"]["kl_after"] > found["redo"]["kl_before"]
    assert found["evaluation"]["kl_mean"] == found["redo"]["kl_before"]
    assert contents(tmp_path / "out") == before and not (tmp_path / "out.job").exists()
    assert cli.run(command) == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "NOT kept, as it is worse" in words and "--no-eval" in words
    assert "given again does all of it again" in words
    assert cli.run([*command, "--no-eval"]) == 0
    assert contents(tmp_path / "out") != before and "in place, not measured" in " ".join(capsys.readouterr().out.split())


def test_a_redo_is_judged_against_the_original(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out", bits=2, effort="nearest", **{"samples": 128, "length": 512})
    report = again(model, tmp_path / "out", ".*", **TEXT, evaluate=True)
    assert report.kept and report.judgement.kl_after < report.judgement.kl_before
    assert report.damage.kl_mean == report.judgement.kl_after and report.damage.answer
    assert again(model, tmp_path / "out", ".*", **TEXT, evaluate=True, judged=True).damage.kl_mean == pytest.approx(
        report.damage.kl_mean, rel=0.02
    ), "of the folder, as it is read with its own kernels"
    rows = dict(report.rows())
    assert rows["the redo is"] == "in place" and rows["effort"].startswith("default for what was redone")


# Known again


def test_the_same_redo_is_known_and_the_whole_command_says_what_differs(model: Path, whole: Path, out: Path) -> None:
    first = again(model, out, effort="default")
    before = contents(out)
    found = again(model, out, effort="default")
    assert isinstance(found, Finished) and contents(out) == before
    assert found.as_json().keys() == first.as_json().keys()
    assert found.as_json()["redo"]["pattern"] == DOWN
    with pytest.raises(CheckpointError, match=r"what matches `.*down_proj` was redone with effort `default`") as caught:
        quantize(model, out)
    assert "--overwrite" in caught.value.hint
    another = again(model, out, r".*layers\.0\..*up_proj", effort="fast")
    assert another.earlier == (f"`{DOWN}`, effort default",) and len(record(out)["redone"]) == 2
    assert not isinstance(again(model, out, effort="default"), Finished), "something else was redone since"
    quantize(model, out, overwrite=True)
    assert contents(out) == contents(whole), "the way back"


def test_what_is_not_asked_for_is_as_the_result_was_made(model: Path, out: Path) -> None:
    again(model, out)
    facts, redone = record(out)["facts"], record(out)["redone"][0]["facts"]
    assert {name for name in facts if facts[name] != redone.get(name)} == {"redo"}
    assert facts.keys() | {redo.FROM} == redone.keys()


def test_a_redo_is_done_again_when_asked_to(model: Path, out: Path) -> None:
    again(model, out)
    report = again(model, out, restart=True)
    assert isinstance(report, RedoReport) and len(record(out)["redone"]) == 2


# Refused


def refused(model: Path, out: Path, error: type[QuantkitError], words: str, **options) -> str:
    before = contents(out) if out.is_dir() else None
    with pytest.raises(error, match=words) as caught:
        again(model, out, **options)
    assert before == (contents(out) if out.is_dir() else None), "it is as it was"
    assert not out.with_name("out.job").exists() and not out.with_name(".out.partial").exists()
    assert caught.value.hint
    return caught.value.hint


def test_patterns_that_match_nothing_that_can_be_redone(model: Path, out: Path, tmp_path: Path) -> None:
    assert "`.*down_proj`" in refused(model, out, UsageError, "only the middle of", pattern="down_proj")
    assert NAME.replace(".1.", ".0.") in refused(model, out, UsageError, "matches none of 22", pattern=".*downproj")
    refused(model, out, UsageError, "only linears that are not quantized, 1 of them: `lm_head`", pattern="lm_head")
    refused(model, out, UsageError, "no regular expression", pattern="(")
    refused(model, out, UsageError, "no pattern", pattern="")
    quantize(model, tmp_path / "other", skip=(".*v_proj",))
    refused(model, tmp_path / "other", UsageError, "3 of them: .*v_proj`, `--skip", pattern=".*v_proj")


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        ({"bits": 4}, "made with `--bits 3`, not `--bits 4`", "leave out `--bits`"),
        ({"sym": False}, "made with `--sym`, not `--asym`", "leave out `--asym`"),
        ({"group_size": 64, "lm_head": True}, "made with `--group-size 32`, not `--group-size 64`; made with no `--lm-head`, not `--lm-head`", "`--group-size`, `--lm-head`"),
        ({"rule": (".*:bits=8",)}, "made with no `--rule`, not `--rule ", "`--rule`"),
        ({"rotate": True}, "made with no `--rotate`, not `--rotate`", "`--rotate`"),
        ({"format": "exl2", "bpw": 4.0}, "made with `--format gptq`, not `--format exl2`; made with no `--bpw`, not `--bpw 4.0`", "`--format`, `--bpw`"),
        ({"overwrite": True}, "contradict each other", "leave out one"),
        ({"target": "vllm"}, "`--target` has no meaning", "quantkit check"),
        ({"effort": "nearest", "samples": 4}, "`--samples` has no meaning", "leave it out"),
    ],
)
def test_options_that_contradict_the_folder(options: dict, words: str, hint: str, model: Path, out: Path) -> None:
    assert hint in refused(model, out, UsageError, words, **options)


def test_options_that_agree_with_the_folder_may_be_repeated(model: Path, out: Path) -> None:
    again(model, out, bits=3, group_size=32, sym=True)


def test_folders_that_cannot_be_redone(model: Path, out: Path, tmp_path: Path) -> None:
    assert "quantize first" in refused(model, tmp_path / "none", CheckpointError, "is not there")
    (out / "notes.gguf").write_text("mine")
    assert "move it" in refused(model, out, CheckpointError, "notes.gguf` is no part of the model, and would be lost")
    (out / "notes.gguf").unlink()
    made = record(out)
    (out / "quantkit.json").unlink()
    refused(model, out, CheckpointError, "was made by something else, not by `quantkit quantize`")
    for bad in ({"bits": "three"}, {"command": "measure"}, {"bits": None}, {"effort": 7}, {"seed": "7"}):
        (out / "quantkit.json").write_text(json.dumps({**made, "facts": {**made["facts"], **bad}}))
        refused(model, out, QuantkitError, "`three`|not by `quantkit|`None`|`7`")
    for missing in ("tensors", "bits_per_weight"):
        (out / "quantkit.json").write_text(json.dumps({**made, missing: None}))
        refused(model, out, CheckpointError, "quantkit.json` has no digest of the tensors, or no bits")
    (out / "quantkit.json").write_text(json.dumps({**made, "conversion": {"facts": {}, "files": None}}))
    refused(model, out, CheckpointError, "was made by a conversion")
    (out / "quantkit.json").write_text(json.dumps({**made, "facts": {**made["facts"], "rule": "('.*:bits=8',)"}}))
    refused(model, out, CheckpointError, "bits in .*by its record it should take")
    (out / "quantkit.json").write_text(json.dumps(made))
    changed_tensors = tensors(out)
    changed_tensors["model.norm.weight"][0] += 1
    save_file(changed_tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert "--overwrite" in refused(model, out, CheckpointError, "its tensors were changed afterwards")


def test_another_model_is_refused(model: Path, out: Path, tmp_path: Path) -> None:
    other = tiny.write_model(tmp_path / "other", seed=1, **SHAPE)
    refused(other, out, CheckpointError, "was made from another model")
    larger = tiny.write_model(tmp_path / "larger", **{**SHAPE, "num_hidden_layers": 4})
    refused(larger, out, CheckpointError, "was made from another model")
    refused(out, out, QuantkitError, "must not be the same folder")
    same = shutil.copytree(model, tmp_path / "same")
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    refused(same, out, CheckpointError, "describes another model")


def test_best_is_not_for_exl2(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", **SHAPE)
    quantize(model, tmp_path / "out", format="exl2", bpw=4.5, group_size=128, bits=4)
    refused(model, tmp_path / "out", UsageError, "`--effort best` has no meaning with `--format exl2`", effort="best")


def test_a_tensor_that_would_not_be_as_it_was_is_caught(model: Path, out: Path, monkeypatch) -> None:
    before, put, read = contents(out), redo.put_in_their_place, Checkpoint.tensor

    def spoiled(*given: object):
        monkeypatch.setattr(Checkpoint, "tensor", lambda self, name: read(self, name) * (2 if name == NORM else 1))
        return put(*given)

    monkeypatch.setattr(redo, "put_in_their_place", spoiled)
    with pytest.raises(GateError, match="or not those alone"):
        again(model, out)
    assert contents(out) == before


# Around it


def test_files_beside_the_weights_stay_as_they_are(model: Path, out: Path) -> None:
    (out / "README.md").write_text("My notes on it.")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "mine": 1}, indent=2) + "\n")
    again(model, out)
    assert (out / "README.md").read_text() == "My notes on it."
    assert json.loads((out / "config.json").read_text())["mine"] == 1


def test_a_dry_run_looks_at_the_part(model: Path, out: Path, capsys) -> None:
    before = contents(out)
    settings = QuantizeSettings(str(model), out, redo=DOWN, dtype="fp32", effort="default", asked=frozenset({"effort"}))
    outlook = foresee(settings, Silent())
    assert outlook.as_json()["redo"] == {"pattern": DOWN, "linears": 1, "blocks": 2}
    assert outlook.effort == "default" and contents(out) == before
    assert cli.run(["quantize", str(model), "-o", str(out), "--redo", DOWN, "--dry-run"]) == 0
    assert "1 of 21 to redo, in 2 blocks" in capsys.readouterr().out
    again(model, out)
    size = sum(len(content) for content in contents(out).values())
    assert abs(outlook.disk.result - size) < 20_000
    with pytest.raises(UsageError, match="matches none"):
        foresee(replace(settings, redo="nothing"), Silent())


def test_the_command_line_tells_a_default_that_was_typed(model: Path, out: Path, capsys) -> None:
    command = ["quantize", str(model), "-o", str(out), "--redo", DOWN, "--dtype", "fp32", "--no-eval"]
    assert cli.run([*command, "--bits", "4"]) == 2
    assert "made with `--bits 3`, not `--bits 4`" in capsys.readouterr().err
    assert cli.run([*command, "--effort", "fast", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["bits"], found["group_size"]) == (3, 32)
    assert found["redo"] == {
        **{"pattern": DOWN, "linears": 1, "kept": True, "kl_before": None, "kl_after": None},
        "earlier": [],
    }
    assert [linear["name"] for linear in found["linears"]] == [NAME]
    assert cli.run([*command, "--bpw", "3,4"]) == 2


def test_the_api_redoes_too(model: Path, out: Path) -> None:
    with pytest.raises(UsageError, match="made with `--bits 3`, not `--bits 4`"):
        quantkit.quantize(model, out, redo=DOWN, bits=4, progress=Silent())
    report = quantkit.quantize(model, out, redo=DOWN, dtype="fp32", evaluate=False, progress=Silent())
    assert isinstance(report, RedoReport) and report.made.settings["bits"] == 3


def test_a_model_card_claims_no_effort_for_all(model: Path, out: Path) -> None:
    again(model, out, effort="default", samples=6)
    facts = _facts(open_checkpoint(out), "out", "out")
    (entry,) = facts.made_with["redone"]
    assert _redone(entry).startswith(f"1 linear that match `{DOWN}`, 6 × 32 tokens of `bundled`, seed 0, effort `default`")
    whole, part = facts.command.split(" && ")
    assert "--effort fast" in whole and "--redo" not in whole
    assert part == f"quantkit quantize MODEL -o out --redo '{DOWN}' --effort default --samples 6 --no-eval"


def test_an_unfinished_redo_goes_on_and_other_settings_are_refused(model: Path, whole: Path, out: Path, monkeypatch) -> None:
    commit = jobs.Job._commit

    def once(self: jobs.Job, step: jobs.Step) -> None:
        if step.name == "quantize 1":
            raise KeyboardInterrupt
        commit(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(jobs.Job, "_commit", once)
        with pytest.raises(KeyboardInterrupt):
            again(model, out)
    assert contents(out) == contents(whole) and out.with_name("out.job").is_dir()
    with pytest.raises(JobError, match="effort was `fast`, is `default`"):
        again(model, out, effort="default")
    undisturbed = shutil.copytree(whole, out.with_name("other"))
    again(model, undisturbed)
    again(model, out)
    assert contents(out) == contents(undisturbed)


def test_a_job_of_what_is_no_longer_there_is_refused(model: Path, out: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(redo, "put_in_their_place", lambda *given: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            again(model, out)
    again(model, out, r".*up_proj", job=out.with_name("elsewhere"))
    with pytest.raises(JobError, match="redone from was"):
        again(model, out)
    again(model, out, restart=True)


def test_a_folder_that_stepped_aside_when_the_process_was_killed_returns(model: Path, out: Path) -> None:
    """Between the two renames there is no OUT for a moment."""
    out.rename(out.with_name(".out.replaced"))
    again(model, out)
    assert len(record(out)["redone"]) == 1 and [path.name for path in out.parent.iterdir()] == ["out"]


def test_what_was_put_in_place_and_not_measured_is_measured(model: Path, whole: Path, tmp_path: Path, monkeypatch) -> None:
    quantize(model, tmp_path / "out", effort="nearest", **{"samples": 128, "length": 512})

    def killed(*given: object) -> None:
        raise KeyboardInterrupt

    options = {"pattern": ".*", **TEXT, "evaluate": True}
    with monkeypatch.context() as patch:
        patch.setattr(redo, "sample_answer", killed)
        with pytest.raises(KeyboardInterrupt):
            again(model, tmp_path / "out", **options)
    assert (tmp_path / "out.job").is_dir() and len(record(tmp_path / "out")["redone"]) == 1
    found = again(model, tmp_path / "out", **options)
    assert isinstance(found, Finished) and found.damage.kl_mean > 0 and not (tmp_path / "out.job").exists()
