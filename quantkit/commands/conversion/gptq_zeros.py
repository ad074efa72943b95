"""`quantkit convert gptq-to-gptq-v2` and back: the same codes and scales, zero points in the other convention.

v1 files hold zero point - 1 and v2 files the zero point itself (`formats.gptq_zeros`). A zero point of 0 has no place
in a v1 file that all readers agree on, so such a model is refused there.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

from quantkit.checkpoint.reader import Checkpoint
from quantkit.commands.conversion.folder import open_source, rewriting
from quantkit.commands.conversion.report import ConvertReport
from quantkit.errors import CheckpointError, FormatError
from quantkit.formats import gptq
from quantkit.formats.gptq_config import GptqConfig, GptqSettings
from quantkit.formats.gptq_zeros import read_zeros, write_zeros
from quantkit.progress import Progress
from quantkit.settings import ConvertSettings
from quantkit.version import VERSION

SUFFIXES = ("qweight", "qzeros", "g_idx")
"""Any of these makes a linear packed: one that lost its codes must be missed, not copied."""


def to_v2(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """See `_convert`."""
    return _convert(settings, progress, "gptq_v2")


def to_v1(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """See `_convert`. Raises FormatError for a zero point of 0."""
    return _convert(settings, progress, "gptq")


def modules(source: Checkpoint) -> list[str]:
    """The modules on disk that hold packed tensors under these names, whole or not, in the order of the files."""
    parts = (name.rpartition(".") for name in source.names())
    return list(dict.fromkeys(module for module, _, suffix in parts if suffix in SUFFIXES))


def _convert(settings: ConvertSettings, progress: Progress, target: str) -> ConvertReport:
    """Raises CheckpointError for a model that is no GPTQ, does not say its settings, or is what it is to become;
    GateError when a weight does not stay the same. Then nothing is left behind."""
    start = time.monotonic()
    source = open_source(settings.source)
    quantization = source.quantization
    if quantization is None or not modules(source):
        message = f"`{source.path}` is no GPTQ model with settings"
        raise CheckpointError(message, hint="`quantkit convert --list` has all routes")
    config = GptqConfig.read(quantization, str(source.path / "config.json"))
    if config.base.checkpoint_format == target:
        raise CheckpointError(f"`{source.path}` has checkpoint format `{target}` already", hint="use it as it is")
    with (
        rewriting(source, settings.out, progress, overwrite=settings.overwrite) as new,
        progress.task(settings.route, total=len(modules(source))) as task,
    ):
        for module, before, own in _linears(source, config):
            tensors = before.tensors()
            try:
                zeros = read_zeros(tensors["qzeros"], own)
                after = replace(own, checkpoint_format=target, packed_borrow=False)
                tensors["qzeros"] = write_zeros(zeros, own.bits, after)
            except FormatError as error:
                raise FormatError(f"`{module}.qzeros`: {error.message}", hint="keep `gptq_v2`") from error
            stored, weight = gptq.decode(module, tensors, after), before.dequantize()
            new.add_equal_linear(module, stored, weight)
            task.advance(note=module)
        new.add_others()
        changed = {**quantization, "checkpoint_format": target, "format": target}
        # Who packed the words decides how some readers take them: these were packed here.
        changed["meta"] = {**(changed.get("meta") or {}), "quantizer": [f"quantkit:{VERSION}"]}
        written = new.finish({**source.config, "quantization_config": changed}, {"quantize_config.json": changed})
    remarks = []
    if target == "gptq" and not config.base.sym:
        remarks.append("GPTQModel refuses asymmetric models of format `gptq` that other tools wrote")
    return ConvertReport(
        settings,
        way=f"exact, checkpoint format {target}",
        written=written,
        seconds=time.monotonic() - start,
        exact=len(modules(source)),
        remarks=tuple(remarks),
    )


def _linears(source: Checkpoint, config: GptqConfig) -> Iterator[tuple[str, gptq.GptqTensor, GptqSettings]]:
    """Each linear on disk with its settings, one at a time."""
    for module in modules(source):
        own = config.for_module(module)
        tensors = {name.rpartition(".")[2]: source.tensor(name) for name in source.tensors_of(module)}
        source.require_one_form(module)
        with source.telling_file(module):
            stored = gptq.decode(module, tensors, own)
        assert own is not None  # else `decode` has refused it
        yield module, stored, own
