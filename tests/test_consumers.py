"""Who can load what: each rule of each consumer against the smallest folder that breaks it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from quantkit import consumers
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands.quantize import run
from quantkit.consumers import CONSUMERS, verdicts
from quantkit.formats.gptq_config import GptqSettings
from quantkit.inventory import Inventory, StoredLinear, head_spec, take
from quantkit.models import catalog
from quantkit.models.config import ModelConfig
from quantkit.progress import Silent
from quantkit.settings import QuantizeSettings

SETTINGS = GptqSettings(4, 128)
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}


def inventory(
    family: str = "LlamaForCausalLM",
    settings: GptqSettings = SETTINGS,
    form: str = "gptq",
    said: dict | None = None,
    head: StoredLinear | None = None,
    in_config: bool = True,
    **shape,
) -> Inventory:
    """A model of one block, every linear alike."""
    config = tiny.make_config(family, "float16", **{**SHAPE, **shape})
    model, architecture = ModelConfig.read(config), catalog.find(config)
    linears = tuple(
        StoredLinear(
            name=spec.name,
            linear=spec.name,
            stage=spec.stage,
            in_features=spec.in_features,
            out_features=spec.out_features,
            format=form,
            bias=spec.bias,
            stored_bits=4 * spec.in_features * spec.out_features,
            settings=settings if form == "gptq" else None,
        )
        for spec in architecture.linears(model)
        if spec.quantizable
    )
    quantization = {
        "quant_method": form,
        "bits": settings.bits,
        "group_size": settings.group_size,
        "sym": settings.sym,
        "desc_act": settings.act_order,
        "checkpoint_format": settings.checkpoint_format,
        **(said or {}),
    }
    return Inventory(family, model, model.tie_embeddings, form, quantization, in_config, linears, head)


def changed(before: Inventory, suffix: str | tuple[str, ...], **changes) -> Inventory:
    linears = tuple(replace(linear, **changes) if linear.name.endswith(suffix) else linear for linear in before.linears)
    return replace(before, linears=linears)


def a_head(**changes) -> StoredLinear:
    return StoredLinear(
        "lm_head", "lm_head", "lm_head", 256, 320, "gptq", False, 0, **{"settings": SETTINGS, **changes}
    )


def loads(found: Inventory) -> dict[str, bool | None]:
    return {verdict.consumer: verdict.loads for verdict in verdicts(found)}


def why(found: Inventory, consumer: str) -> str:
    verdict = next(each for each in verdicts(found) if each.consumer == consumer)
    return "\n".join(map(str, (*verdict.objections, *verdict.cautions)))


ALL = {"transformers", "GPTQModel", "vLLM Marlin", "vLLM plain", "SGLang", "exllamav2", "quantkit"}
ASYM_V2 = GptqSettings(4, 128, sym=False, checkpoint_format="gptq_v2")

# A name, the folder, the consumers that do not load it, and words of one of their reasons.
CASES = [
    ("the usual", inventory(), set(), None),
    ("8 bits", inventory(settings=GptqSettings(8, 128)), {"exllamav2"}, ("exllamav2", "8 bits; it takes 4")),
    (
        "3 bits",
        inventory(settings=GptqSettings(3, 128)),
        {"vLLM Marlin", "exllamav2"},
        ("vLLM Marlin", "it takes 4, 8"),
    ),
    ("6 bits", inventory(settings=GptqSettings(6, 128)), ALL - {"quantkit"}, ("transformers", "it takes 2, 3, 4, 8")),
    (
        "rules for parts of a fused linear",
        changed(
            inventory(said={"dynamic": {r".*\.mlp\.(gate|up)_proj": {"group_size": 64}}}),
            ("gate_proj", "up_proj"),
            settings=replace(SETTINGS, group_size=64),
        ),
        {"transformers"},
        ("SGLang", "older versions look for `gate_up_proj`"),
    ),
    ("asymmetric v2", inventory(settings=ASYM_V2), {"vLLM Marlin"}, ("vLLM Marlin", "takes symmetric only")),
    (
        "asymmetric v1",
        inventory(settings=GptqSettings(4, 128, sym=False)),
        {"vLLM Marlin", "GPTQModel"},
        ("GPTQModel", "`gptq_v2` is accepted"),
    ),
    (
        "asymmetric v1 of GPTQModel",
        inventory(settings=GptqSettings(4, 128, sym=False), said={"meta": {"quantizer": ["gptqmodel:7.7.0"]}}),
        {"vLLM Marlin"},
        None,
    ),
    (
        "groups of 16",
        inventory(settings=GptqSettings(4, 16)),
        {"vLLM Marlin"},
        ("vLLM Marlin", "group size 16; it takes"),
    ),
    (
        "groups of 48",
        inventory(settings=GptqSettings(4, 48)),
        ALL - {"quantkit"},
        ("exllamav2", "6 groups of 48; it takes them to be of 64"),
    ),
    ("one group", inventory(settings=GptqSettings(4, -1)), set(), ("transformers", "wrong results on a CPU")),
    (
        "one group by its rows",
        changed(inventory(), "o_proj", settings=replace(SETTINGS, group_size=256)),
        {"transformers"},
        None,
    ),
    (
        "a short last group",
        inventory(hidden_size=320),
        {"vLLM Marlin", "vLLM plain", "SGLang"},
        ("vLLM Marlin", "320 inputs are no multiple of 128"),
    ),
    (
        "narrow outputs",
        inventory(num_key_value_heads=1, head_dim=16, num_attention_heads=2, settings=GptqSettings(4, 32)),
        {"vLLM Marlin", "exllamav2", "GPTQModel", "transformers", "quantkit"},
        ("quantkit", "no multiple of 32"),
    ),
    (
        "outputs are counted together where they are fused",
        inventory(num_key_value_heads=1, head_dim=32, num_attention_heads=4),
        set(),
        None,
    ),
    (
        "odd outputs, fused",
        changed(inventory(num_key_value_heads=1, head_dim=32, num_attention_heads=4), "v_proj", out_features=64),
        {"vLLM Marlin"},
        ("vLLM Marlin", "224 outputs (q_proj + k_proj + v_proj) are no multiple of 64"),
    ),
    ("outputs of no whole word", changed(inventory(), "o_proj", out_features=252), ALL, None),
    (
        "odd inputs",
        changed(inventory(), "o_proj", in_features=72),
        ALL,
        ("quantkit", "72 inputs are no multiple of 32"),
    ),
    ("no method", inventory(said={"quant_method": None}), set(), None),
    (
        "a method by its other name",
        replace(
            inventory(), quantization={"bits": 4, "group_size": 128, "sym": True, "desc_act": False, "method": "gptq"}
        ),
        {"transformers"},
        ("transformers", "`quant_method` is missing"),
    ),
    (
        "a dense linear in the block",
        changed(inventory(), "down_proj", format="dense", settings=None),
        {"transformers"},
        ("transformers", "`model.layers.0.mlp.down_proj`: dense, which"),
    ),
    (
        "a dense linear, announced",
        changed(
            inventory(
                said={
                    "modules_in_block_to_quantize": [["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]]
                }
            ),
            "down_proj",
            format="dense",
            settings=None,
        ),
        set(),
        None,
    ),
    (
        "a rule for one linear",
        changed(inventory(), "down_proj", settings=GptqSettings(8, 32)),
        {"transformers", "exllamav2"},
        ("transformers", "8 bits, group size 32 by a `dynamic` rule"),
    ),
    (
        "a rule that splits what is fused",
        changed(inventory(), "v_proj", settings=GptqSettings(8, 128)),
        {"transformers", "vLLM Marlin", "vLLM plain", "SGLang", "exllamav2"},
        ("vLLM plain", "q_proj, k_proj, v_proj are run as one, but their settings differ"),
    ),
    (
        "orders that differ",
        changed(inventory(settings=GptqSettings(4, 128, act_order=True)), "up_proj", scattered="b"),
        {"vLLM Marlin", "vLLM plain", "SGLang"},
        ("SGLang", "their `g_idx` differ"),
    ),
    (
        "a quantized head",
        inventory(head=a_head(), said={"lm_head": True}),
        {"transformers"},
        ("transformers", "a quantized head is not read there"),
    ),
    (
        "a quantized head, not announced",
        inventory(head=a_head()),
        {"transformers", "GPTQModel", "vLLM Marlin", "vLLM plain", "SGLang"},
        ("GPTQModel", "`lm_head` is not true"),
    ),
    (
        "a quantized head under a tie",
        inventory(head=a_head(), said={"lm_head": True}, tie_word_embeddings=True),
        ALL - {"exllamav2"},
        ("SGLang", "it takes the embedding"),
    ),
    (
        "settings beside the config",
        inventory(in_config=False),
        {"transformers"},
        ("transformers", "the only place where it looks"),
    ),
    (
        "v2 beside the config",
        inventory(settings=ASYM_V2, in_config=False),
        {"transformers", "vLLM Marlin", "exllamav2"},
        ("exllamav2", "`checkpoint_format` must stand in config.json"),
    ),
    (
        "no settings",
        replace(inventory(in_config=False), quantization=None),
        {"transformers", "GPTQModel", "vLLM Marlin", "vLLM plain", "SGLang"},
        ("GPTQModel", "no quantization settings"),
    ),
    (
        "no word of symmetry",
        inventory(said={"sym": None}),
        {"vLLM Marlin", "vLLM plain", "SGLang"},
        ("SGLang", "`sym` is missing"),
    ),
    (
        "zero points of 0",
        changed(inventory(settings=GptqSettings(4, 128, sym=False)), "q_proj", zero_points=(0, 15)),
        {"vLLM Marlin", "GPTQModel", "vLLM plain", "SGLang", "exllamav2"},
        ("vLLM plain", "zero points may be 0"),
    ),
    (
        "zero points of 0 in v2",
        changed(inventory(settings=ASYM_V2), "q_proj", zero_points=(0, 15)),
        {"vLLM Marlin", "exllamav2"},
        ("exllamav2", "zero points may be 0"),
    ),
    (
        "symmetric by word only",
        changed(inventory(), "q_proj", zero_points=(7, 9)),
        {"vLLM Marlin"},
        ("vLLM Marlin", "it would not look at them"),
    ),
    (
        "fused on disk",
        inventory("Phi3ForCausalLM", hidden_size=256),
        {"GPTQModel", "exllamav2"},
        ("exllamav2", "the parts of a fused linear"),
    ),
    (
        "names of GPTQModel",
        changed(inventory(), "up_proj", name="model.layers.0.mlp.other"),
        {"transformers", "vLLM Marlin", "vLLM plain", "SGLang"},
        ("vLLM plain", "another name than `up_proj`"),
    ),
    (
        "experts",
        inventory("Qwen3MoeForCausalLM", moe_intermediate_size=128),
        {"transformers"},
        ("transformers", "runs random ones"),
    ),
    (
        "narrow experts",
        inventory("Qwen3MoeForCausalLM", moe_intermediate_size=96, settings=GptqSettings(4, 32)),
        {"transformers", "vLLM Marlin", "SGLang"},
        ("SGLang", "expert width 96 is no multiple of 64"),
    ),
    (
        "a family that exllamav2 lacks",
        inventory("Qwen2MoeForCausalLM", moe_intermediate_size=128, shared_expert_intermediate_size=128),
        {"transformers", "exllamav2"},
        ("exllamav2", "does not know"),
    ),
    ("bfloat16", inventory(torch_dtype="bfloat16"), set(), ("vLLM plain", "computes in float16 only")),
    (
        "exl2 of a family that exllamav2 lacks",
        inventory("Qwen2MoeForCausalLM", form="exl2"),
        ALL - {"quantkit"},
        ("exllamav2", "does not know"),
    ),
    (
        "exl2, fused on disk",
        inventory("Phi3ForCausalLM", form="exl2"),
        ALL - {"quantkit"},
        ("exllamav2", "the parts of a fused linear"),
    ),
    ("exl2", inventory(form="exl2"), ALL - {"exllamav2", "quantkit"}, ("GPTQModel", "does not read EXL2")),
    (
        "exl2 with an odd bias",
        changed(inventory(form="exl2"), "q_proj", bias=True, out_features=72),
        ALL - {"quantkit"},
        ("exllamav2", "has a bias, and 72 outputs"),
    ),
    (
        "exl2 of odd inputs",
        changed(inventory(form="exl2"), "q_proj", in_features=72),
        ALL - {"quantkit"},
        ("exllamav2", "72 inputs"),
    ),
]


@pytest.mark.parametrize(("found", "refused", "words"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_who_loads_what(found: Inventory, refused: set[str], words: tuple[str, str] | None) -> None:
    assert {consumer for consumer, good in loads(found).items() if not good} == refused
    if words is not None:
        assert words[1] in why(found, words[0])


def test_every_rule_is_broken_by_a_case() -> None:
    """A rule that nothing breaks is not tested; a consumer's rule counts where it is that consumer's own."""
    unbroken = {}
    for consumer in CONSUMERS:
        for form, rules in consumer.rules.items():
            for number, rule in enumerate(rules):
                cases = [case[1] for case in CASES if case[1].method == form] + [DENSE_CASE] * (form == "dense")
                if not any(list(rule.check(case)) for case in cases):
                    unbroken[consumer.name, form, number] = rule.source
    assert not unbroken


DENSE_CASE = replace(
    changed(inventory("Qwen2MoeForCausalLM", form="dense"), "o_proj", name="model.layers.0.self_attn.out"),
    method=None,
    quantization=None,
)


def test_a_dense_folder() -> None:
    found = replace(inventory(form="dense"), method=None, quantization=None)
    assert loads(found) == {**dict.fromkeys(ALL, True), "vLLM Marlin": False}


def test_another_method_is_not_known_here() -> None:
    found = inventory(form="awq")
    assert loads(found) == {**dict.fromkeys(ALL, None), "quantkit": False}


def test_reasons_are_counted() -> None:
    assert "(and 6 more)" in why(inventory(settings=GptqSettings(8, 128)), "exllamav2")


def test_every_rule_says_where_it_is_known_from() -> None:
    rules = [rule for consumer in CONSUMERS for group in consumer.rules.values() for rule in group]
    assert all(rule.source.split(":")[0] in ("run", "source", "issue", "nobody tried") for rule in rules)


# From a real folder


@pytest.mark.parametrize("options", [{"act_order": True}, {"sym": False}, {}])
def test_a_folder_is_seen_as_it_was_written(options: dict, tmp_path: Path) -> None:
    source = tiny.write_model(tmp_path / "model", hidden_size=128, intermediate_size=256)
    settings = {"group_size": 32, "samples": 4, "length": 32, "effort": "fast", "evaluate": False, **options}
    run(QuantizeSettings(str(source), tmp_path / "out", **settings), Silent())
    found = take(open_checkpoint(tmp_path / "out"))
    checkpoint = open_checkpoint(tmp_path / "out")
    assert found.method == "gptq" and found.in_config and found.family == "LlamaForCausalLM"
    assert [linear.linear for linear in found.linears] == checkpoint.linears()
    assert {linear.settings.sym for linear in found.linears} == {options.get("sym", True)}
    assert all(linear.stored_bits == checkpoint.linear(linear.name).stored_bits for linear in found.linears)
    scattered = {linear.stage: linear.scattered for linear in found.linears}
    assert all(scattered.values()) if options.get("act_order") else not any(scattered.values())
    assert all(linear.scattered == scattered[linear.stage] for linear in found.linears)
    assert loads(found)["vLLM Marlin"] == options.get("sym", True)
    assert found.head is not None and found.head.format == "dense"


def test_targets_are_consumers() -> None:
    named = {name for groups in consumers.TARGETS.values() for group in groups for name in group}
    assert named == {consumer.name for consumer in CONSUMERS} - {"quantkit"}
    assert head_spec(inventory().config).out_features == 320
    assert json.dumps([str(objection) for verdict in verdicts(inventory()) for objection in verdict.objections]) == "[]"


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        (r"+:.*\.mlp\.(gate|up)_proj", True),
        (r"+:.*\.mlp\.(gate|up|gate_up)_proj", False),
        (r"+:.*\.mlp\.", False),
        (r"+:.*down_proj", False),
    ],
)
def test_rules_that_older_readers_of_fused_linears_would_miss_are_told(pattern: str, told: bool) -> None:
    found = inventory(said={"dynamic": {pattern: {"bits": 8}}})
    names = (linear.name for linear in found.linears)
    matched = tuple(name for name in names if re.match(pattern.removeprefix("+:"), name))
    found = changed(found, matched, settings=replace(SETTINGS, bits=8))
    for consumer in ("vLLM Marlin", "vLLM plain", "SGLang"):
        assert ("older versions look for `gate_up_proj`" in why(found, consumer)) == told
        assert loads(found)[consumer]
