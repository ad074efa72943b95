"""`quantkit quantize --bpw 3.0,4.0,5.0`: several EXL2 models from one measurement, one folder for each rate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.checkpoint.fingerprint import fingerprint
from quantkit.commands import measure, quantize
from quantkit.commands.quantization.exl2 import as_measured, check_format
from quantkit.commands.quantization.job import open_model
from quantkit.commands.quantization.redo_report import RedoReport
from quantkit.commands.quantization.report import QuantizeReport
from quantkit.commands.quantization.resumption import Finished, read_result
from quantkit.commands.quantization.sensitivity import RunOnce
from quantkit.errors import CheckpointError, UsageError
from quantkit.measurement import Measurement
from quantkit.mix_plan import plan_mixes
from quantkit.progress import Progress
from quantkit.settings import MeasureSettings, QuantizeSettings


@dataclass(frozen=True, slots=True)
class RatesReport:
    """One report for each rate, in the order asked for, and the measurement they share."""

    measurement: Path
    reports: tuple[QuantizeReport | Finished, ...]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of each table for people."""
        rows = [
            [
                str(report.out),
                f"{report.bits_per_weight:.3f}",
                f"{report.size_bytes / 2**20:.1f} MiB",
                "" if report.damage is None else f"{report.damage.kl_mean:.4f}",
            ]
            for report in self.reports
        ]
        details = [table for report in self.reports for table in report.tables()]
        return [*details, ("rates", ["", "bits/weight", "size", "mean KL"], rows)]

    def as_json(self) -> dict[str, Any]:
        return {"measurement": str(self.measurement), "rates": [report.as_json() for report in self.reports]}


def run_rates(settings: QuantizeSettings, rates: Sequence[float], progress: Progress) -> RatesReport:
    """Quantize once for each rate, into `OUT-4bpw`, `OUT-5bpw`, …; `settings.bpw` is ignored.

    Without a measurement the model is measured into `OUT-measurement.json`, which stays. Every rate is planned and
    every folder looked at before the first is quantized. Gradients are found once for all; the text runs through the
    blocks once for each rate, since what a block reads are the outputs of quantized ones. Raises as `quantize.run` and
    `measure.run` do.
    """
    if settings.redo is not None:
        raise UsageError("`--redo` is on one result", hint="redo each of them, without `--bpw`")
    backward = RunOnce()
    wanted = [
        replace(settings, bpw=rate, out=out, job=_inside(settings.job, out))
        for rate in rates
        for out in [settings.out.with_name(f"{settings.out.name}-{rate:g}bpw")]
    ]
    if len({one.out for one in wanted}) < len(wanted):
        raise UsageError("`--bpw` names a rate twice, to the digits of the folders' names", hint="name each rate once")
    for one in wanted:
        check_format(one)
        if one.out.exists() and not one.overwrite and read_result(one.out) is None:
            raise CheckpointError(f"`{one.out}` exists", hint="use `--overwrite`, or another `-o`")
    file = settings.measurement
    if file is None:
        file = settings.out.with_name(f"{settings.out.name}-measurement.json")
        choice = MeasureSettings(
            settings.model,
            file,
            rotate=settings.rotate,
            calibration=settings.calibration,
            samples=settings.samples,
            length=settings.length,
            seed=settings.seed,
            device=settings.device,
            dtype=settings.dtype,
            overwrite=settings.overwrite,
            job=_inside(settings.job, file),
            restart=settings.restart,
        )
        measure.run(choice, progress, backward=backward)
    measurement = Measurement.load(file)
    checkpoint = open_model(settings.model, settings.seed, rotate=settings.rotate)
    measurement.require(fingerprint(checkpoint), as_measured(settings))
    for one in wanted:
        assert one.bpw is not None
        plan_mixes(measurement, one.bpw, head_bits=one.head_bits, include_head=one.include_head)
    each = (replace(one, measurement=file) for one in wanted)
    reports = (quantize.run(one, progress, backward=backward) for one in each)
    return RatesReport(file, tuple(report for report in reports if not isinstance(report, RedoReport)))


def _inside(job: Path | None, out: Path) -> Path | None:
    """Each result has a job of its own."""
    return None if job is None else job / f"{out.name}.job"
