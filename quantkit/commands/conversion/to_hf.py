"""`quantkit convert gptq-to-hf` and `exl2-to-hf`: every linear as the dense weight that it stands for.

A quantized weight is a float16 by definition, so in fp16 and fp32 it comes over exactly, and that is asserted; in bf16
it is rounded once. Embedding, norms and linears that were dense already are rounded where the dtype is narrower.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.spelling import respelled
from quantkit.commands.conversion.folder import open_source, rewriting, without_quantization
from quantkit.commands.conversion.report import ConvertReport, Written
from quantkit.errors import OWN_FAULT, CheckpointError, FormatError, GateError, UsageError
from quantkit.formats import exl2, gptq
from quantkit.formats.dense import DenseTensor
from quantkit.models.architecture import HEAD
from quantkit.progress import Progress
from quantkit.settings import ConvertSettings

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
QUANTIZED_SUFFIXES = ("qweight", "qzeros", "scales", "g_idx", "q_weight", "q_scale", "q_scale_max", "q_groups")


def gptq_to_hf(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """Raises CheckpointError for a model without a GPTQ linear; else see `dequantize`."""
    return _to_hf(settings, progress, gptq.recognise, "GPTQ")


def exl2_to_hf(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """Raises CheckpointError for a model without an EXL2 linear; else see `dequantize`."""
    return _to_hf(settings, progress, exl2.recognise, "EXL2")


@dataclass(frozen=True, slots=True)
class Dequantized:
    """What `dequantize` wrote: linears that were quantized, and tensors that a narrower dtype rounded."""

    linears: int
    rounded: int
    written: Written
    untied: bool


def dequantize(
    source: Checkpoint, out: Path, dtype: torch.dtype, *, overwrite: bool, progress: Progress, others: bool = True
) -> Dequantized:
    """Write a quantized model as a dense one, one tensor in memory at a time.

    `others` false leaves all that was dense in its own dtype. Raises FormatError for a value beyond the dtype and for a
    quantized module that is no linear of its family, GateError when a weight that should be exact is not.
    """
    names = [name for name in (*source.linears(), HEAD) if is_quantized(source, name)]
    spelled = _spelling(source)
    rounded = 0
    with (
        rewriting(source, out, progress, overwrite=overwrite) as new,
        progress.task("dequantize", total=len(names)) as task,
    ):
        for name in names:
            stored = source.linear(name)
            weight = stored.dequantize()
            dense = _cast(f"{name}.weight", weight, dtype)
            if dtype != torch.bfloat16 and not torch.equal(dense.to(weight.dtype), weight):
                message = f"`{name}` is not equal to its dequantized weight in {NAMES[dtype]}"
                raise GateError(message, hint=OWN_FAULT)
            bias = None if stored.bias is None else _cast(f"{name}.bias", stored.bias, dtype)
            new.add_linear(name, DenseTensor(dense.T.contiguous(), bias), dense, module=name)
            task.advance(note=name)
        for name in new.left():
            if name.rpartition(".")[2] in QUANTIZED_SUFFIXES:
                raise FormatError(
                    f"`{name}` is part of no linear that its family has", hint="use the unquantized model itself"
                )
            tensor = source.tensor(name)
            cast = _cast(name, tensor, dtype) if others and tensor.is_floating_point() else tensor
            rounded += not torch.equal(cast.to(tensor.dtype), tensor)
            new.add(spelled.get(name, name), cast)
        untied = HEAD in names and source.model_config.tie_embeddings
        config = _config(source, dtype, untied)
        return Dequantized(len(names), rounded, new.finish(config), untied)


def is_quantized(source: Checkpoint, linear: str) -> bool:
    """False too for a head that is tied to the embedding."""
    try:
        tensors = source.tensors_of(linear)
    except CheckpointError:
        if linear == HEAD:
            return False
        raise
    suffixes = [tensor.rpartition(".")[2] for tensor in tensors]
    return any(suffix in QUANTIZED_SUFFIXES for suffix in suffixes) or suffixes.count("weight") > 1


def _to_hf(
    settings: ConvertSettings, progress: Progress, recognise: Callable[[Collection[str]], bool], method: str
) -> ConvertReport:
    start = time.monotonic()
    if settings.dtype not in DTYPES:
        raise UsageError(f"unknown dtype `{settings.dtype}`", hint="use `--dtype fp16`, `bf16` or `fp32`")
    dtype = DTYPES[settings.dtype]
    source = open_source(settings.source)
    if not any(recognise([name.rpartition(".")[2]]) for name in source.names()):
        message = f"`{source.path}` has no linear in {method} form"
        raise CheckpointError(message, hint="`quantkit convert --list` has all routes")
    made = dequantize(source, settings.out, dtype, overwrite=settings.overwrite, progress=progress)
    exact = dtype != torch.bfloat16
    remarks = []
    if made.rounded:
        remarks.append(f"{made.rounded} tensors that were dense already were rounded to {NAMES[dtype]}")
    if made.untied:
        remarks.append("the head was quantized apart from the embedding: `tie_word_embeddings` is false now")
    return ConvertReport(
        settings,
        way=f"{'exact' if exact else 'rounded once'}, {NAMES[dtype]}",
        written=made.written,
        seconds=time.monotonic() - start,
        exact=made.linears if exact else 0,
        facts={"dtype": NAMES[dtype], "dequantized_linears": made.linears, "rounded_tensors": made.rounded},
        remarks=tuple(remarks),
    )


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype)
    if not torch.equal(torch.isfinite(cast), torch.isfinite(tensor)):
        raise FormatError(
            f"`{name}` has values up to {float(tensor.abs().max()):.3g}, beyond {NAMES[dtype]}",
            hint="use `--dtype bf16`, or `--dtype fp32`",
        )
    return cast


def _spelling(source: Checkpoint) -> dict[str, str]:
    """Name on disk → name in Hugging Face, where a quantizer chose another."""
    known = source.architecture.tensors(source.model_config)
    own = set(source.names())
    return {respelled(name): name for name in known if name not in own and respelled(name) in own}


def _config(source: Checkpoint, dtype: torch.dtype, untied: bool) -> dict[str, Any]:
    config = {**without_quantization(source.config), "torch_dtype": NAMES[dtype]}
    if "dtype" in config:
        config["dtype"] = NAMES[dtype]
    return {**config, "tie_word_embeddings": False} if untied else config
