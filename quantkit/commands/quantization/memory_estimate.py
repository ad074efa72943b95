"""What the work takes of memory, from the shapes of the model: of the process, and of a GPU. What is said here of the
process was held to what was seen, docs/results/memory-limit.md; no GPU has been looked at."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from quantkit.calibration.hessian import gathering_bytes
from quantkit.calibration.sensitivity import CHUNK_OUTPUTS
from quantkit.commands.quantization.hessians import in_passes
from quantkit.commands.quantization.job import Subject
from quantkit.models.architecture import LinearSpec, by_stage
from quantkit.solver.gptq import SUMMED_COLUMNS
from quantkit.solver.parts import PART_OUTPUTS

SINGLE = 4
"""Bytes of a float32."""
WORKING_BYTES = 224 * (1 << 20)
"""Compiled kernels, buffers of libraries, and what is freed but not given back: what was seen above the rest."""
SPARING_WORKING_BYTES = 128 * (1 << 20)
"""The same where what is freed is given back at once."""
SOLVED_BYTES = 14
"""Of a weight that is solved alone: as read, in order, its error, each float32; its code, and the file's bits."""
MADE_BYTES = 6
"""Of one that has been solved: its code, the value, and the file's bits."""


def peak(
    subject: Subject, *, weighs: bool, measures: bool = False, hessian_bytes: int = SINGLE, alone: bool = False
) -> int:
    """What the work takes above what the process has, at its worst moment."""
    blocks = {tuple(_shapes(stages)): stages for stages in _blocks(subject)}
    moments = [_ends(subject, weighs=weighs)]
    for stages in blocks.values():
        kept = _kept(stages, weighs=weighs)
        moments += [kept + each for each in _solving(subject, stages, hessian_bytes, 1 + measures, alone=alone)]
        if weighs:
            moments.append(_backward(subject, stages))
    return max(moments) + (SPARING_WORKING_BYTES if subject.budget.apart else WORKING_BYTES)


def device_peak(
    subject: Subject,
    *,
    weighs: bool,
    measures: bool = False,
    hessian_bytes: int = SINGLE,
    alone: bool = False,
    head: bool = False,
) -> int:
    """What the work takes of a GPU at its worst moment, `head` with the output linear among what is solved; hidden
    states and what has been made are in main memory. What torch and the driver take for themselves is not in it."""
    subject = replace(subject, budget=replace(subject.budget, spill_bytes=0))  # states are never there
    blocks = {tuple(_shapes(stages)): stages for stages in _blocks(subject)}
    solved = [*blocks.values(), *([[[subject.head]]] if head else [])]
    moments = [_ends(subject, weighs=True)] if weighs else []
    for stages in solved:
        moments += _solving(subject, stages, hessian_bytes, 1 + measures, alone=alone)
    moments += [_backward(subject, stages) for stages in blocks.values() if weighs]
    return max(moments)


def _blocks(subject: Subject) -> Iterator[list[list[LinearSpec]]]:
    config, architecture = subject.config, subject.architecture
    for layer in range(config.num_layers):
        yield by_stage(architecture.block_linears(config, layer))


def _shapes(stages: Sequence[Sequence[LinearSpec]]) -> Iterator[tuple[int, int]]:
    return ((spec.in_features, spec.out_features) for stage in stages for spec in stage)


def _weights(stages: Sequence[Sequence[LinearSpec]], subject: Subject) -> int:
    """Of a block, as it is stored and as it runs."""
    stored = max(1, subject.stored_bits[stages[0][0].name] // 8 // max(1, _size(stages[0][0])))
    runs = subject.placement.dtype.itemsize
    return sum(map(_size, (spec for stage in stages for spec in stage))) * (stored + (runs if runs != stored else 0))


def _size(spec: LinearSpec) -> int:
    return spec.in_features * spec.out_features


def _kept(stages: Sequence[Sequence[LinearSpec]], *, weighs: bool) -> int:
    """While a block is solved: what has been made of it so far, and covariances of its outputs."""
    specs = [spec for stage in stages for spec in stage]
    covariances = torch.bfloat16.itemsize * CHUNK_OUTPUTS * sum(spec.out_features for spec in specs)
    return sum(map(_size, specs)) // 2 + (covariances if weighs else 0)


def _solving(
    subject: Subject, stages: Sequence[Sequence[LinearSpec]], hessian_bytes: int, copies: int, *, alone: bool
) -> Iterator[int]:
    """Gathering the Hessians of a pass, `copies` for each stage, then factoring and solving each of its stages."""
    budget, block = subject.budget, _weights(stages, subject)
    width = subject.config.hidden_size
    widest = max(spec.out_features for stage in stages for spec in stage)
    tokens = min(max(budget.walk_tokens, subject.rows.shape[1]), max(1, subject.rows.numel()))
    activations = tokens * (6 * SINGLE * width + 4 * subject.placement.dtype.itemsize * widest)
    if not subject.rows.numel():
        yield block + 5 * SINGLE * max(_size(spec) for stage in stages for spec in stage)
        return
    for part in in_passes(stages, lambda stage: _hessian(stage, copies * hessian_bytes), budget.hessian_bytes):
        held = sum(_hessian(stage, copies * hessian_bytes) for stage in part)
        yield block + activations + held
        for stage in part:
            rest, features = held - _hessian(stage, copies * hessian_bytes), stage[0].in_features
            square = features * features
            judge = square * hessian_bytes * (copies - 1)
            yield block + rest + judge + square * (hessian_bytes + (SINGLE if hessian_bytes > SINGLE else 0))
            yield block + rest + judge + square * SINGLE + _solved(stage, budget.apart, alone)
            held = rest


def _solved(stage: Sequence[LinearSpec], apart: bool, alone: bool) -> int:
    """Beside the factor: the weights, what is known of their outputs, and of some columns squares and errors."""
    together = (max if apart else sum)(map(_size, stage))
    outputs = (max if apart else sum)(spec.out_features for spec in stage)
    each, inputs = SOLVED_BYTES if apart else 5 * SINGLE, stage[0].in_features
    weights = each * together
    if apart and alone:
        weights = max(MADE_BYTES * together, each * inputs * min(PART_OUTPUTS, outputs) + together)
    return weights + 3 * SINGLE * CHUNK_OUTPUTS * outputs + 3 * SINGLE * SUMMED_COLUMNS * inputs


def _hessian(stage: Sequence[LinearSpec], hessian_bytes: int) -> int:
    return gathering_bytes(stage[0].in_features, hessian_bytes)


def _backward(subject: Subject, stages: Sequence[Sequence[LinearSpec]]) -> int:
    """A block with all that autograd keeps of a batch, its gradients, and the covariances of its outputs."""
    budget = subject.budget
    tokens = min(max(budget.backward_tokens, subject.rows.shape[1]), max(1, subject.rows.numel()))
    each = 20 * SINGLE * subject.config.hidden_size
    for stage in stages[:16]:  # of a mixture, a token runs through a few experts
        each += 2 * SINGLE * stage[0].in_features + (SINGLE + 2 * 2) * sum(spec.out_features for spec in stage)
    covariances = SINGLE * CHUNK_OUTPUTS * sum(spec.out_features for stage in stages for spec in stage)
    return _weights(stages, subject) + tokens * each + covariances * 3 // 2 + _states(subject)


def _ends(subject: Subject, *, weighs: bool) -> int:
    """Embedding and head, and the logits that gradients begin with."""
    table = subject.config.vocab_size * subject.config.hidden_size
    itemsize = max(subject.placement.dtype.itemsize, torch.bfloat16.itemsize)
    logits = 16 * min(subject.budget.logits_at_once, subject.backward_rows.numel() * subject.config.vocab_size)
    return 2 * table * itemsize + (logits + _states(subject) if weighs else 0)


def _states(subject: Subject) -> int:
    return 0 if subject.backward_spilled_bytes else subject.backward_bytes
