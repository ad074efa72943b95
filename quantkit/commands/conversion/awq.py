"""`quantkit convert awq-to-gptq`: the same codes, zero points and scales, packed as GPTQ packs them.

Both grids are `(q - zero) · scale`, so nothing is rounded. A model whose zero points are all in the middle becomes
symmetric GPTQ, which all readers take; any other becomes `gptq_v2`, which can hold a zero point of 0.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch

from quantkit import kernels
from quantkit.checkpoint.reader import Checkpoint
from quantkit.commands.conversion.folder import open_source, rewriting
from quantkit.commands.conversion.gptq_zeros import modules
from quantkit.commands.conversion.report import ConvertReport
from quantkit.errors import CheckpointError, FormatError
from quantkit.formats import awq, gptq, gptq_config
from quantkit.formats.gptq_config import GptqSettings
from quantkit.formats.gptq_zeros import write_zeros
from quantkit.progress import Progress
from quantkit.settings import ConvertSettings

MIDDLE = 1 << awq.BITS - 1


def awq_to_gptq(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """Raises CheckpointError for a model that is no AWQ, FormatError for a layout or shape that one of the formats
    cannot hold, GateError for a weight that does not stay the same. Then nothing is left behind."""
    start = time.monotonic()
    source = open_source(settings.source)
    if source.quantization is None or not awq.recognise(source.quantization) or not modules(source):
        raise CheckpointError(f"`{source.path}` is no AWQ model", hint="`quantkit convert --list` has all routes")
    awq.check(source.quantization, str(source.path / "config.json"))
    own = _settings(source)
    with (
        rewriting(source, settings.out, progress, overwrite=settings.overwrite) as new,
        progress.task(settings.route, total=len(modules(source))) as task,
    ):
        for module, before in _linears(source):
            rows = len(before.q)
            if before.group_rows != (rows if own.group_size == -1 else min(own.group_size, rows)):
                raise FormatError(
                    f"`{module}` has groups of {before.group_rows} rows, others of {own.group_size}",
                    hint="a GPTQ model has one group size: use the unquantized version of this model",
                )
            tensors = {
                "qweight": kernels.backend("cpu").pack(before.q, awq.BITS),
                "qzeros": write_zeros(before.zeros, awq.BITS, own),
                "scales": before.scales,
                "g_idx": (torch.arange(rows) // before.group_rows).to(torch.int32),
            }
            if before.bias is not None:
                tensors["bias"] = before.bias
            stored, weight = gptq.decode(module, tensors, own), before.dequantize()
            new.add_equal_linear(module, stored, weight)
            task.advance(note=module)
        new.add_others()
        rules: dict[str, dict[str, Any]] = {f"-:^{name}$": {} for name in _dense(source)}
        config = gptq_config.write(own, true_sequential=False, dynamic=rules)
        written = new.finish({**source.config, "quantization_config": config}, {"quantize_config.json": config})
    return ConvertReport(
        settings,
        way=f"exact, checkpoint format {own.checkpoint_format}",
        written=written,
        seconds=time.monotonic() - start,
        exact=len(modules(source)),
        facts={"group_size": own.group_size, "sym": own.sym},
    )


def _settings(source: Checkpoint) -> GptqSettings:
    """Found in the tensors, one linear at a time: the group size of the first, and whether every zero is the middle."""
    group_size, sym = None, True
    for module in modules(source):
        shapes = source.info(f"{module}.qweight").shape, source.info(f"{module}.qzeros").shape
        if not all(len(shape) == 2 and shape[0] for shape in shapes):
            raise FormatError(
                f"`{source.info(f'{module}.qweight').file}`: `{module}.qweight` and `{module}.qzeros` have shapes "
                f"{list(shapes[0])} and {list(shapes[1])}, expected matrices",
                hint=awq.AGAIN,
            )
        rows, groups = shapes[0][0], shapes[1][0]
        if group_size is None or group_size == -1:
            group_size = rows // groups if groups > 1 else -1
        sym = sym and bool((awq.unpack(source.tensor(f"{module}.qzeros")) == MIDDLE).all())
    assert group_size is not None
    quantization = source.quantization or {}
    said = quantization.get("group_size", quantization.get("q_group_size"))
    if said is not None and said not in (group_size, -1) and group_size != -1:
        raise FormatError(
            f"`group_size` in `{source.path / 'config.json'}` is {said}, the tensors have groups of {group_size} rows",
            hint=awq.AGAIN,
        )
    return GptqSettings(awq.BITS, group_size, sym, False, "gptq" if sym else "gptq_v2")


def _linears(source: Checkpoint) -> Iterator[tuple[str, awq.AwqWeight]]:
    for module in modules(source):
        source.require_one_form(module)
        tensors = {name.rpartition(".")[2]: source.tensor(name) for name in source.tensors_of(module)}
        with source.telling_file(module):
            weight = awq.decode(module, tensors)
        yield module, weight


def _dense(source: Checkpoint) -> list[str]:
    """Linears of the blocks that stay dense, as the rules of GPTQ's readers name them."""
    packed = set(modules(source))
    return [name.replace(".", r"\.") for name in source.linears() if name not in packed]
