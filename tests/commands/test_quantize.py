"""`commands.quantize` on tiny models of every family: what is written, what is said, what fails and how."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit import kernels
from quantkit.calibration import stream
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.quantization import hessians, job
from quantkit.commands.quantization.outlook import foresee
from quantkit.commands.quantization.report import QuantizeReport
from quantkit.commands.quantize import run
from quantkit.errors import CalibrationError, FormatError, GateError, UsageError
from quantkit.formats.gptq import GptqCodec
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings
from quantkit.solver.gptq import solve

IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(7))


def quantize(model: Path, out: Path, **options) -> QuantizeReport:
    group = {} if options.get("format") == "exl2" else {"group_size": 32}
    settings = {**group, "samples": 8, "length": 64, "evaluate": False, **options}
    return run(QuantizeSettings(str(model), out, **settings), Silent())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("source") / "model", dtype="bfloat16")


# What is written


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_is_quantized_and_loads_again(family: str, tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", family, num_hidden_layers=2)
    report = quantize(source, tmp_path / "out", bits=8)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert after.linears() == before.linears() == [linear.name for linear in report.plan.quantized]
    assert {linear.name for linear in report.linears} == set(before.linears())
    for name in before.linears():
        kept = before.dense(name).float()
        assert (after.dense(name).float() - kept).abs().max() < 0.03 * kept.abs().max()
    untouched = set(before.names()) - {name for linear in before.linears() for name in before.tensors_of(linear)}
    assert untouched <= set(after.names())
    changed = {name for name in untouched if not torch.equal(after.tensor(name), before.tensor(name))}
    assert all("norm" in name for name in changed), "norms are tuned"
    reference, candidate = quantkit.load(source)(IDS), quantkit.load(tmp_path / "out")(IDS)
    assert (reference - candidate).abs().mean() < 0.05 * reference.std()


SETTINGS = [
    *((bits, 32, sym, False) for bits in (2, 3, 4, 8) for sym in (True, False)),
    *((3, group_size, False, True) for group_size in (32, 64, -1)),
    *((4, group_size, True, True) for group_size in (32, 96, -1)),
]


@pytest.mark.parametrize(("bits", "group_size", "sym", "act_order"), SETTINGS)
def test_every_setting_is_written_as_planned(
    bits: int, group_size: int, sym: bool, act_order: bool, model: Path, tmp_path: Path
) -> None:
    report = quantize(model, tmp_path / "out", bits=bits, group_size=group_size, sym=sym, act_order=act_order)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (written["bits"], written["group_size"]) == (bits, group_size)
    assert (written["sym"], written["desc_act"]) == (sym, act_order)
    assert written == json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    checkpoint = open_checkpoint(tmp_path / "out")
    stored = sum(checkpoint.linear(name).stored_bits for name in checkpoint.linears())
    assert stored == report.plan.stored_bits


def test_more_bits_do_less_damage(model: Path, tmp_path: Path) -> None:
    reference = quantkit.load(model)(IDS)

    def damage(bits: int) -> float:
        quantize(model, tmp_path / f"{bits}", bits=bits)
        return float((quantkit.load(tmp_path / f"{bits}")(IDS) - reference).square().mean())

    assert damage(8) < 0.1 * damage(4) < 0.1 * damage(2)


def test_other_tensors_keep_their_dtype_and_biases_become_float16(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", "Qwen2ForCausalLM", dtype="bfloat16")
    quantize(source, tmp_path / "out")
    written = weights(tmp_path / "out")
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert written["model.norm.weight"].dtype == torch.bfloat16
    assert torch.equal(written[bias], weights(source)[bias].to(torch.float16))


def test_a_tied_embedding_is_written_once(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = quantize(source, tmp_path / "out")
    written = weights(tmp_path / "out")
    assert "lm_head.weight" not in written
    assert torch.equal(written["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert report.parameters == sum(tensor.numel() for tensor in tensors.values()) - written["model.embed_tokens.weight"].numel()


def test_side_files_go_along(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


def test_what_cannot_be_quantized_stays_dense_and_the_config_says_so(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", intermediate_size=72)
    report = quantize(source, tmp_path / "out")
    assert {linear.kind for linear in report.plan.dense} == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert any("mlp.gate_proj` (2×) stays dense" in remark for remark in report.remarks())
    rules = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["dynamic"]
    assert list(rules) == [
        rf"-:^model\.layers\.\d+\.mlp\.{name}_proj$" for name in ("gate", "up", "down")
    ]
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(weights(tmp_path / "out")[name], weights(source)[name])
    quantkit.load(tmp_path / "out")(IDS)


def test_a_short_last_group_is_quantized(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", intermediate_size=160)
    report = quantize(source, tmp_path / "out", group_size=128)
    assert [linear.kind for linear in report.plan.short] == ["mlp.down_proj"] * 2
    assert open_checkpoint(tmp_path / "out").tensor("model.layers.0.mlp.down_proj.scales").shape == (2, 64)


def test_nothing_to_quantize_is_an_error(tmp_path: Path) -> None:
    source = tiny.write_model(
        tmp_path / "model", hidden_size=72, intermediate_size=72, num_attention_heads=3, num_key_value_heads=3
    )
    with pytest.raises(FormatError, match="no linear that can be quantized"):
        quantize(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_python_api_has_the_same_verb(model: Path, tmp_path: Path) -> None:
    report = quantkit.quantize(
        model, tmp_path / "out", bits=3, group_size=32, samples=4, length=32, evaluate=False
    )
    assert {linear.bits for linear in report.linears} == {3}


# The same bytes


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("options", [{}, {"act_order": True}, {"format": "exl2", "bpw": 5.0}], ids=str)
def test_the_same_seed_gives_the_same_bytes(options: dict, model: Path, tmp_path: Path) -> None:
    """Whatever the number of threads."""
    threads = torch.get_num_threads()
    try:
        for name, seed, count in (("a", 3, 1), ("b", 3, 2), ("c", 4, 1)):
            torch.set_num_threads(count)
            quantize(model, tmp_path / name, seed=seed, **options)
    finally:
        torch.set_num_threads(threads)
    a, b, c = (bytes_of(tmp_path / name) for name in "abc")
    assert a == b
    assert a["model.safetensors"] != c["model.safetensors"]


def test_spilled_hidden_states_change_nothing(model: Path, tmp_path: Path, monkeypatch) -> None:
    quantize(model, tmp_path / "memory")
    spilled = []
    put = stream._OnDisk.put
    monkeypatch.setattr(stream._OnDisk, "put", lambda self, *args: (spilled.append(self._folder), put(self, *args)))
    monkeypatch.setattr(job, "SPILL_BYTES", 0)
    quantize(model, tmp_path / "disk")
    place = tmp_path / "disk.job"
    backward = {place / "states-gradients" / name for name in ("block-0", "block-1", "block-2", "gradients")}
    inside = {place / f"states-quantize-{block}-leg-{leg}" for block in range(2) for leg in (2, 3, 4)}
    assert set(spilled) >= {place / "states-quantize-0", place / "states-quantize-1", *backward}
    assert set(spilled) <= {place / "states-quantize-0", place / "states-quantize-1", *backward, *inside}
    assert bytes_of(tmp_path / "memory") == bytes_of(tmp_path / "disk")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "memory"]


def test_the_job_is_beside_the_folder_that_a_link_leads_to(model: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "out")
    made: list[Path] = []
    mkdir = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", lambda path, *rest, **more: (made.append(path), mkdir(path, *rest, **more)))
    quantize(model, tmp_path / "link")
    assert tmp_path / "there" / "out.job" in made
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["out"]


def test_the_home_of_nobody_is_a_name_like_any_other(model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    quantize(model, Path("~no such user/out"))
    assert (tmp_path / "~no such user" / "out" / "config.json").exists()


def test_hessians_in_several_passes_change_nothing(tmp_path: Path, monkeypatch) -> None:
    source = tiny.write_model(tmp_path / "model", "MixtralForCausalLM", num_local_experts=3)
    quantize(source, tmp_path / "one")
    monkeypatch.setattr(hessians, "HESSIAN_BYTES", 1)
    quantize(source, tmp_path / "many")
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "many")


@pytest.mark.parametrize("rules", [(), (".*q_proj:group_size=64", ".*up_proj:act_order=true")])
def test_groups_solved_one_by_one_make_the_same_kind_of_file(rules: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    static = quantize(model, tmp_path / "static", rule=rules)
    aware = quantize(model, tmp_path / "aware", rule=rules, group_aware=True, lm_head=True)
    assert weights(tmp_path / "static").keys() - {"lm_head.weight"} < weights(tmp_path / "aware").keys()
    config = json.loads((tmp_path / "aware" / "config.json").read_text())["quantization_config"]
    assert not config["desc_act"]
    for name, g_idx in weights(tmp_path / "aware").items():
        if name.endswith("g_idx") and "up_proj" not in name:
            rows = 64 if "q_proj" in name and rules else 32
            assert torch.equal(g_idx, torch.arange(len(g_idx), dtype=torch.int32) // rows), name
    assert aware.plan.linears == static.plan.linears
    errors = {linear.name: linear.error for linear in static.linears}
    assert any(linear.error != errors.get(linear.name) for linear in aware.linears)
    assert all(linear.error < 2 * errors.get(linear.name, 1) for linear in aware.linears)
    assert quantkit.load(tmp_path / "aware")(IDS).isfinite().all()


def test_groups_have_one_order(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two ways to form groups"):
        quantize(model, tmp_path / "out", act_order=True, group_aware=True)


# Experts


MIXTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")


@pytest.mark.parametrize("family", MIXTURES)
def test_an_expert_that_no_token_reaches_is_rounded_and_said_so(family: str, tmp_path: Path) -> None:
    source = tiny.write_lonely_mixture(tmp_path / "model", family, num_hidden_layers=1)
    report = quantize(source, tmp_path / "out")
    lonely = {linear.name: linear for linear in report.linears if ".experts.4." in linear.name}
    assert len(lonely) == 3
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    for name, linear in lonely.items():
        assert (linear.routed, linear.tokens, linear.damping) == (0, 0, None)
        assert linear.fallback == "only 0 calibration tokens reached this expert: rounded to nearest"
        assert f"`{name}`: {linear.fallback}" in report.remarks()
        nearest = solve(before.dense(name).float().T.contiguous(), None, GptqCodec(4, 32)).codes.dequantize()
        assert torch.equal(after.dense(name), nearest.T.to(torch.float16))
    others = [linear for linear in report.linears if linear.name not in lonely]
    assert all(linear.tokens > 0 and linear.fallback is None for linear in others)
    assert [(one.block, one.expert, one.solved_with) for one in report.experts] == [
        *((0, number, "own") for number in range(4)),
        (0, 4, "none"),
    ]
    assert sum(expert.tokens for expert in report.experts) == 2 * 8 * 64
    (row,) = next(rows for title, _, rows in report.tables() if title.startswith("experts"))
    assert row[:3] == ["0", "5", "0"] and row[-3:] == ["4", "0", "1"]
    assert report.as_json()["experts"][4] == {"block": 0, "expert": 4, "tokens": 0, "solved_with": "none"}
    assert quantkit.load(tmp_path / "out")(IDS).isfinite().all()


def test_experts_with_few_tokens_are_solved_with_all_of_their_block(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", "MixtralForCausalLM", num_hidden_layers=1)
    report = quantize(source, tmp_path / "out", samples=1, length=12)
    experts = [linear for linear in report.linears if ".experts." in linear.name]
    for linear in experts:
        instead = "solved with all tokens of its block" if linear.routed else "rounded to nearest"
        assert linear.fallback == f"only {linear.routed} calibration tokens reached this expert: {instead}"
        assert linear.tokens == (12 if linear.routed else 0)
    assert sum(linear.tokens > 0 for linear in experts) >= 6
    ways = {0: "none", 12: "own"}  # all of 12 are its own
    assert all(expert.solved_with == ways.get(expert.tokens, "all") for expert in report.experts)
    assert all(linear.fallback is None for linear in report.linears if "self_attn" in linear.name)


@pytest.mark.parametrize("family", MIXTURES)
def test_every_expert_sees_all_tokens_when_asked(family: str, tmp_path: Path) -> None:
    source = tiny.write_lonely_mixture(tmp_path / "model", family, num_hidden_layers=1)
    report = quantize(source, tmp_path / "out", route_all=True)
    experts = [linear for linear in report.linears if ".experts." in linear.name]
    assert len(experts) == 15
    assert all(linear.tokens == 8 * 64 and linear.fallback is None for linear in experts)
    assert [expert.solved_with for expert in report.experts] == ["all"] * 5
    assert report.experts[4].tokens == 0 and sum(expert.tokens for expert in report.experts) == 2 * 8 * 64
    assert quantkit.load(tmp_path / "out")(IDS).isfinite().all()


def test_route_all_is_refused_where_there_is_nothing_to_route(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no experts"):
        quantize(model, tmp_path / "out", route_all=True)
    with pytest.raises(UsageError, match="reads no text"):
        run(QuantizeSettings(str(model), tmp_path / "out", effort="nearest", route_all=True), Silent())
    assert list(tmp_path.iterdir()) == []


# Degraded, and said so


def test_dead_inputs_are_in_the_report(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][7] = 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = quantize(source, tmp_path / "out")
    dead = {linear.name: linear.dead_inputs for linear in report.linears if linear.dead_inputs}
    assert dead == {f"model.layers.1.self_attn.{name}_proj": 1 for name in "qkv"}
    assert "`model.layers.1.self_attn.q_proj`: 1 input features were always zero" in report.remarks()


def test_linears_that_needed_more_damping_are_in_the_report(model: Path, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "out", effort="fast")
    first, *others = report.linears
    damped = replace(report, linears=(replace(first, damping=0.1, extra_damping=True), *others))
    assert damped.remarks() == [*report.remarks(), f"`{first.name}`: needed a damping of 0.1"]
    assert [["`" + first.name + "`: needed a damping of 0.1"]] == damped.tables()[0][2]


def test_a_bias_beyond_float16_is_refused_by_name(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", "Qwen2ForCausalLM")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.bias"][0] = 1e6
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"`model.layers.0.self_attn.k_proj.bias` has values beyond"):
        quantize(source, tmp_path / "out", effort="fast")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_weights_beyond_any_float16_scale_are_refused_by_name(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 3e6
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    both = r"`model\.layers\.1\.mlp\.gate_proj`, `model\.layers\.1\.mlp\.up_proj`: a group of weights spans"
    with pytest.raises(FormatError, match=both):
        quantize(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.job"]


# Read back


def test_a_wrong_packer_is_found_before_the_result_appears(model: Path, tmp_path: Path, monkeypatch) -> None:
    backend = type(kernels.backend("cpu"))
    pack = backend.pack

    def flip_two_bits(self, codes, bits):
        words = pack(self, codes, bits)
        words[0, 0] ^= 0b11
        return words

    monkeypatch.setattr(backend, "pack", flip_two_bits)
    with pytest.raises(GateError, match="does not decode to the weight that was solved"):
        quantize(model, tmp_path / "out", bits=3, effort="fast")
    assert list(tmp_path.iterdir()) == []


# Stopped half-way


class Stopping(Silent):
    """Raises what a Ctrl-C raises, after some linears."""

    @contextmanager
    def task(self, label: str, total: int):
        class Task:
            left = 5

            def advance(self, steps: int = 1, *, note: str = "") -> None:
                self.left -= steps
                if label == "quantize" and self.left == 0:
                    raise KeyboardInterrupt

        yield Task()


def test_interrupted_leaves_what_is_finished_and_nothing_else(model: Path, tmp_path: Path) -> None:
    settings = QuantizeSettings(str(model), tmp_path / "out", group_size=32, samples=4, length=32)
    with pytest.raises(KeyboardInterrupt):
        run(settings, Stopping())
    assert [path.name for path in tmp_path.iterdir()] == ["out.job"]
    (tmp_path / "fast").mkdir()
    with pytest.raises(KeyboardInterrupt):
        run(replace(settings, effort="fast", out=tmp_path / "fast" / "out"), Stopping())
    assert list((tmp_path / "fast").iterdir()) == []


# Measured


def test_the_damage_is_measured_on_text_that_calibration_never_saw(model: Path, tmp_path: Path) -> None:
    damage = quantize(model, tmp_path / "out", evaluate=True).damage
    assert damage.windows == 8
    assert damage.perplexity_reference > 1
    assert 0 < damage.kl_mean < 0.5
    low, high = damage.kl_ci95
    assert low < damage.kl_mean < high
    assert 0.5 < damage.top1_agreement <= 1
    assert damage.answer


def test_text_that_cannot_be_measured_is_refused_before_work(tmp_path: Path) -> None:
    """Calibration text may hold no id that the model lacks, and the text of the measurement one."""
    source = tiny.write_model(tmp_path / "model", vocab_size=270)
    (tmp_path / "text.txt").write_text("a" * 1000)
    calibration = str(tmp_path / "text.txt")
    with pytest.raises(CalibrationError, match="the model knows 270 ids"):
        quantize(source, tmp_path / "out", calibration=calibration, evaluate=True)
    with pytest.raises(CalibrationError, match="the model knows 270 ids"):
        quantize(source, tmp_path / "out", calibration=calibration, effort="best")
    report = quantize(source, tmp_path / "out", calibration=calibration)
    assert report.tuning is None and any("not tuned, as nothing can judge it" in line for line in report.remarks())
    source = tiny.write_model(tmp_path / "short", max_position_embeddings=1)
    with pytest.raises(CalibrationError, match="a model of 1 position predicts nothing"):
        quantize(source, tmp_path / "other", length=1, evaluate=True)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_stop_token_that_the_model_does_not_know_is_told_before_work_and_at_the_end(
    file: str, dry_run: bool, tmp_path: Path
) -> None:
    class Heard(Silent):
        def __init__(self) -> None:
            self.said: list[str] = []

        def say(self, text: str) -> None:
            self.said.append(text)

    source, heard = tiny.write_model(tmp_path / "model", dtype="bfloat16"), Heard()
    (source / file).write_text(json.dumps({**json.loads((source / file).read_text()), "eos_token_id": [2, 10**9]}))
    settings = QuantizeSettings(str(source), tmp_path / "out", bits=4, group_size=32, effort="nearest", evaluate=False)
    report = foresee(settings, heard) if dry_run else run(settings, heard)
    [told] = [remark for remark in report.remarks() if "1000000000" in remark]
    assert str(source) in told and "will have that fault too" in told
    assert told in report.as_json()["remarks"]
    assert dry_run or f"note: {told}" in heard.said


@pytest.mark.parametrize("template", ["{% if", "{{ messages.nobody.nothing }}", "{{ raise_exception('no') }}", "", 5])
def test_a_chat_template_that_fails_spoils_no_result(template: object, tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", num_hidden_layers=1)
    described = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**described, "chat_template": template}))
    damage = quantize(source, tmp_path / "out", evaluate=True).damage
    assert damage is not None
    assert damage.answer


def test_a_perplexity_beyond_numbers_is_null_in_json(tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", num_hidden_layers=1)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] *= 1e4
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = quantize(source, tmp_path / "out", evaluate=True)
    found = json.loads(json.dumps(report.as_json(), allow_nan=False))["evaluation"]
    assert found["perplexity_reference"] is None
    assert found["kl_mean"] > 0


def test_the_summary_has_a_row_for_each_figure(model: Path, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "out", evaluate=True)
    names = [name for name, _ in report.rows()]
    assert {"bits per weight, linears", "effort", "gradients", "time", "peak memory", "mean KL", "perplexity after"} <= set(names)
    assert report.file_bits_per_weight * report.parameters / 8 == report.size_bytes
    json.dumps(report.as_json(), allow_nan=False)
