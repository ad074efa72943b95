"""`quantkit measurement show`: a measurement file as tables, and as a picture where one is asked for."""

from quantkit.commands.measuring.plot import plot, require_plots
from quantkit.commands.measuring.report import MeasureReport
from quantkit.measurement import Measurement
from quantkit.progress import Progress
from quantkit.settings import ShowMeasurementSettings


def run(settings: ShowMeasurementSettings, progress: Progress) -> MeasureReport:
    """Raises PlanError for a file that is no measurement, UsageError for a picture that cannot be drawn."""
    if settings.plot is not None:
        require_plots(settings.plot)
    measurement = Measurement.load(settings.measurement)
    if settings.plot is not None:
        plot(measurement, settings.plot)
        progress.say(f"wrote {settings.plot}")
    return MeasureReport(settings.measurement, measurement)
