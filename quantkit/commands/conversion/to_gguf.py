"""`quantkit convert hf-to-gguf` and `gptq-to-gguf`: one GGUF file, one tensor in memory at a time.

The grids of symmetric GPTQ at 4 and 8 bits are those of Q4_0 and Q8_0 where groups are in sequence and multiples of 32:
there codes and scales are carried over as they are. Any other linear stays exact as F16, unless a type is asked for.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantkit.checkpoint import gguf_model
from quantkit.checkpoint.gguf_export import describe_model
from quantkit.checkpoint.gguf_model import ROPE_DIVISORS, Placement
from quantkit.checkpoint.gguf_tokenizer_export import tokenizer_metadata
from quantkit.checkpoint.gguf_writer import BLOCK, GgufFileWriter, blocks, expand, q4_0, q8_0
from quantkit.checkpoint.reader import Checkpoint
from quantkit.commands.conversion.folder import open_source
from quantkit.commands.conversion.report import ConvertReport, LinearError, Written
from quantkit.errors import OWN_FAULT, CheckpointError, FormatError, GateError, UsageError
from quantkit.formats import gptq
from quantkit.formats.codec import StoredTensor
from quantkit.formats.gptq import GptqTensor
from quantkit.models.contents import check_contents
from quantkit.progress import Progress
from quantkit.settings import ConvertSettings

TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}
"""Types that can be asked for, and `general.file_type` of each."""
EXACT_TYPES = {4: "Q4_0", 8: "Q8_0"}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor to write; `carried` where codes and scales of GPTQ go over as they are."""

    placement: Placement
    kind: str
    linear: bool
    carried: bool


def hf_to_gguf(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """From a dense model; F16 unless another type is asked for. Raises as `_export` does."""
    source = open_source(settings.source)
    if source.quantization is not None:
        raise CheckpointError(
            f"`{source.path}` is quantized", hint="use `gptq-to-gguf`, or `exl2-to-hf` first and then `hf-to-gguf`"
        )
    return _export(settings, source, "F16" if settings.type == "auto" else settings.type, progress)


def gptq_to_gguf(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """From a GPTQ model; without a type every weight stays exact. Raises as `_export` does."""
    source = open_source(settings.source)
    if not any(gptq.recognise([name.rpartition(".")[2]]) for name in source.names()):
        message = f"`{source.path}` has no linear in GPTQ form"
        raise CheckpointError(message, hint="`quantkit convert --list` has all routes")
    return _export(settings, source, settings.type, progress)


def _export(settings: ConvertSettings, source: Checkpoint, kind: str, progress: Progress) -> ConvertReport:
    """Raises UsageError for an unknown type, UnsupportedModel for a model or tokenizer that GGUF cannot say,
    FormatError for values beyond float16, GateError for what does not come back as it was.
    Then nothing is left behind."""
    start = time.monotonic()
    if kind not in (*TYPES, "auto"):
        raise UsageError(f"unknown type `{kind}`", hint=f"use `--type {'`, `'.join(TYPES)}`")
    check_contents(source, source.model_config, source.architecture)
    name, metadata, placed, divisors = describe_model(source)
    metadata |= tokenizer_metadata(source.path, source.config, source.model_config.vocab_size)
    linears = set(source.linears())
    tensors = [_choose(source, placement, kind, linears) for placement in placed]
    kinds = [tensor.kind for tensor in tensors if tensor.linear]
    main = max(TYPES, key=lambda listed: (kinds.count(listed), listed))
    errors: list[LinearError] = []
    largest = 0.0
    with (
        GgufFileWriter(settings.out, name, source=source.path, overwrite=settings.overwrite) as file,
        progress.task(settings.route, total=len(tensors)) as task,
    ):
        for key, value in {**metadata, "general.file_type": TYPES[main], "general.quantization_version": 2}.items():
            file.set(key, value)
        if divisors is not None:
            file.plan(ROPE_DIVISORS, tuple(divisors.shape), "F32")
        for tensor in tensors:
            file.plan(tensor.placement.source, tensor.placement.shape, tensor.kind)
        file.begin()
        if divisors is not None:
            file.add(ROPE_DIVISORS, blocks(divisors, "F32"))
        for tensor in tensors:
            data, error = _made(source, tensor)
            file.add(tensor.placement.source, data)
            if tensor.linear and not tensor.carried and error:
                errors.append(LinearError(tensor.placement.target.removesuffix(".weight"), error))
            elif error:
                largest = max(largest, error)
            task.advance(note=tensor.placement.source)
        size = file.finish(gguf_model.describe)
    listed = [tensor.kind for tensor in tensors]
    exact = len(kinds) - len(errors)
    ways = [f"{exact} linears exact"] if exact else []
    ways += [f"{len(errors)} linears rounded"] if errors else []
    return ConvertReport(
        settings,
        way=", ".join(ways),
        written=Written(
            len(tensors) + (divisors is not None), sum(tensor.placement.count for tensor in tensors), size
        ),
        seconds=time.monotonic() - start,
        linears=tuple(sorted(errors, key=lambda linear: -linear.error)),
        exact=exact,
        facts={
            "architecture": name,
            "types": {found: listed.count(found) for found in sorted(set(listed))},
            "carried_over": sum(tensor.carried for tensor in tensors),
            "largest_other_error": largest,
        },
    )


def _choose(source: Checkpoint, placement: Placement, kind: str, linears: set[str]) -> _Tensor:
    """The type of one tensor: vectors F32; linears as asked, or whatever keeps them exact; embedding and head in the
    narrowest type that keeps them, or Q8_0 where all is to be that."""
    module = placement.target.removesuffix(".weight")
    if len(placement.shape) == 1:
        return _Tensor(placement, "F32", False, False)
    if module not in linears:
        if kind in ("F16", "Q8_0"):
            return _Tensor(placement, kind, False, False)
        return _Tensor(placement, _narrowest(source.dense(module)), False, False)
    if not source.has(placement.target):
        stored = source.linear(module)
        exact = _exact_type(stored)
        if exact is not None and kind in ("auto", exact):
            return _Tensor(placement, exact, True, True)
        return _Tensor(placement, "F16" if kind == "auto" else kind, True, False)
    return _Tensor(placement, _narrowest(source.dense(module)) if kind == "auto" else kind, True, False)


def _narrowest(weight: Tensor) -> str:
    for kind, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        if torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return kind
    return "F32"


def _exact_type(stored: StoredTensor) -> str | None:
    """Q4_0 or Q8_0 where its grid is that of this linear."""
    if not isinstance(stored, GptqTensor) or stored.bits not in EXACT_TYPES or stored.row_groups is None:
        return None
    _, zeros, scales = stored.parts()
    runs = stored.row_groups.view(-1, BLOCK)
    in_sequence = bool((runs == runs[:, :1]).all())
    middle = bool((zeros == 1 << stored.bits - 1).all())
    narrow = torch.equal(scales.to(torch.float16).to(scales.dtype), scales)
    return EXACT_TYPES[stored.bits] if in_sequence and middle and narrow else None


def _made(source: Checkpoint, tensor: _Tensor) -> tuple[np.ndarray, float]:
    """The bytes of one tensor, and ‖W' - W‖ / ‖W‖ of what they stand for."""
    placement = tensor.placement
    if placement.target.endswith(".weight") and len(placement.shape) == 2:
        stored = source.linear(placement.target.removesuffix(".weight"))
        weight = stored.dequantize().T.contiguous()
    else:
        stored, weight = None, _bias_or_norm(source, placement.target)
    heads = placement.permuted_heads
    weight = gguf_model.permute(weight, heads) if heads else weight
    if tensor.carried:
        assert isinstance(stored, GptqTensor)
        data = _carried(stored, heads)
    else:
        if tensor.kind not in ("F32", "BF16") and not bool(torch.isfinite(weight.to(torch.float16)).all()):
            raise FormatError(
                f"`{placement.target}` has values up to {float(weight.abs().max()):.3g}, beyond float16",
                hint="this model cannot be stored in these types",
            )
        data = blocks(weight, tensor.kind)
    found = expand(data, tensor.kind).view(weight.shape)
    if tensor.carried and not torch.equal(found.to(torch.float16), weight):
        raise GateError(f"`{placement.target}` does not decode to the same weight as {tensor.kind}", hint=OWN_FAULT)
    if tensor.carried:
        return data, 0.0
    whole = float(weight.to(torch.float32).norm())
    return data, float((found - weight.to(torch.float32)).norm()) / whole if whole else 0.0


def _carried(stored: GptqTensor, heads: int) -> np.ndarray:
    q, _, scales = stored.parts()
    assert stored.row_groups is not None
    q = q.T.contiguous()
    scales = scales[stored.row_groups[::BLOCK]].T.to(torch.float16).contiguous()
    if heads:
        q, scales = gguf_model.permute(q, heads), gguf_model.permute(scales, heads)
    return q4_0(q.contiguous(), scales) if stored.bits == 4 else q8_0(q.contiguous(), scales)


def _bias_or_norm(source: Checkpoint, name: str) -> Tensor:
    if name.endswith(".bias"):
        bias = source.linear(name.removesuffix(".bias")).bias
        if bias is None:
            raise CheckpointError(f"`{name}` is not in `{source.path}`", hint="fetch the model again")
        return bias
    return source.tensor(name)
