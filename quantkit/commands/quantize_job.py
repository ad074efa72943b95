"""What a quantization knows before it begins: source, plan, arithmetic and text, with all checks that come first."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration import text
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CalibrationError, CheckpointError, FormatError, UsageError
from quantkit.formats.gptq import GptqCodec
from quantkit.models import catalog
from quantkit.models.architecture import Architecture
from quantkit.models.config import ModelConfig
from quantkit.models.contents import check_contents
from quantkit.plan import Plan, uniform
from quantkit.progress import Progress
from quantkit.runtime.placement import Placement
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import QuantizeSettings

SPILL_BYTES = 256 << 20
"""Hidden states beyond this live in files beside the output."""
SCANNED_VALUES = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class QuantizeJob:
    """One quantization, ready to start. `rows` is the calibration text, token ids int64 `[rows, length]`."""

    checkpoint: Checkpoint
    config: ModelConfig
    architecture: Architecture
    plan: Plan
    codec: GptqCodec
    placement: Placement
    tokenizer: Tokenizer
    rows: Tensor

    @property
    def parameters(self) -> int:
        """Weights of the model, a tied head not counted twice."""
        return sum(torch.Size(shape).numel() for shape in self.architecture.tensors(self.config).values())

    @property
    def spills(self) -> bool:
        """Whether the hidden states are too many for the memory."""
        return _hidden_bytes(self.rows, self.config) > SPILL_BYTES


def choose_codec(settings: QuantizeSettings) -> GptqCodec:
    """Raises FormatError for a width or group size that the format lacks, UsageError for an unknown format."""
    if settings.format == "exl2":
        raise FormatError("EXL2 can be read, but not written yet", hint="use `--format gptq`")
    if settings.format != "gptq":
        raise UsageError(f"unknown format `{settings.format}`", hint="use `--format gptq`")
    return GptqCodec(settings.bits, settings.group_size, settings.sym, settings.act_order)


def choose_placement(settings: QuantizeSettings) -> Placement:
    """As everywhere, but `auto` is bfloat16 on a CPU that multiplies it natively, two to three times as fast. The
    residual stream and the Hessians are float32 all the same."""
    dtype = settings.dtype
    if dtype == "auto" and Placement.choose(settings.device).device == "cpu" and _has_native_bf16():
        dtype = "bf16"
    return Placement.choose(settings.device, dtype)


def prepare(settings: QuantizeSettings, checkpoint: Checkpoint, codec: GptqCodec, placement: Placement) -> QuantizeJob:
    """Every check that needs no weights. Raises the error of whatever is not as it must be."""
    if checkpoint.quantization is not None:
        method = checkpoint.quantization.get("quant_method", "unknown method")
        raise CheckpointError(
            f"`{checkpoint.path}` is already quantized ({method})", hint="quantize the original model instead"
        )
    config = ModelConfig.read(checkpoint.config, str(checkpoint.path / "config.json"))
    architecture = catalog.find(checkpoint.config)
    check_contents(checkpoint, config, architecture)
    specs = architecture.linears(config)
    plan = uniform(specs, codec, {spec.name: _stored_bits(checkpoint, spec.name) for spec in specs})
    if settings.strict:
        plan.require_regular()
    if not plan.quantized:
        raise FormatError(
            f"`{checkpoint.path}` has no linear that can be quantized: {plan.dense[0].dense_because}",
            hint="use another format",
        )
    tokenizer = Tokenizer.open(checkpoint.path)
    rows = _calibration_rows(settings, tokenizer, config)
    hidden_bytes = _hidden_bytes(rows, config)
    _require_space(plan, checkpoint, hidden_bytes if hidden_bytes > SPILL_BYTES else 0, settings.out)
    return QuantizeJob(checkpoint, config, architecture, plan, codec, placement, tokenizer, rows)


def require_finite(checkpoint: Checkpoint, progress: Progress) -> None:
    """Reads every tensor once: a NaN in the last block should not be found after all others were solved.

    Raises CheckpointError with the tensor and its file.
    """
    names = checkpoint.names()
    with progress.task("check weights", total=len(names)) as task:
        for name in names:
            tensor = checkpoint.tensor(name)
            parts = tensor.flatten().split(SCANNED_VALUES) if tensor.is_floating_point() else ()
            if not all(bool(torch.isfinite(end)) for part in parts for end in torch.aminmax(part)):
                raise CheckpointError(
                    f"`{name}` in `{checkpoint.info(name).file}` holds NaN or infinity",
                    hint="fetch this file again; if it stays, the model itself is damaged",
                )
            task.advance(note=name)


def _has_native_bf16() -> bool:
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def _calibration_rows(settings: QuantizeSettings, tokenizer: Tokenizer, config: ModelConfig) -> Tensor:
    if settings.samples < 1 or settings.length < 1:
        raise UsageError("calibration needs at least one row of one token", hint="use `--samples 128 --length 512`")
    if settings.length > config.max_positions:
        raise CalibrationError(
            f"rows of {settings.length} tokens are longer than the {config.max_positions} positions of the model",
            hint=f"use `--length {config.max_positions}`",
        )
    rows = text.token_rows(settings.calibration, tokenizer, settings.samples, settings.length, settings.seed)
    if int(rows.max()) >= config.vocab_size:
        raise CalibrationError(
            f"the tokenizer gives id {int(rows.max())}, the model knows {config.vocab_size} ids: "
            "they do not belong together",
            hint="copy the tokenizer files of the original model into the folder",
        )
    return rows


def _require_space(plan: Plan, checkpoint: Checkpoint, spilled_bytes: int, out: Path) -> None:
    """Raises CheckpointError when the result, and hidden states that go to the disk, would not fit."""
    before = sum(_stored_bits(checkpoint, linear.name) for linear in plan.quantized) // 8
    after = sum(linear.stored_bits for linear in plan.quantized) // 8
    needed = checkpoint.stored_bytes - before + after + spilled_bytes
    free = shutil.disk_usage(out.expanduser().absolute().parent).free
    if needed > free:
        raise CheckpointError(
            f"`{out}` needs {needed / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB are free there",
            hint="free some space there, or choose another disk with `-o`",
        )


def _stored_bits(checkpoint: Checkpoint, linear: str) -> int:
    infos = (checkpoint.info(name) for name in checkpoint.tensors_of(linear))
    return sum(torch.Size(info.shape).numel() * info.dtype.itemsize * 8 for info in infos)


def _hidden_bytes(rows: Tensor, config: ModelConfig) -> int:
    return rows.numel() * config.hidden_size * torch.float32.itemsize
