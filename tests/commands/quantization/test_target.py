"""`quantize --target`: what is written loads where it shall, by the rules of `check`; what cannot is refused before."""

from pathlib import Path

import pytest
import tiny

from quantkit import cli
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.check import run as run_check
from quantkit.commands.quantization.job import choose_placement, open_subject
from quantkit.commands.quantization.target import fit_target, planned_inventory
from quantkit.commands.quantize import run
from quantkit.consumers import TARGETS, verdicts
from quantkit.errors import FormatError, UsageError
from quantkit.inventory import take
from quantkit.progress import Silent
from quantkit.settings import CheckSettings, QuantizeSettings

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}


class Listener(Silent):
    """Progress that keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("wide") / "model", dtype="float16", **WIDE)


def fitted(model: Path, progress: Silent | None = None, **options) -> QuantizeSettings:
    """The settings that would be used, without quantizing."""
    settings = QuantizeSettings(str(model), model.parent / "out", **options)
    subject = open_subject(open_checkpoint(model), None, choose_placement("cpu", "fp32"))
    return fit_target(settings, subject, progress or Silent())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "options",
    [{}, {"act_order": True}, {"lm_head": True, "bits": 8}, {"sym": False}, {"skip": (".*down_proj",)}],
    ids=["plain", "act-order", "8 bits with head", "asym", "skip"],
)
def test_what_is_planned_is_what_is_written(target: str, options: dict, model: Path, tmp_path: Path) -> None:
    """The verdict before the work and the verdict on the folder are one, for every consumer."""
    settings = QuantizeSettings(
        str(model), tmp_path / "out", effort="fast", samples=4, length=32, evaluate=False, **options
    )
    subject = open_subject(open_checkpoint(model), settings, choose_placement("cpu", "fp32"))
    planned = {verdict.consumer: verdict.loads for verdict in verdicts(planned_inventory(settings, subject))}
    needed = all(any(planned[name] for name in group) for group in TARGETS[target])
    if not needed:
        with pytest.raises(FormatError, match=f"--target {target}"):
            fit_target(QuantizeSettings(**{**_dict(settings), "target": target}), subject, Silent())
        return
    if target != "any":  # one folder for each set of options is enough
        return
    run(QuantizeSettings(**{**_dict(settings), "target": target}), Silent())
    found = {verdict.consumer: verdict.loads for verdict in verdicts(take(open_checkpoint(tmp_path / "out")))}
    assert found == planned
    assert run_check(CheckSettings(tmp_path / "out"), Silent()).faults == ()


def _dict(settings: QuantizeSettings) -> dict:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


@pytest.mark.parametrize(
    ("target", "options", "words", "hint"),
    [
        ("vllm", {"sym": False, "bits": 2, "rule": (".*v_proj:bits=4",)}, "run as one", "leave out `--rule` and `--skip`"),
        ("exllamav2", {"bits": 8}, "8 bits; it takes 4", "use `--bits 4`"),
        ("exllamav2", {"bits": 3, "sym": False}, "3 bits", "use `--bits 4 --sym`"),
        ("exllamav2", {"sym": False}, "zero points may be 0", "use `--sym`"),
        ("transformers", {"rule": (".*down_proj:bits=8",)}, "by a `dynamic` rule", "leave out `--rule` and `--skip`"),
        ("transformers", {"lm_head": True}, "a quantized head", "leave out `--lm-head`"),
        ("any", {"bits": 8}, "exllamav2 will not load this", "use `--bits 4`"),
        ("any", {"group_size": 16}, "group size 16", "use `--group-size 128`"),
    ],
)
def test_refusals_name_the_linear_and_a_way_out(target: str, options: dict, words: str, hint: str, model: Path) -> None:
    with pytest.raises(FormatError, match=words) as caught:
        fitted(model, target=target, **options)
    assert caught.value.hint == hint
    assert f"--target {target}" in caught.value.message


def test_a_group_size_is_chosen_where_none_was_given(tmp_path: Path) -> None:
    narrow = tiny.write_model(tmp_path / "model", hidden_size=192, intermediate_size=384, head_dim=64)
    listener = Listener()
    found = fitted(narrow, listener, target="vllm", free_group_size=True)
    assert found.group_size == 64 and found.target is None
    assert any("group size 64, as `--target vllm` needs it" in line for line in listener.said)
    assert any("vLLM Marlin will not load this" in line for line in listener.said)
    with pytest.raises(FormatError) as caught:
        fitted(narrow, target="vllm")
    assert caught.value.hint == "use `--group-size 64`"


def test_settings_that_fit_stay(model: Path) -> None:
    assert fitted(model, target="any", free_group_size=True).group_size == 128


def test_second_best_and_cautions_are_told(model: Path) -> None:
    listener = Listener()
    fitted(model, listener, target="vllm", bits=3)
    assert listener.said[0].startswith("vLLM Marlin will not load this: `model.layers.0.self_attn.q_proj`: 3 bits")
    assert any("--quantization gptq" in line for line in listener.said)


def test_experts_are_refused_for_transformers(tmp_path: Path) -> None:
    experts = tiny.write_model(tmp_path / "model", "Qwen3MoeForCausalLM", **WIDE, moe_intermediate_size=128)
    with pytest.raises(FormatError, match="runs random ones") as caught:
        fitted(experts, target="transformers")
    assert caught.value.hint == "no single setting would do: leave out `--target`, or name another"


def test_exl2_has_one_reader(model: Path) -> None:
    exl2 = {"format": "exl2", "bpw": 4.0}
    assert fitted(model, target="exllamav2", **exl2).format == "exl2"
    for target in set(TARGETS) - {"exllamav2"}:
        with pytest.raises(UsageError, match="does not read EXL2"):
            run(QuantizeSettings(str(model), model.parent / "out", target=target, **exl2), Silent())


def test_an_unknown_target(model: Path) -> None:
    with pytest.raises(UsageError, match="unknown target `ollama`"):
        run(QuantizeSettings(str(model), model.parent / "out", target="ollama"), Silent())


def test_the_command(tmp_path: Path, capsys) -> None:
    narrow = tiny.write_model(tmp_path / "model", hidden_size=192, intermediate_size=384, head_dim=64)
    common = ["quantize", str(narrow), "-o", str(tmp_path / "out"), "--effort", "nearest", "--no-eval"]
    assert cli.run([*common, "--target", "any"]) == 11
    error = capsys.readouterr().err
    assert "192 inputs are no multiple of 128" in error and "hint: " in error and not (tmp_path / "out").exists()
    assert cli.run([*common, "--target", "vllm", "--group-size", "128"]) == 11
    assert "`--group-size 64`" in capsys.readouterr().err
    assert cli.run([*common, "--target", "vllm"]) == 0
    assert "group size 64" in capsys.readouterr().err
    found = run_check(CheckSettings(tmp_path / "out"), Silent())
    assert next(verdict for verdict in found.verdicts if verdict.consumer == "vLLM plain").loads


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Phi3ForCausalLM"])
def test_exl2_is_planned_as_it_is_written(family: str, tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", family, num_hidden_layers=1, hidden_size=128, intermediate_size=128)
    settings = QuantizeSettings(
        str(source), tmp_path / "out", "exl2", bpw=4.0, samples=2, length=32, evaluate=False, target="exllamav2"
    )
    subject = open_subject(open_checkpoint(source), settings, choose_placement("cpu", "fp32"))
    planned = planned_inventory(settings, subject)
    run(settings, Silent())
    found = take(open_checkpoint(tmp_path / "out"))
    assert [linear.name for linear in planned.linears] == [linear.name for linear in found.linears]
    assert [verdict.loads for verdict in verdicts(planned)] == [verdict.loads for verdict in verdicts(found)]
    assert next(verdict for verdict in verdicts(found) if verdict.consumer == "exllamav2").loads
