"""`quantkit convert gptq-to-exl2`: re-quantized in one of three ways, named in the report.

    calibrated   the default: the block loop of `quantize`, the GPTQ model itself as source and reference
    original     with `--original MODEL`: the same loop over the unquantized model, which also undoes part of the loss
                 that GPTQ left
    data-free    from the weights alone (`convert_data_free`)

Within an old group the weights of a column lie on a few values that are multiples of one scale. New groups of the same
rows can meet them, so groups of the source stay together and border on each other: `solver.inverse.grouped`,
`formats.exl2_mix.aligned`.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from quantkit.checkpoint.decoded import DecodedCheckpoint
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.commands import measure, quantize
from quantkit.commands.conversion.damage import Yardstick, weight_errors
from quantkit.commands.conversion.data_free import DataFree
from quantkit.commands.conversion.exl2_rate import BOUND, lowest_rate
from quantkit.commands.conversion.folder import has_own_head, open_source, require_free, written_in
from quantkit.commands.conversion.report import AddedDamage, ConvertReport
from quantkit.errors import CheckpointError, FormatError, UsageError
from quantkit.formats import exl2_layout, gptq
from quantkit.formats.exl2_config import DENSE_HEAD_BITS
from quantkit.measurement import Measurement
from quantkit.mix_plan import plan_mixes, require_head_bits
from quantkit.models.architecture import HEAD
from quantkit.progress import Progress
from quantkit.settings import ConvertSettings, MeasureSettings, QuantizeSettings

QUANTIZED_HEAD_BITS = 8
"""Of a head that is in GPTQ form, where nothing else is asked for: nearly without loss."""
HELD = "for an unquantized model use `quantkit quantize MODEL -o OUT --format exl2 --bpw 4.0`"


def gptq_to_exl2(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """Raises an error of the tree for anything that cannot be done; then nothing is left behind."""
    start = time.monotonic()
    source = _open_gptq(settings)
    _check(settings)
    head_bits = _head_bits(settings, source)
    reference = source if settings.original is None else _open_original(settings.original, source)
    yardstick = Yardstick.of(reference, source, progress) if settings.evaluate else None
    if settings.data_free:
        way = "re-quantized from the weights alone"
        free = DataFree.measured(source, head_bits, progress)
        rate, damage = _settle(settings, yardstick, free.predict, free.write, progress)
    else:
        way = "re-quantized against activations of the input"
        if settings.original is not None:
            way = "quantized from the unquantized model, against its activations"
        target = DecodedCheckpoint.of(source) if settings.original is None else reference
        with _Measured.of(settings, target, head_bits, progress) as measured:
            rate, damage = _settle(settings, yardstick, measured.predict, measured.make, progress)
    result = open_checkpoint(settings.out)
    quantization = result.quantization or {}
    facts = {
        "target_bits_per_weight": rate,
        "bits_per_weight": quantization["bits_per_weight"],
        "head_bits": quantization["head_bits"],
    }
    names = [*source.linears(), *([HEAD] if head_bits != DENSE_HEAD_BITS and has_own_head(source) else [])]
    return ConvertReport(
        settings,
        way=way,
        written=written_in(result),
        seconds=time.monotonic() - start,
        linears=weight_errors(reference, result, names, progress),
        facts=facts,
        damage=damage,
    )


class _Measured:
    """The calibrated ways: one measurement, which every rate is planned and written from."""

    def __init__(self, settings: ConvertSettings, target: Checkpoint, head_bits: int, file: Path) -> None:
        self._settings, self._target, self._head_bits = settings, target, head_bits
        self._file = file
        self._measurement = Measurement.load(file)

    @classmethod
    def of(cls, settings: ConvertSettings, target: Checkpoint, head_bits: int, progress: Progress) -> "_Measured":
        file = settings.measurement or settings.out.absolute().with_name(f".{settings.out.name}.measurement.json")
        if not file.exists() or settings.measurement is None:
            choice = MeasureSettings(
                str(target.path),
                file,
                calibration=settings.calibration,
                samples=settings.samples,
                length=settings.length,
                seed=settings.seed,
                job=None if settings.job is None else settings.job.with_name(f"{settings.job.name}.measure"),
                restart=settings.restart,
            )
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"`{file.parent}` cannot be made: {error.strerror}", hint="choose another place with `-o`"
                ) from error
            measure.run(choice, progress, target)
        return cls(settings, target, head_bits, file)

    def __enter__(self) -> "_Measured":
        return self

    def __exit__(self, *_: object) -> None:
        if self._settings.measurement is None:
            self._file.unlink(missing_ok=True)

    def predict(self, rate: float) -> float:
        return plan_mixes(self._measurement, rate, head_bits=self._head_bits)[1].damage

    def make(self, rate: float, out: Path, overwrite: bool, progress: Progress) -> None:
        settings = self._settings
        choice = QuantizeSettings(
            str(self._target.path),
            out,
            format="exl2",
            bpw=rate,
            head_bits=self._head_bits,
            measurement=self._file,
            calibration=settings.calibration,
            samples=settings.samples,
            length=settings.length,
            seed=settings.seed,
            overwrite=overwrite,
            evaluate=False,
            job=settings.job,
            restart=settings.restart,
        )
        quantize.run(choice, progress, self._target, made_by=settings.made_by)


def _settle(
    settings: ConvertSettings,
    yardstick: Yardstick | None,
    predict: Callable[[float], float],
    make: Callable[[float, Path, bool, Progress], None],
    progress: Progress,
) -> tuple[float, AddedDamage | None]:
    """Make the result at the rate asked for, or find the rate by trial; the damage of what was made."""
    if settings.bpw is not None:
        make(settings.bpw, settings.out, settings.overwrite, progress)
        return settings.bpw, None if yardstick is None else yardstick.judge(settings.out, progress)
    assert yardstick is not None
    bound = BOUND if settings.match is None else settings.match
    found: dict[float, AddedDamage] = {}
    made: list[Path] = []

    def place(rate: float) -> Path:
        return settings.out.absolute().with_name(f"{settings.out.name}.trial-{rate:g}bpw")

    def attempt(rate: float) -> float:
        make(rate, place(rate), True, progress)
        made.append(place(rate))
        found[rate] = yardstick.judge(place(rate), progress)
        added = found[rate].kl_mean - found[rate].kl_input
        progress.say(f"{rate:g} bits per weight: KL {found[rate].kl_mean:.5f}, {added:+.5f} to the input's")
        return added

    try:
        rate, _ = lowest_rate(predict, attempt, bound)
        _take_place(place(rate), settings)
        return rate, found[rate]
    finally:
        for trial_folder in made:
            shutil.rmtree(trial_folder, ignore_errors=True)


def _take_place(trial: Path, settings: ConvertSettings) -> None:
    """The chosen trial becomes the result; a folder that was there, if it may be replaced, makes room."""
    replaced = settings.out.absolute().with_name(f".{settings.out.name}.replaced")
    try:
        if settings.out.exists():
            settings.out.rename(replaced)
        trial.rename(settings.out)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        message = f"`{settings.out}` cannot be written: {error.strerror}"
        raise CheckpointError(message, hint="choose another OUT") from error


def _check(settings: ConvertSettings) -> None:
    if settings.bpw is not None and settings.match is not None:
        raise UsageError("`--bpw` and `--match` both choose the rate", hint="use one of them")
    if settings.bpw is None and not settings.evaluate:
        raise UsageError("without `--bpw` the rate is found by measuring KL", hint="use `--bpw 5.0`, or no `--no-eval`")
    if settings.match is not None and not settings.match > 0:
        raise UsageError(f"expected a KL above 0 for `--match`, found {settings.match:g}", hint="use `--match 0.01`")
    if settings.data_free and settings.original is not None:
        raise UsageError("`--data-free` and `--original` are two ways", hint="use one of them")
    if settings.data_free and settings.measurement is not None:
        raise UsageError("a measurement needs text: `--data-free` reads none", hint="leave one of them out")
    require_free(settings.out, overwrite=settings.overwrite)


def _head_bits(settings: ConvertSettings, source: Checkpoint) -> int:
    quantized = has_own_head(source) and not source.has(f"{HEAD}.weight")
    if settings.head_bits is None:
        return QUANTIZED_HEAD_BITS if quantized else DENSE_HEAD_BITS
    require_head_bits(settings.head_bits)
    if quantized and settings.head_bits == DENSE_HEAD_BITS:
        raise UsageError("the head of the input is quantized already", hint="use `--head-bits 8`, or leave it out")
    return settings.head_bits


def _open_gptq(settings: ConvertSettings) -> Checkpoint:
    """Raises CheckpointError for a model without a GPTQ linear, FormatError for one that EXL2 cannot hold."""
    source = open_source(settings.source)
    found = 0
    for name in source.linears():
        tensors = source.tensors_of(name)
        if gptq.recognise([tensor.rpartition(".")[2] for tensor in tensors]):
            found += 1
            spec = next(spec for spec in source.architecture.linears(source.model_config) if spec.name == name)
            if reason := exl2_layout.shape_refusal(spec.in_features, 2):
                raise FormatError(f"`{name}` cannot be stored as EXL2: {reason}", hint="convert with `gptq-to-hf`")
    if not found:
        raise CheckpointError(f"`{source.path}` has no linear in GPTQ form", hint=HELD)
    return source


def _open_original(path: str, source: Checkpoint) -> Checkpoint:
    """The unquantized model. Raises CheckpointError unless its shapes are those of the input."""
    original = open_checkpoint(path)
    if original.quantization is not None:
        raise CheckpointError(f"`{original.path}` is quantized", hint="give the unquantized model as `--original`")
    ours, theirs = (one.architecture.tensors(one.model_config) for one in (source, original))
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            raise CheckpointError(
                f"`{original.path}` is not the model that `{source.path}` was made of: `{name}` has shape "
                f"{list(theirs.get(name, ()))} there, {list(ours.get(name, ()))} here",
                hint="give the model that the GPTQ version was made of",
            )
    return original
