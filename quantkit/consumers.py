"""Consumers: who else can load a folder, and if not, which linear stands in the way and why.

    for verdict in verdicts(inventory): verdict.consumer, verdict.loads, verdict.objections

Each consumer is an entry of CONSUMERS: for each format the rules that it has. A rule is a small function from an
inventory to the objections it finds, together with where the fact is known from. A caution does not stop loading.
Sources: "run" was seen by running that tool, "source" was read in its code, "issue" was told by its users or makers;
"nobody tried" says that nothing is known.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantkit import consumer_rules as asks
from quantkit.consumer_rules import Check, Objection
from quantkit.inventory import DENSE, EXL2, GPTQ, Inventory

OURS = "quantkit"
# What `--target` names → groups of consumers; of each group one has to load the folder, the first by preference.
TARGETS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "transformers": (("transformers",),),
    "gptqmodel": (("GPTQModel",),),
    "vllm": (("vLLM Marlin", "vLLM plain"),),
    "exllamav2": (("exllamav2",),),
    "any": (("transformers",), ("GPTQModel",), ("vLLM Marlin",), ("SGLang",), ("exllamav2",)),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """`source` says where the fact is known from. A caution is told, and stops nothing."""

    check: Check
    source: str
    caution: bool = False


@dataclass(frozen=True, slots=True)
class Consumer:
    """One reader of model folders: its rules for each format that it reads at all."""

    name: str
    rules: Mapping[str, tuple[Rule, ...]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`loads` None: not known here. Objections are the first of each rule, with how many more linears it concerns."""

    consumer: str
    loads: bool | None
    objections: tuple[Objection, ...] = ()
    cautions: tuple[Objection, ...] = ()


def verdicts(inventory: Inventory) -> list[Verdict]:
    """Of every consumer, in the order of CONSUMERS."""
    return [judge(consumer, inventory) for consumer in CONSUMERS]


def judge(consumer: Consumer, inventory: Inventory) -> Verdict:
    """What becomes of this folder in the hands of that consumer."""
    form = inventory.method or DENSE
    if form not in (DENSE, GPTQ, EXL2):
        if consumer.name == OURS:
            return Verdict(consumer.name, False, (Objection(None, f"`{form}` is no format that is read here"),))
        return Verdict(consumer.name, None, (Objection(None, f"what it makes of `{form}` is not known here"),))
    if form not in consumer.rules:
        return Verdict(consumer.name, False, (Objection(None, f"does not read {_SPELLED[form]}"),))
    found: dict[bool, list[Objection]] = {False: [], True: []}
    for rule in consumer.rules[form]:
        found[rule.caution] += _first_of(list(rule.check(inventory)))
    return Verdict(consumer.name, not found[False], tuple(found[False]), tuple(found[True]))


def _first_of(objections: list[Objection]) -> list[Objection]:
    """One for each reason, and how many others there are."""
    kept: dict[str, tuple[Objection, int]] = {}
    for objection in objections:
        first, count = kept.get(objection.why, (objection, 0))
        kept[objection.why] = first, count + 1
    return [
        first if count == 1 else Objection(first.linear, f"{first.why} (and {count - 1} more)")
        for first, count in kept.values()
    ]


_SPELLED = {DENSE: "unquantized models", GPTQ: "GPTQ", EXL2: "EXL2"}


# The consumers

HF_NAMES = Rule(asks.own_names, "run: transformers 5.24 knows the names of its own checkpoints only")
TORCH_GROUPS = Rule(asks.group_sizes(-1, 16, 32, 64, 128, 256, 512, 1024), "run: GPTQModel 7.7, torch kernel")
TORCH_WIDTHS = Rule(asks.widths(2, 3, 4, 8), "run: GPTQModel 7.7, torch kernel")
WORDS = (
    Rule(asks.inputs_divide(32), "source: words of 32 bits along the inputs"),
    Rule(asks.outputs_divide(32), "source: words of 32 bits along the outputs"),
)
VLLM_KEYS = Rule(asks.says_keys("bits", "group_size", "desc_act", "sym"), "source: vLLM, GPTQConfig.from_config")
VLLM_HEAD = Rule(asks.head_is_announced, "source: vLLM reads `lm_head` of the settings")
FUSED = Rule(asks.fused_alike, "source: vLLM and SGLang run q/k/v and gate/up as one linear with one `g_idx`")
FUSED_NAMES = Rule(
    asks.rules_know_fused, "issue: vLLM matched `dynamic` with the names of fused linears at first", caution=True
)
UNTIED = Rule(asks.head_is_untied, "issue: SGLang 2935, a quantized head under a config that ties it")

TRANSFORMERS = (
    Rule(asks.settings_in_config, "source: transformers reads `quantization_config` of config.json"),
    Rule(asks.says_method, "source: transformers, AutoHfQuantizer"),
    TORCH_WIDTHS,
    TORCH_GROUPS,
    *WORDS,
    Rule(asks.one_setting, "run: transformers 5.24 with optimum 2.3 ignores `dynamic`"),
    Rule(asks.all_or_listed, "run: transformers 5.24 with optimum 2.3"),
    Rule(asks.dense_head, "run: transformers 5.24 with optimum 2.3 knows no `lm_head` setting"),
    HF_NAMES,
    Rule(asks.no_experts, "run: transformers 5.24 on Mixtral, Qwen2-MoE and Qwen3-MoE"),
    Rule(asks.groups_divide, "run: GPTQModel's kernels for CPUs, as transformers chooses them", caution=True),
    Rule(
        asks.whole_columns_at_four_bits,
        "run: GPTQModel's 4-bit kernel for CPUs, as transformers 5.24 chooses it: off by 1e-2, asymmetric by 1.3",
        caution=True,
    ),
)
GPTQMODEL = (
    Rule(asks.has_settings, "source: GPTQModel, QuantizeConfig.from_pretrained"),
    TORCH_WIDTHS,
    TORCH_GROUPS,
    *WORDS,
    Rule(asks.head_is_announced, "source: GPTQModel reads `lm_head` of the settings"),
    UNTIED,
    Rule(asks.parted_for_gptqmodel, "run: GPTQModel 7.7 on Phi-3 and Mixtral"),
    Rule(asks.writer_is_trusted, "run: GPTQModel 7.7 refuses asymmetric v1 files unless `gptqmodel` wrote them"),
)
MARLIN = (
    Rule(asks.has_settings, "source: vLLM looks into config.json and quantize_config.json"),
    VLLM_KEYS,
    Rule(asks.widths(4, 8), "source: vLLM, GPTQMarlinConfig"),
    Rule(asks.group_sizes(-1, 32, 64, 128), "source: vLLM, MARLIN_SUPPORTED_GROUP_SIZES"),
    Rule(asks.is_symmetric, "source: vLLM, GPTQMarlinConfig: symmetric only, qzeros are not looked at"),
    Rule(asks.inputs_divide(128), "source: vLLM, GPTQ_MARLIN_MIN_THREAD_K"),
    Rule(asks.fused_outputs_divide({4: 64, 8: 64}), "source: vLLM, GPTQ_MARLIN_MIN_THREAD_N of the fused linear"),
    Rule(asks.groups_divide, "source: vLLM, check_marlin_supports_shape"),
    Rule(asks.expert_shapes, "source: vLLM, check_moe_marlin_supports_layer"),
    FUSED,
    FUSED_NAMES,
    VLLM_HEAD,
    UNTIED,
    HF_NAMES,
)
PLAIN = (
    Rule(asks.has_settings, "source: vLLM looks into config.json and quantize_config.json"),
    VLLM_KEYS,
    Rule(asks.widths(2, 3, 4, 8), "source: vLLM, GPTQConfig"),
    Rule(asks.groups_divide, "source: vLLM, GPTQLinearMethod.create_weights"),
    Rule(asks.fused_outputs_divide({2: 16, 3: 32, 4: 8, 8: 4}), "source: vLLM, GPTQLinearMethod.create_weights"),
    Rule(asks.no_zero_of_zero("gptq"), "source: vLLM adds 1 to each field without a mask"),
    FUSED,
    FUSED_NAMES,
    VLLM_HEAD,
    UNTIED,
    HF_NAMES,
    Rule(asks.reads_v2, "issue: vLLM PR 26092", caution=True),
    Rule(asks.half_only, "source: vLLM, GPTQConfig.get_supported_act_dtypes", caution=True),
    Rule(asks.has_experts, "nobody tried", caution=True),
    Rule(asks.is_asked_for, "source: vLLM routes `quant_method` gptq to the Marlin class", caution=True),
)
EXLLAMAV2_FAMILIES = Rule(
    asks.families(
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Phi3ForCausalLM",
    ),
    "source: exllamav2 0.3.2, architecture.py",
)
EXLLAMAV2_PARTS = Rule(asks.parted_on_disk, "source: exllamav2, module.py: load_weight_fused reads `.weight`, `.bias`")


def marlin_or_plain(inventory: Inventory) -> Iterator[Objection]:
    """SGLang has both of vLLM's classes; mixtures of experts run in the first only."""
    marlin = [objection for rule in MARLIN if not rule.caution for objection in rule.check(inventory)]
    plain = [objection for rule in PLAIN if not rule.caution for objection in rule.check(inventory)]
    if marlin and (plain or inventory.config.experts is not None):
        yield from marlin if inventory.config.experts is not None else plain


CONSUMERS = (
    Consumer("transformers", {DENSE: (HF_NAMES,), GPTQ: TRANSFORMERS}),
    Consumer("GPTQModel", {DENSE: (HF_NAMES,), GPTQ: GPTQMODEL}),
    Consumer("vLLM Marlin", {GPTQ: MARLIN}),
    Consumer("vLLM plain", {DENSE: (HF_NAMES,), GPTQ: PLAIN}),
    Consumer(
        "SGLang",
        {DENSE: (HF_NAMES,), GPTQ: (Rule(marlin_or_plain, "source: SGLang has vLLM's two classes"), FUSED_NAMES)},
    ),
    Consumer(
        "exllamav2",
        {
            DENSE: (EXLLAMAV2_FAMILIES,),
            GPTQ: (
                EXLLAMAV2_FAMILIES,
                EXLLAMAV2_PARTS,
                Rule(asks.widths(4), "source: exllamav2, ext_qmatrix.cpp"),
                *WORDS,
                Rule(asks.group_is_power_of_two, "source: exllamav2 infers the group size"),
                Rule(asks.v2_is_announced, "source: exllamav2, config.py"),
                Rule(
                    asks.no_zero_of_zero("gptq", "gptq_v2"),
                    "source: exllamav2 makes v1 of v2 by the packed constant, then adds 1 to each field without a mask",
                ),
            ),
            EXL2: (
                EXLLAMAV2_FAMILIES,
                EXLLAMAV2_PARTS,
                Rule(asks.inputs_divide(16), "source: exllamav2, q_matrix.cu"),
                Rule(asks.bias_fits, "run: exllamav2 0.3.2 fails on a bias that it has to pad"),
            ),
        },
    ),
    Consumer(OURS, {DENSE: (), GPTQ: (*WORDS, UNTIED), EXL2: ()}),
)
