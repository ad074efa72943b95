"""`quantkit convert exl2-to-gptq`: dequantized exactly, then quantized anew by the block loop of `quantize`.

Widths of EXL2 differ from row to row and GPTQ has one, so the codes cannot be carried over. The dense model in between
stands beside the output for as long as it is needed: two bytes for each weight.
"""

import shutil
import time
from pathlib import Path

import torch

from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands import quantize
from quantkit.commands.conversion.damage import Yardstick, weight_errors
from quantkit.commands.conversion.folder import open_source, require_free, written_in
from quantkit.commands.conversion.report import ConvertReport
from quantkit.commands.conversion.to_hf import dequantize
from quantkit.errors import CheckpointError
from quantkit.formats import exl2
from quantkit.formats.gptq import GptqCodec
from quantkit.progress import Progress
from quantkit.settings import ConvertSettings, QuantizeSettings


def exl2_to_gptq(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """Raises an error of the tree for anything that cannot be done; then nothing is left behind."""
    start = time.monotonic()
    GptqCodec(settings.bits, settings.group_size, settings.sym, settings.act_order)  # refuses what GPTQ lacks
    source = open_source(settings.source)
    if not any(exl2.recognise([name.rpartition(".")[2]]) for name in source.names()):
        message = f"`{source.path}` has no linear in EXL2 form"
        raise CheckpointError(message, hint="`quantkit convert --list` has all routes")
    require_free(settings.out, overwrite=settings.overwrite)
    yardstick = Yardstick.of(source, source, progress) if settings.evaluate else None
    between = settings.out.absolute().with_name(f".{settings.out.name}.dense")
    try:
        made = dequantize(source, between, torch.float16, overwrite=True, progress=progress, others=False)
        quantize.run(_choice(settings, between), progress, made_by=settings.made_by)
    finally:
        shutil.rmtree(between, ignore_errors=True)
    result = open_checkpoint(settings.out)
    return ConvertReport(
        settings,
        way="re-quantized " + ("to nearest" if settings.data_free else "against activations of the input"),
        written=written_in(result),
        seconds=time.monotonic() - start,
        linears=weight_errors(source, result, source.linears(), progress),
        facts={
            "bits": settings.bits,
            "group_size": settings.group_size,
            "sym": settings.sym,
            "act_order": settings.act_order,
        },
        remarks=("the head, which was quantized apart from the embedding, is dense now",) if made.untied else (),
        damage=None if yardstick is None else yardstick.judge(settings.out, progress),
    )


def _choice(settings: ConvertSettings, between: Path) -> QuantizeSettings:
    return QuantizeSettings(
        str(between),
        settings.out,
        format="gptq",
        bits=settings.bits,
        group_size=settings.group_size,
        sym=settings.sym,
        act_order=settings.act_order,
        effort="nearest" if settings.data_free else "default",
        calibration=settings.calibration,
        samples=settings.samples,
        length=settings.length,
        seed=settings.seed,
        overwrite=settings.overwrite,
        evaluate=False,
        job=settings.job,
        restart=settings.restart,
    )
