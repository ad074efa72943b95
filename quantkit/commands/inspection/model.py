"""Faults of the model in a folder: config.json, which tensors are there, and of which shape.

Every function gives back the errors that loading would have raised, as many as there are, and raises none of them.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from quantkit.checkpoint.reader import Checkpoint, forms
from quantkit.checkpoint.spelling import spellings
from quantkit.errors import CheckpointError, FormatError, QuantkitError
from quantkit.formats import exl2, gptq
from quantkit.formats.dense import DTYPES
from quantkit.formats.gptq_config import GptqConfig, GptqSettings
from quantkit.inventory import head_spec
from quantkit.models.architecture import EMBEDDING, HEAD, LinearSpec
from quantkit.models.config import ModelConfig
from quantkit.models.contents import check_contents
from quantkit.models.source import SHAPE_HINT, wrong_shape

AGAIN = "fetch the model again: it is not complete, or its config.json is of another"
# Values that let the rest of a config be looked at once a key has been told to be absent or wrong.
STAND_INS = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1,
    "intermediate_size": 64,
    "vocab_size": 1,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_experts_per_tok": 1,
    "num_experts": 1,
    "moe_intermediate_size": 64,
    "tie_word_embeddings": False,
}


def config_faults(config: Mapping[str, Any], where: str) -> list[QuantkitError]:
    """Of config.json, key by key: what is refused is told, and then read as if it stood for something usual."""
    values, faults, told = dict(config), list[QuantkitError](), set[str]()
    for _ in range(64):
        try:
            ModelConfig.read(values, where)
            return faults
        except QuantkitError as error:
            key = (re.match(r"`(\w+)`", error.message) or [None, ""])[1]
            if key not in told:
                faults.append(error)
            if not key or (key in told and key not in STAND_INS) or values.get(key) == STAND_INS.get(key, key):
                return faults
            if key in told or key not in values:
                values[key] = STAND_INS.get(key)
            else:
                del values[key]
            told.add(key)
    return faults


MARKS = {"gptq": ".qweight", "awq": ".qweight", "exl2": ".q_weight"}
"""The tensor that every linear of a method has."""


def quantization_faults(checkpoint: Checkpoint, *, incomplete: bool) -> list[QuantkitError]:
    """Settings of GPTQ that cannot be read, where there are GPTQ tensors to go with them; settings of a method that no
    linear is stored in.

    incomplete  files are missing or damaged: their tensors may be all that the method has
    """
    if checkpoint.quantization is None:
        return []
    method = str(checkpoint.quantization.get("quant_method", "gptq"))
    mark = MARKS.get(method)
    if mark is not None and not any(name.endswith(mark) for name in checkpoint.names()):
        if incomplete:
            return []
        return [
            FormatError(
                f"`quantization_config` in `{checkpoint.path / 'config.json'}` says {method}, but no linear is stored "
                f"so: there is no tensor `…{mark}`",
                hint="remove `quantization_config` from config.json, or fetch the weights again",
            )
        ]
    if mark != MARKS["gptq"]:
        return []
    try:
        GptqConfig.read(checkpoint.quantization, str(checkpoint.path / "config.json"))
    except QuantkitError as error:
        return [error]
    return []


def content_faults(checkpoint: Checkpoint, *, incomplete: bool) -> Iterator[tuple[str, QuantkitError]]:
    """Tensors that are missing, too many, or of another shape or dtype than config.json asks for, each fault with the
    module that it is of.

    incomplete  files are missing: the tensors that are not there are not told one by one
    """
    config, architecture = checkpoint.model_config, checkpoint.architecture
    linears = {spec.name: spec for spec in (*architecture.linears(config), head_spec(config))}
    used: set[str] = set()
    for name, shape in architecture.tensors(config).items():
        module, _, suffix = name.rpartition(".")
        modules = next((found for found in spellings(module) if all(checkpoint.suffixes(m) for m in found)), ())
        if not modules and not incomplete and suffix != "bias":
            yield module, _missing(checkpoint, name)
        for index, found in enumerate(modules):
            used.update(f"{found}.{known}" for known in checkpoint.suffixes(found))
            spec = linears.get(module)
            width = None if spec is None else spec.out_features if len(modules) == 1 else spec.widths[index]
            for fault in _of_module(checkpoint, found, suffix, shape if len(modules) == 1 else None, spec, width):
                yield found, fault
    if config.tie_embeddings:
        used.update(f"{HEAD}.{suffix}" for suffix in checkpoint.suffixes(HEAD))
        for fault in _of_tied_head(checkpoint):
            yield HEAD, fault
    for name in checkpoint.names():
        if name not in used and not name.endswith(".rotary_emb.inv_freq"):
            what = f"`{name}` in `{checkpoint.homes[name].path}` belongs to no part of the model"
            fault = CheckpointError(f"{what} that config.json describes", hint=AGAIN)
            yield name.rpartition(".")[0], fault


def loading_fault(checkpoint: Checkpoint) -> list[QuantkitError]:
    """What loading itself would refuse: the last word, where nothing else was found."""
    try:
        check_contents(checkpoint, checkpoint.model_config, checkpoint.architecture)
    except QuantkitError as error:
        return [error]
    return []


def _of_module(
    checkpoint: Checkpoint,
    module: str,
    suffix: str,
    shape: tuple[int, ...] | None,
    spec: LinearSpec | None,
    width: int | None,
) -> Iterator[QuantkitError]:
    """One module on disk against what is expected of it; called for its weight, and for its bias where it has one."""
    suffixes = checkpoint.suffixes(module)
    quantized = exl2.recognise(suffixes) or gptq.recognise(suffixes)
    if suffix == "bias":
        if "bias" not in suffixes and shape is not None:
            why = f"`{module}.bias` is not in `{checkpoint.path}`: this model has a bias there"
            yield CheckpointError(why, hint="correct the bias keys of config.json, or fetch the model again")
        return
    if len(found := forms(suffixes)) > 1:
        what = f"`{module}` in `{checkpoint.path}` is both {' and '.join(found)}: {', '.join(suffixes)}"
        yield FormatError(what, hint=AGAIN)
        return
    if not quantized:
        if "weight" not in suffixes:
            stored = f"stored as {', '.join(suffixes)}"
            yield FormatError(f"`{module}` in `{checkpoint.path}` is {stored}, which cannot be read", hint=AGAIN)
            return
        yield from _of_plain(checkpoint, f"{module}.weight", shape)
    if gptq.recognise(suffixes) and spec is not None and width is not None:
        yield from _of_gptq(checkpoint, module, spec.in_features, width)


def _of_plain(checkpoint: Checkpoint, name: str, shape: tuple[int, ...] | None) -> Iterator[QuantkitError]:
    try:
        info = checkpoint.info(name)
    except QuantkitError as error:
        yield error
        return
    if info.dtype not in DTYPES:
        dtype = str(info.dtype).removeprefix("torch.")
        hint = "use a version of this model in bfloat16, float16 or float32"
        yield CheckpointError(f"`{name}` in `{info.file}` is stored as {dtype}, which is no plain weight", hint=hint)
    elif shape is not None and tuple(info.shape) != shape:
        yield wrong_shape(name, shape, tuple(info.shape), f" in `{info.file}`")


def _of_gptq(checkpoint: Checkpoint, module: str, rows: int, columns: int) -> Iterator[QuantkitError]:
    """Shapes of GPTQ tensors against the settings. Which of the two is wrong cannot be told: both are named."""
    settings = gptq_settings(checkpoint, module)
    if settings is None:
        return
    bits, size = settings.bits, rows if settings.group_size == -1 else settings.group_size
    groups = -(-rows // size)
    expected = {
        "qweight": (rows * bits // 32, columns),
        "qzeros": (groups, columns * bits // 32),
        "scales": (groups, columns),
        "g_idx": (rows,),
        "bias": (columns,),
    }
    for suffix, shape in expected.items():
        if suffix not in checkpoint.suffixes(module):
            if suffix in ("qweight", "qzeros", "scales"):
                what = f"`{module}` in `{checkpoint.path}` has no tensor `{module}.{suffix}`"
                yield FormatError(what, hint=AGAIN)
            continue
        header = checkpoint.homes[f"{module}.{suffix}"]
        found = header.entries[f"{module}.{suffix}"].shape
        if found != shape:
            asked = f"{rows} × {columns} at {bits} bits, group size {settings.group_size}, asks for {list(shape)}"
            told = f"`{module}.{suffix}` in `{header.path}` has shape {list(found)}"
            yield FormatError(f"{told}; {asked}", hint=_other_setting(suffix, found, rows, settings))


def _other_setting(suffix: str, found: tuple[int, ...], rows: int, settings: GptqSettings) -> str:
    """The one change of the settings that would explain a shape."""
    if suffix == "qweight" and found and (found[0] * 32) % rows == 0 and found[0] * 32 // rows in (2, 3, 4, 8):
        return f"if the tensors are right, `bits` is {found[0] * 32 // rows}, not {settings.bits}"
    if suffix == "scales" and found and found[0] and rows % found[0] == 0:
        return f"if the tensors are right, `group_size` is {rows // found[0]}, not {settings.group_size}"
    return SHAPE_HINT


def _of_tied_head(checkpoint: Checkpoint) -> Iterator[QuantkitError]:
    suffixes = checkpoint.suffixes(HEAD)
    if not suffixes or exl2.recognise(suffixes):
        return
    try:
        copies = [checkpoint.tensor(f"{module}.weight") for module in (HEAD, EMBEDDING) if suffixes == ["weight"]]
    except QuantkitError:  # one of them is not there, or of a dtype that is told elsewhere
        return
    if not copies or copies[0].dtype != copies[1].dtype or not torch.equal(*copies):
        what = f"`{HEAD}.{suffixes[0]}` is not `{EMBEDDING}.weight`"
        yield CheckpointError(
            f"`tie_word_embeddings` is true for `{checkpoint.path}`, but {what}",
            hint="set `tie_word_embeddings` to false in config.json",
        )


def _missing(checkpoint: Checkpoint, name: str) -> CheckpointError:
    if name == f"{HEAD}.weight":
        hint = "if the output is tied to the embedding, set `tie_word_embeddings` to true in config.json"
        return CheckpointError(f"`{name}` is not in `{checkpoint.path}`", hint=hint)
    return CheckpointError(f"`{name}` is not in `{checkpoint.path}`", hint=AGAIN)


def gptq_settings(checkpoint: Checkpoint, module: str) -> GptqSettings | None:
    """How the config says that a module is stored; None where it says nothing, or nothing that can be read."""
    if checkpoint.quantization is None:
        return None
    try:
        return GptqConfig.read(checkpoint.quantization, str(checkpoint.path / "config.json")).for_module(module)
    except QuantkitError:
        return None
