"""What a consumer may ask of a folder: small functions from an inventory to the objections that they find.

Which consumer asks what, and where that is known from, stands in `consumers`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from quantkit.checkpoint.spelling import fused_of, parts_of
from quantkit.formats.gptq_config import GptqConfig
from quantkit.inventory import DENSE, EXL2, GPTQ, Inventory, StoredLinear

Check = Callable[[Inventory], Iterable["Objection"]]


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a folder is not loaded, or not as it is meant; `linear` is None where it is the folder as a whole."""

    linear: str | None
    why: str

    def __str__(self) -> str:
        return self.why if self.linear is None else f"`{self.linear}`: {self.why}"


# Rules that are the same question with other numbers


def widths(*allowed: int) -> Check:
    def check(inventory: Inventory) -> Iterator[Objection]:
        for linear in _gptq(inventory):
            if linear.settings and linear.settings.bits not in allowed:
                yield Objection(linear.name, f"{linear.settings.bits} bits; it takes {_listed(allowed)}")

    return check


def group_sizes(*allowed: int) -> Check:
    """A group of all rows goes by -1 and by their number."""

    def check(inventory: Inventory) -> Iterator[Objection]:
        for linear in _gptq(inventory):
            size = linear.settings.group_size if linear.settings else -1
            if size not in allowed and size != linear.in_features:
                yield Objection(linear.name, f"group size {size}; it takes {_listed(allowed)}")

    return check


def inputs_divide(step: int) -> Check:
    def check(inventory: Inventory) -> Iterator[Objection]:
        for linear in _quantized(inventory):
            if linear.in_features % step:
                yield Objection(linear.name, f"{linear.in_features} inputs are no multiple of {step}")

    return check


def outputs_divide(step: int) -> Check:
    """Of each linear as it is stored."""

    def check(inventory: Inventory) -> Iterator[Objection]:
        for linear in _quantized(inventory):
            if linear.out_features % step:
                yield Objection(linear.name, f"{linear.out_features} outputs are no multiple of {step}")

    return check


def fused_outputs_divide(step_at: Mapping[int, int]) -> Check:
    """Of the linears that share an input together, since they are run as one; the step follows from the bits."""

    def check(inventory: Inventory) -> Iterator[Objection]:
        for stage in _stages(inventory):
            together = sum(linear.out_features for linear in stage)
            step = step_at.get(stage[0].settings.bits, 1) if stage[0].settings else 1
            if together % step:
                names = " + ".join(_last(linear.name) for linear in stage)
                yield Objection(stage[0].name, f"{together} outputs ({names}) are no multiple of {step}")

    return check


def families(*known: str) -> Check:
    def check(inventory: Inventory) -> Iterator[Objection]:
        if inventory.family not in known:
            yield Objection(None, f"does not know `{inventory.family}`")

    return check


def says_keys(*keys: str) -> Check:
    def check(inventory: Inventory) -> Iterator[Objection]:
        for key in keys:
            if (inventory.quantization or {}).get(key) is None:
                yield Objection(None, f"`{key}` is missing in the quantization settings")

    return check


# Rules of their own


def groups_divide(inventory: Inventory) -> Iterator[Objection]:
    for linear in _gptq(inventory):
        if linear.in_features % linear.group_rows:
            yield Objection(linear.name, f"groups of {linear.group_rows} do not divide {linear.in_features} inputs")


def whole_columns_at_four_bits(inventory: Inventory) -> Iterator[Objection]:
    for linear in _gptq(inventory):
        if linear.settings and linear.settings.bits == 4 and linear.group_rows >= linear.in_features:
            yield Objection(linear.name, "4 bits in one group of all rows: wrong results on a CPU, untried on a GPU")


def is_symmetric(inventory: Inventory) -> Iterator[Objection]:
    """By the word of the config, and by the zero points where those were looked at: Marlin never looks at them."""
    for linear in _gptq(inventory):
        if linear.settings is None:
            continue
        middle = 1 << linear.settings.bits - 1
        if not linear.settings.sym:
            yield Objection(linear.name, "asymmetric; it takes symmetric only")
        elif linear.zero_points not in (None, (middle, middle)):
            yield Objection(linear.name, "`sym` is true but zero points differ, and it would not look at them")


def settings_in_config(inventory: Inventory) -> Iterator[Objection]:
    if not inventory.in_config:
        yield Objection(None, "no `quantization_config` in config.json, the only place where it looks")


def has_settings(inventory: Inventory) -> Iterator[Objection]:
    if inventory.quantization is None:
        yield Objection(None, "no quantization settings, neither in config.json nor in quantize_config.json")


def says_method(inventory: Inventory) -> Iterator[Objection]:
    if inventory.quantization is not None and "quant_method" not in inventory.quantization:
        yield Objection(None, "`quant_method` is missing in the quantization settings")


def one_setting(inventory: Inventory) -> Iterator[Objection]:
    """`dynamic` is not read there: every linear must be as the base settings say."""
    base = (inventory.quantization or {}).get("bits"), (inventory.quantization or {}).get("group_size", 128)
    for linear in _gptq(inventory):
        own = (linear.settings.bits, linear.settings.group_size) if linear.settings else base
        if own != base:
            yield Objection(linear.name, f"{own[0]} bits, group size {own[1]} by a `dynamic` rule, which it ignores")


def all_or_listed(inventory: Inventory) -> Iterator[Objection]:
    """Every linear of the blocks is quantized, or `modules_in_block_to_quantize` names those that are."""
    said = (inventory.quantization or {}).get("modules_in_block_to_quantize")
    listed = _flat(said) if said else None
    for linear in inventory.linears:
        named = listed is None or any(f".{suffix}" in linear.name for suffix in listed)
        if (linear.format != DENSE) != named:
            state = "dense" if linear.format == DENSE else "quantized"
            yield Objection(linear.name, f"{state}, which `modules_in_block_to_quantize` does not say")


def dense_head(inventory: Inventory) -> Iterator[Objection]:
    if inventory.head is not None and inventory.head.format != DENSE:
        yield Objection(inventory.head.name, "a quantized head is not read there")


def head_is_announced(inventory: Inventory) -> Iterator[Objection]:
    head, said = inventory.head, inventory.quantization or {}
    if head is not None and head.format == GPTQ and not said.get("lm_head"):
        yield Objection(head.name, "quantized, but `lm_head` is not true in the settings")


def head_is_untied(inventory: Inventory) -> Iterator[Objection]:
    if inventory.tied and inventory.head is not None and inventory.head.format == GPTQ:
        yield Objection(inventory.head.name, "quantized, but `tie_word_embeddings` is true: it takes the embedding")


def own_names(inventory: Inventory) -> Iterator[Objection]:
    for linear in inventory.linears:
        if linear.name != linear.linear:
            yield Objection(linear.name, f"goes by another name than `{_last(linear.linear)}`")


def no_experts(inventory: Inventory) -> Iterator[Objection]:
    for linear in _quantized(inventory):
        if linear.is_expert:
            yield Objection(
                linear.name, "quantized experts: it stacks experts, leaves these unread and runs random ones"
            )


def has_experts(inventory: Inventory) -> Iterator[Objection]:
    if inventory.config.experts is not None:
        yield Objection(None, "a mixture of experts: not known here whether this class runs it")


def parted_for_gptqmodel(inventory: Inventory) -> Iterator[Objection]:
    """GPTQModel takes apart what Phi-3 fuses in its MLP, and calls the experts of Mixtral by other names."""
    for linear in _quantized(inventory):
        if _last(linear.name) == "gate_up_proj" or ".block_sparse_moe." in linear.name:
            yield Objection(linear.name, "goes by another name there: `mlp.gate_proj`, `mlp.experts.0.up_proj`, …")


def parted_on_disk(inventory: Inventory) -> Iterator[Objection]:
    """Linears that a family fuses are split only while they are not quantized."""
    for linear in _quantized(inventory):
        if parts_of(linear.name):
            yield Objection(linear.name, "quantized as one; it takes the parts of a fused linear one by one")


def fused_alike(inventory: Inventory) -> Iterator[Objection]:
    """Linears that share an input are run as one: one setting for all, one order of rows."""
    for stage in _stages(inventory):
        settings = {(linear.format, linear.settings) for linear in stage}
        names = ", ".join(_last(linear.name) for linear in stage)
        if len(settings) > 1:
            yield Objection(stage[0].name, f"{names} are run as one, but their settings differ")
        elif len({linear.scattered for linear in stage}) > 1:
            yield Objection(stage[0].name, f"{names} are run as one, but their `g_idx` differ")


def rules_know_fused(inventory: Inventory) -> Iterator[Objection]:
    """Older versions match `dynamic` with the name of the linear that several are run as."""
    said = inventory.quantization or {}
    if not said.get("dynamic"):
        return
    config = GptqConfig.read(dict(said))
    for stage in _stages(inventory):
        first, fused = stage[0].name, fused_of(stage[0].name)
        if fused and len(stage) > 1 and config.for_module(fused) != stage[0].settings:
            other = f"older versions look for `{_last(fused)}`, of which the rules in `dynamic` say otherwise"
            yield Objection(first, other)


def expert_shapes(inventory: Inventory) -> Iterator[Objection]:
    sizes = inventory.config.experts
    for linear in _gptq(inventory):
        if not linear.is_expert or sizes is None:
            continue
        step = max(64, linear.group_rows if linear.group_rows < linear.in_features else 64)
        if inventory.config.hidden_size % 128:
            yield Objection(linear.name, f"width {inventory.config.hidden_size} is no multiple of 128, as experts need")
        if sizes.width % step:
            yield Objection(linear.name, f"expert width {sizes.width} is no multiple of {step}")


def writer_is_trusted(inventory: Inventory) -> Iterator[Objection]:
    """Asymmetric v1 files are taken from one writer only, since others lost zero points of 0."""
    said = inventory.quantization or {}
    meta = said.get("meta")
    written = meta.get("quantizer") if isinstance(meta, Mapping) else None
    writers = [written] if isinstance(written, str) else written or []
    trusted = any(str(writer).startswith("gptqmodel:") for writer in writers)
    for linear in _gptq(inventory):
        settings = linear.settings
        if settings and not settings.sym and settings.checkpoint_format == "gptq" and not trusted:
            yield Objection(linear.name, "asymmetric in `gptq` (v1) format by another writer; `gptq_v2` is accepted")


def no_zero_of_zero(*formats: str) -> Check:
    """v1 holds zero point - 1; a 0 borrows from its neighbour, which a reader that adds 1 to each field gets wrong."""

    def check(inventory: Inventory) -> Iterator[Objection]:
        for linear in _gptq(inventory):
            affected = linear.settings is not None and linear.settings.checkpoint_format in formats
            if affected and linear.zero_points and linear.zero_points[0] == 0:
                yield Objection(linear.name, "zero points may be 0, which it reads as others")

    return check


def reads_v2(inventory: Inventory) -> Iterator[Objection]:
    for linear in _gptq(inventory):
        if linear.settings and linear.settings.checkpoint_format == "gptq_v2":
            yield Objection(None, "`gptq_v2` needs a vLLM from autumn 2025 on; older ones read it as `gptq`, wrongly")
            return


def v2_is_announced(inventory: Inventory) -> Iterator[Objection]:
    """The format is looked up in config.json alone."""
    for linear in _gptq(inventory):
        if linear.settings and linear.settings.checkpoint_format == "gptq_v2" and not inventory.in_config:
            yield Objection(None, "`checkpoint_format` must stand in config.json: it reads `gptq` otherwise")
            return


def group_is_power_of_two(inventory: Inventory) -> Iterator[Objection]:
    """The size is taken to be the least power of two that makes so many groups enough."""
    for linear in _gptq(inventory):
        rows, groups = linear.in_features, -(-linear.in_features // linear.group_rows)
        size = 1
        while size * groups < rows:
            size *= 2
        if size != linear.group_rows and groups > 1:
            yield Objection(linear.name, f"{groups} groups of {linear.group_rows}; it takes them to be of {size}")


def bias_fits(inventory: Inventory) -> Iterator[Objection]:
    for linear in _quantized(inventory):
        if linear.bias and linear.out_features % 32:
            yield Objection(linear.name, f"has a bias, and {linear.out_features} outputs are no multiple of 32")


def half_only(inventory: Inventory) -> Iterator[Objection]:
    if inventory.config.dtype not in (None, "float16"):
        yield Objection(None, "computes in float16 only: `--dtype half`")


def is_asked_for(inventory: Inventory) -> Iterator[Objection]:
    yield Objection(None, "newest versions take the Marlin class unless told otherwise: `--quantization gptq`")


# Of what the rules speak


def _quantized(inventory: Inventory) -> list[StoredLinear]:
    return [linear for linear in inventory.quantized if linear.format in (GPTQ, EXL2)]


def _gptq(inventory: Inventory) -> list[StoredLinear]:
    return [linear for linear in inventory.quantized if linear.format == GPTQ]


def _stages(inventory: Inventory) -> list[list[StoredLinear]]:
    """Linears that share an input. Experts are not among those that are looked at one by one."""
    alone = (linear for linear in inventory.linears if not linear.is_expert)
    return [list(stage) for _, stage in groupby(alone, key=lambda linear: linear.stage)]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def _flat(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [suffix for part in value for suffix in _flat(part)] if isinstance(value, list) else []
