"""The `quantization_config` of GPTQ checkpoints: read tolerantly, refuse by name, written as its readers want it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.errors import FormatError
from quantkit.formats.patterns import compile_pattern
from quantkit.version import VERSION

WIDTHS = (2, 3, 4, 8)
MOST_RULES = 10_000
CHECKPOINT_FORMATS = ("gptq", "gptq_v2")
# Formats that share the name of the method but not the layout of the words.
FOREIGN_FORMATS = {"gptq_p": "planar codes", "marlin": "Marlin tiles", "bitblas": "BitBLAS tiles"}
CORRECT = "correct it where this model is described: config.json or quantize_config.json"
OTHER = "use the GPTQ, EXL2 or unquantized version of this model"
REQUANTIZE = "quantize the original model again with `quantkit quantize MODEL -o OUT --format gptq`"


@dataclass(frozen=True, slots=True)
class GptqSettings:
    """How one linear is stored.

    checkpoint_format  `gptq` (v1: the file holds zero point - 1) or `gptq_v2` (it holds the zero point)
    packed_borrow      3-bit v1 files of GPTQModel before 7.0 took the 1 from whole words, not from each field
    """

    bits: int
    group_size: int
    sym: bool = True
    act_order: bool = False
    checkpoint_format: str = "gptq"
    packed_borrow: bool = False


@dataclass(frozen=True, slots=True)
class GptqConfig:
    """What `quantization_config` says: settings of every linear, and the rules (`dynamic`) that override them.

    where  the file that says so, for messages
    """

    base: GptqSettings
    lm_head: bool = False
    rules: tuple[tuple[str, Mapping[str, Any] | None], ...] = ()
    where: str = field(default="quantization_config", compare=False)

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str = "quantization_config") -> "GptqConfig":
        """Unknown keys are ignored. Raises FormatError for what cannot be read, naming key, value and `where`."""
        method = config.get("quant_method", config.get("method", "gptq"))  # old AutoGPTQ files do not say
        if method != "gptq":
            raise FormatError(f"expected `quant_method` `gptq`, found `{method}` in `{where}`", hint=OTHER)
        _refuse_foreign(config, where)
        base = GptqSettings(
            checkpoint_format=_checkpoint_format(config, where),  # first: other formats have other widths
            bits=_bits(config.get("bits"), where),
            group_size=_group_size(config.get("group_size", 128), where),
            sym=_flag(config, "sym", True, where),
            act_order=_flag(config, "desc_act", False, where),
            packed_borrow=_written_before_gptqmodel_7(config),
        )
        rules = config.get("dynamic") or {}
        if not isinstance(rules, Mapping):
            raise FormatError(f"expected an object for `dynamic`, found `{rules}` in `{where}`", hint=CORRECT)
        if len(rules) > MOST_RULES:
            message = f"`dynamic` in `{where}` has {len(rules)} rules, at most {MOST_RULES} are read"
            raise FormatError(message, hint=CORRECT)
        read = tuple(_rule(*item, where) for item in rules.items())
        return cls(base, _flag(config, "lm_head", False, where), read, where)

    def for_module(self, name: str) -> GptqSettings | None:
        """The settings of one linear, by its full name; None when a negative rule leaves it dense.

        The first rule whose pattern matches at the start of the name decides, in the order of the file.
        """
        for pattern, override in self.rules:
            if not re.match(pattern, name):
                continue
            if override is None:
                return None
            where = f"{self.where}: dynamic rule {pattern}"
            return replace(
                self.base,
                bits=_bits(override.get("bits", self.base.bits), where),
                group_size=_group_size(override.get("group_size", self.base.group_size), where),
                sym=_flag(override, "sym", self.base.sym, where),
                act_order=_flag(override, "desc_act", self.base.act_order, where),
            )
        return self.base


def write(
    settings: GptqSettings,
    *,
    lm_head: bool = False,
    damping: float = 0.01,
    true_sequential: bool = True,
    quantized_names: Sequence[Sequence[str]] | None = None,
    dynamic: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The object that stands in config.json under `quantization_config` and is quantize_config.json.

    lm_head          whether the head is quantized too
    quantized_names  suffixes of the quantized linears of a block, by stage; None means all linears of a block
    dynamic          overrides by pattern; negative rules are put first, as readers disagree about their precedence
    """
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "method": "gptq",
        "bits": settings.bits,
        "group_size": settings.group_size,
        "desc_act": settings.act_order,
        "sym": settings.sym,
        "checkpoint_format": settings.checkpoint_format,
        "format": settings.checkpoint_format,
        "pack_dtype": "int32",
        "lm_head": lm_head,
        "true_sequential": true_sequential,
        "static_groups": False,
        "damp_percent": damping,
        "meta": {"quantizer": [f"quantkit:{VERSION}"]},
    }
    if quantized_names is not None:
        config["modules_in_block_to_quantize"] = [list(stage) for stage in quantized_names]
    if dynamic:
        config["dynamic"] = dict(sorted(dynamic.items(), key=lambda rule: not rule[0].startswith("-:")))
    return config


def _refuse_foreign(config: Mapping[str, Any], where: str) -> None:
    if config.get("is_marlin_format"):
        raise FormatError(f"weights in Marlin tiles cannot be read (`is_marlin_format` in `{where}`)", hint=REQUANTIZE)
    pack_dtype = str(config.get("pack_dtype", "int32")).removeprefix("torch.")
    if pack_dtype != "int32":
        raise FormatError(f"expected `pack_dtype` `int32`, found `{pack_dtype}` in `{where}`", hint=REQUANTIZE)


def _checkpoint_format(config: Mapping[str, Any], where: str) -> str:
    found = config.get("checkpoint_format", config.get("format")) or "gptq"
    if found in FOREIGN_FORMATS:
        message = f"checkpoint format `{found}` ({FOREIGN_FORMATS[found]}) cannot be read (in `{where}`)"
        raise FormatError(message, hint=REQUANTIZE)
    if found not in CHECKPOINT_FORMATS:
        message = f"expected `checkpoint_format` `gptq` or `gptq_v2`, found `{found}` in `{where}`"
        raise FormatError(message, hint=CORRECT)
    return str(found)


def _bits(found: Any, where: str) -> int:
    if found not in WIDTHS or isinstance(found, bool):
        shown = "nothing" if found is None else f"`{found}`"
        raise FormatError(f"expected `bits` 2, 3, 4 or 8, found {shown} in `{where}`", hint=REQUANTIZE)
    return int(found)


def _group_size(found: Any, where: str) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not (found == -1 or found > 0):
        raise FormatError(f"expected `group_size` -1 or above 0, found `{found}` in `{where}`", hint=CORRECT)
    return found


def _flag(config: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
    found = config.get(key)
    if found is None:
        return default
    if not isinstance(found, bool):
        raise FormatError(f"expected true or false for `{key}`, found `{found}` in `{where}`", hint=CORRECT)
    return found


def _rule(pattern: str, override: Any, where: str) -> tuple[str, Mapping[str, Any] | None]:
    """A `dynamic` entry without its prefix; None as the override of a negative one (`-:`)."""
    bare = pattern.removeprefix("+:").removeprefix("-:")
    try:
        compile_pattern(bare)
    except ValueError as error:
        shown = pattern if len(pattern) <= 60 else f"{pattern[:57]}..."
        raise FormatError(f"`dynamic` pattern `{shown}` in `{where}` cannot be used: {error}", hint=CORRECT) from error
    if pattern.startswith("-:"):
        return bare, None
    if not isinstance(override, Mapping):
        message = f"expected an object for `dynamic` rule `{pattern}`, found `{override}` in `{where}`"
        raise FormatError(message, hint=CORRECT)
    return bare, override


def _written_before_gptqmodel_7(config: Mapping[str, Any]) -> bool:
    meta = config.get("meta")
    writers = meta.get("quantizer") if isinstance(meta, Mapping) else None
    for writer in [writers] if isinstance(writers, str) else writers or []:
        found = re.match(r"gptqmodel:(\d+)\.", str(writer))
        if found:
            return int(found[1]) < 7
    return False
