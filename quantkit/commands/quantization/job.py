"""What a quantization knows before it begins: source, plan, arithmetic and text, with all checks that come first."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from quantkit import kernels
from quantkit.calibration import text as calibration_text
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.checkpoint.rotated import RotatedCheckpoint
from quantkit.commands.inspection.tokenizer import tokenizer_faults
from quantkit.commands.quantization.memory_budget import DEFAULT, SPILL_BYTES, Budget
from quantkit.commands.quantization.recipe import Recipe
from quantkit.commands.quantization.redo_sources import Redo
from quantkit.errors import BackendError, CalibrationError, CheckpointError, FormatError, UsageError
from quantkit.formats.codec import Codec
from quantkit.inventory import head_spec
from quantkit.models.architecture import EMBEDDING, HEAD, Architecture, LinearSpec, block_of
from quantkit.models.config import ModelConfig
from quantkit.models.contents import check_contents
from quantkit.models.rope import Rotary
from quantkit.models.source import Source
from quantkit.plan import Plan, PlannedLinear
from quantkit.progress import Progress
from quantkit.runtime.placement import Placement, has_native_bf16
from quantkit.runtime.tokenizer import Tokenizer

BACKWARD_TOKENS = 8192
BF16_CAPABILITY = (8, 0)
SCANNED_VALUES = 1 << 24


class TextChoice(Protocol):
    """The settings that choose calibration text."""

    @property
    def calibration(self) -> str: ...
    @property
    def samples(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """An unquantized model and the text to run it over, `rows` of token ids, int64 `[rows, length]`.

    notes  what to know of the model before the work: how it was read, and faults of its tokenizer that do not stop it
    """

    checkpoint: Checkpoint
    config: ModelConfig
    architecture: Architecture
    placement: Placement
    tokenizer: Tokenizer
    rows: Tensor
    budget: Budget = DEFAULT
    notes: tuple[str, ...] = ()

    @property
    def linears(self) -> list[LinearSpec]:
        """The quantizable linears of the blocks, in the order of the model."""
        return [spec for spec in self.architecture.linears(self.config) if spec.quantizable]

    @property
    def head(self) -> LinearSpec:
        """The output linear, also where it is tied to the embedding."""
        return head_spec(self.config)

    @property
    def stored_bits(self) -> dict[str, int]:
        """All bits of each linear as the checkpoint has it, and those of the head, be they the embedding's."""
        bits = {spec.name: stored_bits(self.checkpoint, spec.name) for spec in self.linears}
        return {**bits, HEAD: stored_bits(self.checkpoint, EMBEDDING if self.config.tie_embeddings else HEAD)}

    def module_on_disk(self, linear: str) -> str:
        """What a linear is called when it is written: as in the source; its Hugging Face name where the source holds
        it in parts, or not at all, as a tied head."""
        if linear == HEAD and not self.checkpoint.has(f"{HEAD}.weight"):
            return linear
        modules = {name.rpartition(".")[0] for name in self.checkpoint.tensors_of(linear)}
        return modules.pop() if len(modules) == 1 else linear

    @property
    def parameters(self) -> int:
        """Weights of the original, a tied head not counted twice."""
        config = self.checkpoint.original.model_config
        return sum(torch.Size(shape).numel() for shape in self.architecture.tensors(config).values())

    @property
    def backward_rows(self) -> Tensor:
        """The part of the text that a backward pass reads."""
        return self.rows[: max(1, BACKWARD_TOKENS // max(1, self.rows.shape[1]))]

    @property
    def backward_bytes(self) -> int:
        """What a backward pass keeps: states at all blocks, and gradients at one."""
        each = self.placement.dtype.itemsize * (self.config.num_layers + 1) + torch.float32.itemsize
        return self.backward_rows.numel() * self.config.hidden_size * each

    @property
    def backward_spilled_bytes(self) -> int:
        """The same where it is too much for the memory, else 0."""
        return self.backward_bytes if self.backward_bytes > min(SPILL_BYTES, self.budget.spill_bytes) else 0


@dataclass(frozen=True, slots=True, eq=False)
class QuantizeJob:
    """One quantization, ready to start. With `redo`, of a part of what it was before."""

    subject: Subject
    plan: Plan
    recipe: Recipe
    hessian_dtype: torch.dtype = torch.float32
    route_all: bool = False
    redo: Redo | None = None

    @property
    def work(self) -> tuple[PlannedLinear, ...]:
        """What is to be solved, the head last."""
        return tuple(each for each in self.plan.work if self.redo is None or each.name in self.redo.names)

    @property
    def codecs(self) -> dict[str, Codec]:
        """Of each linear that is to be solved, the head included."""
        return {linear.name: self.recipe.codec(linear) for linear in self.work}

    @property
    def has_head(self) -> bool:
        """Whether the head is to be solved."""
        return any(linear.name == HEAD for linear in self.work)

    @property
    def blocks(self) -> int:
        """How many blocks the text goes through: those behind the last linear to be solved have no say."""
        if self.redo is None or self.has_head:
            return self.subject.config.num_layers
        return 1 + max(block_of(linear.name) for linear in self.work)

    @property
    def source(self) -> Source:
        """What blocks are read from, to be solved and to be run."""
        return self.subject.checkpoint if self.redo is None else self.redo.in_hand(self.subject.checkpoint)

    @property
    def before(self) -> Callable[[str], Tensor] | None:
        """Where linears are solved again: the weight that each has so far, by name."""
        return None if self.redo is None else self.redo.weight


def choose_placement(device: str, dtype: str) -> Placement:
    """`auto` is the CPU, whatever else there is: a GPU is used where it is named. The dtype `auto` is bfloat16 where
    the device multiplies that natively, much faster than float32; else float32. The residual stream and the Hessians
    are float32 all the same.

    Raises UsageError for several devices, BackendError for one that cannot be used.
    """
    if device == "auto":
        placement = Placement.choose("cpu", "bf16" if dtype == "auto" and has_native_bf16() else dtype)
        return replace(placement, reason=_not_the_gpu(placement))
    if "," in device:
        raise UsageError(f"`--device {device}` is several devices, quantizing takes one", hint="use `--device cuda:0`")
    native = has_native_bf16()
    if device.startswith("cuda"):
        kernels.backend("cuda")  # what is wrong with CUDA is said first
        _require_gpu(device)
        native = torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    return Placement.choose(device, ("bf16" if native else "fp32") if dtype == "auto" else dtype)


UNTRIED = (
    "quantizing on a GPU has been tried on a simulated one only: every weight is compared with what was solved, "
    "look at the comparison at the end as well"
)


def on_gpu(placement: Placement) -> bool:
    """Whether the work is done on a GPU."""
    return torch.device(placement.device).type != "cpu"


def _not_the_gpu(placement: Placement) -> str:
    """Why `auto` is the CPU."""
    best = kernels.backend("auto")
    if best.name == "cuda":
        return "no device was named; `--device cuda` is the GPU, where quantizing has not been tried on a card"
    return best.reason if best.name == placement.backend else placement.reason


def _require_gpu(device: str) -> None:
    kind, _, index = device.partition(":")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise UsageError(f"unknown device `{device}`", hint="use `auto`, `cpu`, `cuda` or `cuda:0`")
    count = torch.cuda.device_count()
    if index and int(index) >= count:
        raise BackendError(f"there is no `{device}`: torch finds {count} GPUs", hint="use `--device cuda:0`")


def rotary_of(subject: Subject) -> Rotary:
    """For the rows of the text, on the subject's device."""
    positions = torch.arange(subject.rows.shape[1], device=subject.placement.device)
    return Rotary.at(subject.config.ropes, positions[None])


def open_model(model: str, seed: int, *, rotate: bool) -> Checkpoint:
    """The model as it is to be quantized. Raises UnsupportedModel for one that cannot be rotated."""
    checkpoint = open_checkpoint(model)
    return RotatedCheckpoint.of(checkpoint, seed) if rotate else checkpoint


def open_subject(checkpoint: Checkpoint, text: TextChoice | None, placement: Placement) -> Subject:
    """Every check of a model that needs no weights; `text` None is no text. Raises the error of whatever is not as it
    must be."""
    if checkpoint.quantization is not None:
        method = checkpoint.quantization.get("quant_method", "unknown method")
        raise CheckpointError(
            f"`{checkpoint.path}` is already quantized ({method})", hint="quantize the original model instead"
        )
    config, architecture = checkpoint.model_config, checkpoint.architecture
    check_contents(checkpoint.original, checkpoint.original.model_config, architecture)
    tokenizer = Tokenizer.open(checkpoint.path)
    rows = torch.zeros(0, 0, dtype=torch.int64) if text is None else _calibration_rows(text, tokenizer, config)
    faults, _, _ = tokenizer_faults(checkpoint.path, checkpoint.config, config.vocab_size)
    notes = (*checkpoint.notes, *(f"{fault.message}: the result will have that fault too" for fault in faults))
    return Subject(checkpoint, config, architecture, placement, tokenizer, rows, notes=notes)


def prepare(
    subject: Subject,
    recipe: Recipe,
    strict: bool,
    *,
    hessian_dtype: torch.dtype = torch.float32,
    route_all: bool = False,
) -> QuantizeJob:
    """Every check of a plan. Raises the error of whatever is not as it must be."""
    if route_all and subject.config.experts is None:
        raise UsageError("`--route-all` has no meaning: this model has no experts", hint="leave it out")
    plan = recipe.plan(subject.linears, subject.head, subject.stored_bits)
    if strict:
        plan.require_regular()
    if not plan.quantized:
        raise FormatError(
            f"`{subject.checkpoint.path}` has no linear that can be quantized: {plan.dense[0].dense_because}",
            hint="use another format",
        )
    return QuantizeJob(subject, plan, recipe, hessian_dtype, route_all)


def require_finite(checkpoint: Checkpoint, progress: Progress) -> None:
    """Reads every tensor once, and as it is in another form too: a NaN in the last block should not be found after all
    others were solved.

    Raises CheckpointError with the tensor and its file.
    """
    forms = (checkpoint,) if checkpoint.original is checkpoint else (checkpoint.original, checkpoint)
    names = [(form, name) for form in forms for name in form.names()]
    with progress.task("check weights", total=len(names)) as task:
        for checkpoint, name in names:
            tensor = checkpoint.tensor(name)
            parts = tensor.flatten().split(SCANNED_VALUES) if tensor.is_floating_point() else ()
            if not all(bool(torch.isfinite(end)) for part in parts for end in torch.aminmax(part)):
                raise CheckpointError(
                    f"`{name}` in `{checkpoint.info(name).file}` holds NaN or infinity",
                    hint="fetch this file again; if it stays, the model itself is damaged",
                )
            task.advance(note=name)


def held_back_rows(subject: Subject, windows: int, length: int) -> Tensor:
    """Text that calibration never sees, `[windows, length]`, or as long as the model has positions: taken before the
    work, so that the measurement at the end cannot fail for the text's sake."""
    length = min(length, subject.config.max_positions)
    if length < 2:
        raise CalibrationError(f"a model of {length} position predicts nothing", hint="use `--no-eval`")
    rows = calibration_text.held_back(subject.tokenizer, length, windows)
    _require_known(rows, subject.tokenizer, subject.config)
    return rows


def _calibration_rows(settings: TextChoice, tokenizer: Tokenizer, config: ModelConfig) -> Tensor:
    if settings.samples < 1 or settings.length < 1:
        raise UsageError("calibration needs at least one row of one token", hint="use `--samples 128 --length 512`")
    if settings.length > config.max_positions:
        raise CalibrationError(
            f"rows of {settings.length} tokens are longer than the {config.max_positions} positions of the model",
            hint=f"use `--length {config.max_positions}`",
        )
    count, length = settings.samples, settings.length
    rows = calibration_text.token_rows(settings.calibration, tokenizer, count, length, settings.seed)
    _require_known(rows, tokenizer, config)
    return rows


def _require_known(rows: Tensor, tokenizer: Tokenizer, config: ModelConfig) -> None:
    if int(rows.max()) >= config.vocab_size:
        raise CalibrationError(
            f"the tokenizer in `{tokenizer.folder}` gives id {int(rows.max())}, the model knows {config.vocab_size} "
            "ids: they do not belong together",
            hint="copy the tokenizer files of the original model into the folder",
        )


def stored_bits(checkpoint: Checkpoint, linear: str) -> int:
    """All bits of a linear on the disk, by the headers of its files."""
    infos = (checkpoint.info(name) for name in checkpoint.tensors_of(linear))
    return sum(torch.Size(info.shape).numel() * info.dtype.itemsize * 8 for info in infos)

