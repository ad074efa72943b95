"""What tuning after the rounding will take, from models of one and two blocks with codes that are all nothing."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import ceil

import torch
from torch import Tensor

from quantkit.calibration import tuning
from quantkit.calibration.tuning import RoundedLinear, tune
from quantkit.commands.quantization.effort import Effort
from quantkit.commands.quantization.job import QuantizeJob
from quantkit.commands.quantization.tuning import JUDGED_LENGTH, JUDGED_WINDOWS
from quantkit.formats.gptq import GptqCodec
from quantkit.models.architecture import HEAD, LinearSpec, block_of
from quantkit.progress import Silent

FORWARD_SHARE = 0.2
"""Of the work of a step: one pass forward over its tokens."""
NUMBERS_OF_A_SCALE = 5
"""Itself, its change, the gradient of that, and two moments; float32 each."""


def rehearse_tuning(job: QuantizeJob, effort: Effort, timed: Callable[[Callable[[], object]], Tensor]) -> Tensor:
    """Spent by all steps and by judging what comes of them, as `timed` says it of a call."""
    subject = job.subject
    rows = effort.tuned(subject.rows)
    few = rows[: max(1, tuning.BATCH_TOKENS // rows.shape[1])]
    with torch.inference_mode(False):  # autograd refuses what that mode has made
        one, two = (timed(partial(_step, job, few, layers)) for layers in (1, 2))
    block = (two - one).clamp(min=0)
    step = subject.config.num_layers * block + (one - block).clamp(min=0)
    judged = 3 * FORWARD_SHARE * JUDGED_WINDOWS * JUDGED_LENGTH / few.numel()
    return step * (effort.tunes * ceil(len(rows) / len(few)) + judged)


def tuning_bytes(job: QuantizeJob, effort: Effort) -> int:
    """What is held of all blocks, and the rehearsal did not: codes, numbers of each scale, states of a step and what
    the original says."""
    linears = _linears(job, job.subject.config.num_layers)
    codes = sum(spec.in_features * spec.out_features for spec in linears.values())
    scales = sum(_groups(job, spec) * spec.out_features for spec in linears.values())
    config, rows = job.subject.config, effort.tuned(job.subject.rows)
    states = _step_tokens(rows) * config.num_layers + rows.numel()
    single = torch.float32.itemsize
    held = min(codes, tuning.HELD_BYTES) + min(_graphs(job, rows), tuning.GRAPH_BYTES)
    return held + single * (NUMBERS_OF_A_SCALE * scales + states * config.hidden_size)


def _step(job: QuantizeJob, rows: Tensor, layers: int) -> None:
    subject, place = job.subject, job.subject.placement
    config = replace(subject.config, num_layers=min(layers, subject.config.num_layers))
    tune(
        subject.checkpoint,
        _Blank(job, config.num_layers),
        config,
        subject.architecture,
        rows,
        1,
        seed=0,
        dtype=place.dtype,
        device=place.device,
        progress=Silent(),
        graphs=tuning.GRAPH_BYTES if _graphs(job, rows) <= tuning.GRAPH_BYTES else 0,
    )


def _step_tokens(rows: Tensor) -> int:
    return max(rows.shape[1], min(tuning.BATCH_TOKENS, rows.numel()))


def _graphs(job: QuantizeJob, rows: Tensor) -> int:
    """What all blocks compute in a step, as `tuning.graph_bytes` counts it."""
    linears = job.subject.linears
    numbers = sum(spec.in_features * spec.out_features for spec in linears)
    numbers += 2 * _step_tokens(rows) * sum(spec.in_features + spec.out_features for spec in linears)
    return numbers * job.subject.placement.dtype.itemsize


class _Blank:
    """Rounded linears of the first blocks, each of its size."""

    def __init__(self, job: QuantizeJob, layers: int) -> None:
        self._job, self._linears = job, _linears(job, layers)
        self.bits = dict.fromkeys(self._linears, 4)
        self.scales = {name: torch.ones(_groups(job, spec), spec.out_features) for name, spec in self._linears.items()}

    def linear(self, name: str) -> RoundedLinear:
        spec, scale = self._linears[name], self.scales[name]
        rows = spec.in_features
        group = torch.arange(rows) // ceil(rows / len(scale))
        return RoundedLinear(torch.zeros(rows, spec.out_features, dtype=torch.int16), group, scale, None)


def _linears(job: QuantizeJob, layers: int) -> Mapping[str, LinearSpec]:
    """What is tuned of the first blocks."""
    specs = {spec.name: spec for spec in job.subject.linears}
    work = (linear.name for linear in job.work if linear.name != HEAD and block_of(linear.name) < layers)
    return {name: specs[name] for name in work if isinstance(job.codecs[name], GptqCodec)}


def _groups(job: QuantizeJob, spec: LinearSpec) -> int:
    codec = job.codecs[spec.name]
    assert isinstance(codec, GptqCodec)
    size = codec.settings.group_size
    return 1 if size < 0 else ceil(spec.in_features / size)
