"""Every linear of the blocks solved as every one of its candidates, block after block; unquantized outputs flow on.

Each block is a step of the job, so that one that is measured is not measured again.
"""

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.sensitivity import Sensitivity
from quantkit.commands.measuring.block import BlockMeasured, Trials
from quantkit.commands.measuring.check import coarse_damage
from quantkit.commands.quantization.fallback import Descent
from quantkit.commands.quantization.job import Subject
from quantkit.commands.quantization.walk import BlockWalk
from quantkit.job.job import Job
from quantkit.measurement import Candidate, MeasuredLinear
from quantkit.models.architecture import LinearSpec
from quantkit.plan import kind_of
from quantkit.progress import Progress


@dataclass(frozen=True, slots=True)
class Checked:
    """What steps keep for a check of the prediction: each linear as one of its candidates, in these blocks and in any
    that does more damage so than all before it."""

    blocks: Container[int]
    candidates: Mapping[str, str]


NOTHING = Checked((), {})


@torch.inference_mode()
def measure_blocks(
    subject: Subject,
    job: Job,
    steps: str,
    trials: Trials,
    sensitivity: Sensitivity,
    progress: Progress,
    checked: Checked = NOTHING,
) -> dict[str, MeasuredLinear]:
    """Every linear that has trials, by name.

    steps        of the job are called `STEPS 0`, `STEPS 1`, …; see `BlockWalk`
    sensitivity  what a backward pass over the first rows has found

    Raises CalibrationError for activations or gradients that are not finite.
    """
    specs = {spec.name: spec for spec in subject.linears}
    squares = _with_unreached(sensitivity.outputs, subject)
    layers = subject.config.num_layers
    walk, descent = BlockWalk(subject, job, steps), Descent(subject, progress)
    found: dict[str, MeasuredLinear] = {}
    worst = 0.0
    for index in range(walk.done):
        done = _read(job.value(walk.step(index)), specs)
        found |= done
        worst = max(worst, _damage(done, checked))
    with progress.task("measure", total=len(trials)) as task:
        if walk.done:
            task.advance(len(found), note="done before")
        stream = walk.open() if walk.done < layers else None
        for index in range(walk.done, layers):
            assert stream is not None
            descent.begin(f"block {index}, measured")
            made = BlockMeasured(subject, index, specs, trials, squares, checked.candidates, task)
            descent.run(partial(made.solve, stream, trials, sensitivity))
            own = made.found
            seal = None
            if index + 1 < layers:

                stream, seal = walk.follow(partial(made.leave, stream, descent), index)
            made.forget()
            with job.step(walk.step(index)) as step:
                if index in checked.blocks or _damage(own, checked) > worst:
                    for name, tensor in made.kept.tensors.items():
                        step.add(name, tensor)
                step.finish({"linears": _written(own), "states": seal, "fallbacks": descent.noted()})
            walk.leave(index)
            found |= own
            worst = max(worst, _damage(own, checked))
    return found


def _damage(linears: Mapping[str, MeasuredLinear], checked: Checked) -> float:
    """What is predicted of linears as they are checked; nothing where none is."""
    return coarse_damage(linears.values()) if checked.candidates else 0.0


def _written(linears: Mapping[str, MeasuredLinear]) -> dict[str, list[dict[str, Any]]]:
    return {name: [asdict(candidate) for candidate in linear.candidates] for name, linear in linears.items()}


def _read(value: Mapping[str, Any], specs: Mapping[str, LinearSpec]) -> dict[str, MeasuredLinear]:
    """What `_written` wrote."""
    return {
        name: MeasuredLinear(
            name,
            specs[name].in_features,
            specs[name].out_features,
            tuple(Candidate(**candidate) for candidate in candidates),
        )
        for name, candidates in value["linears"].items()
    }


def _with_unreached(found: Mapping[str, Tensor], subject: Subject) -> dict[str, Tensor]:
    """Experts that no token of the backward pass reached matter as little as the least of their siblings."""
    kinds: dict[str, list[Tensor]] = {}
    for name, squares in found.items():
        kinds.setdefault(kind_of(name), []).append(squares)
    least = {kind: min(squares, key=lambda own: float(own.sum())) for kind, squares in kinds.items()}
    return {spec.name: found.get(spec.name, least[kind_of(spec.name)]) for spec in subject.linears}
