"""`quantkit measure`: what each EXL2 layout of each linear would cost in bits and do in damage.

Blocks are walked through as in quantizing, but unquantized outputs flow on. Each linear is solved in each candidate
layout; what its outputs lose is weighed by what they matter. With L = (W - Q)ᵀ H (W - Q), G the mean square of the
gradients at the outputs, and errors of different outputs and tokens taken as independent, the damage is ½ Σ_n G_n L_n
nats of KL, the Fisher form ½ tr(G ΔWᵀ H ΔW).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.fingerprint import fingerprint
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.commands.block_hessians import ReadyStage, ready_stages
from quantkit.commands.embedded import embedded
from quantkit.commands.measure_outline import outline, subject_layouts
from quantkit.commands.quantize_block import naming
from quantkit.commands.quantize_job import Subject, choose_placement, open_subject, require_finite
from quantkit.commands.sensitivity import run_backward
from quantkit.formats import exl2_layout
from quantkit.formats.codec import Layout
from quantkit.formats.exl2 import Exl2Codec
from quantkit.measurement import Candidate, MeasuredLinear, Measurement, damage_near, require_place
from quantkit.models.architecture import LinearSpec
from quantkit.models.linear import Linear
from quantkit.models.transformer import Rotary, load_block
from quantkit.plan import kind_of
from quantkit.progress import Progress, Tqdm
from quantkit.settings import MeasureSettings
from quantkit.solver.gptq import solve_together


@dataclass(frozen=True, slots=True)
class MeasureReport:
    """What was measured and where it was written."""

    out: Path
    measurement: Measurement

    def kind_rows(self) -> list[list[str]]:
        """Each kind of linear: the damage of all of them at a few of the layouts. None where linears were measured
        together, and nothing is known of one alone."""
        kinds: dict[str, list[tuple[MeasuredLinear, ...]]] = {}
        for choice in () if self.measurement.together else self.measurement.choices:
            kinds.setdefault(kind_of(choice[0].name), []).append(choice)
        return [_damage_row(kind, choices) for kind, choices in kinds.items()]

    def layer_rows(self) -> list[list[str]]:
        """Each block: the damage of all its linears at the same layouts."""
        blocks = self.measurement.choices_by_block()
        return [_damage_row(f"block {number}", choices) for number, choices in blocks.items()]

    def check_rows(self) -> list[list[str]]:
        """Each block that was checked: what was predicted, what was seen, and their ratio."""
        return [
            [
                f"block {check.block}",
                f"{check.bits_per_weight:.2f}",
                str(check.tokens),
                f"{check.predicted:.5f}",
                f"{check.seen:.5f}",
                f"{check.ratio:.2f}",
            ]
            for check in self.measurement.checks
        ]

    def rows(self) -> list[list[str]]:
        """Name and figure: the summary."""
        text, linears = self.measurement.calibration, self.measurement.linears
        dense = self.measurement.dense
        tokens = f", {text['rows']} × {text['length']} tokens" if "rows" in text else ""
        return [
            ["linears", f"{len(linears) - len(dense)} measured, {len(dense)} that EXL2 cannot hold"],
            ["calibration", f"{text['source']}{tokens}"],
            ["model", self.measurement.model[:12]],
        ]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of each table for people."""
        columns = ["bits per weight, about", "linears", *(f"{bits:g}" for bits in SHOWN_BITS)]
        unit = self.measurement.unit
        tables = [
            (f"damage by block, {unit}", columns, self.layer_rows()),
            (f"damage by kind of linear, {unit}", columns, self.kind_rows()),
            ("prediction against what was seen, nats of KL", CHECK_COLUMNS, self.check_rows()),
            (str(self.out), ["", ""], self.rows()),
        ]
        return [(title, names, rows) for title, names, rows in tables if rows]

    def as_json(self) -> dict[str, Any]:
        return {"out": str(self.out), **self.measurement.as_json()}


CHECK_COLUMNS = ["one block quantized", "bits/weight", "tokens", "predicted", "seen", "ratio"]
SHOWN_BITS = (2.3, 3.2, 4.2, 5.2, 6.2)


def measure(model: str | Path, out: str | Path, *, progress: Progress | None = None, **options: Any) -> MeasureReport:
    """Measure `model` into the file `out`. Options are the fields of `quantkit.settings.MeasureSettings`.

    report = quantkit.measure("models/llama", "llama.measurement.json", samples=64)
    """
    return run(MeasureSettings(str(model), Path(out), **options), progress or Tqdm())


def run(settings: MeasureSettings, progress: Progress, source: Checkpoint | None = None) -> MeasureReport:
    """Measure. Raises an error of the tree for anything that cannot be done; then no file is left behind.

    `source` is what is read in place of `settings.model`: a quantized model, decoded.
    """
    placement = choose_placement(settings.device, settings.dtype)
    checkpoint = open_checkpoint(settings.model) if source is None else source
    require_place(settings.out)
    subject = open_subject(checkpoint, settings, placement)
    require_finite(checkpoint, progress)
    folder = settings.out.absolute().with_name(f".{settings.out.name}.activations")
    squares = run_backward(subject, folder, settings.seed, progress).found.outputs
    measurement = measure_model(subject, folder, squares, settings.calibration, settings.seed, progress)
    measurement.save(settings.out)
    return MeasureReport(settings.out, measurement)


@torch.inference_mode()
def measure_model(
    subject: Subject, folder: Path, squares: Mapping[str, Tensor], source: str, seed: int, progress: Progress
) -> Measurement:
    """Every linear of the blocks in every candidate layout.

    folder   of the caller's own, for hidden states that are too many for the memory
    squares  of the gradients at the outputs of each linear, by `calibration.sensitivity`
    source, seed  where the rows of text come from, to be noted

    Raises CalibrationError for activations or gradients that are not finite.
    """
    specs = {spec.name: spec for spec in subject.linears}
    layouts = subject_layouts(subject)
    planned = outline(subject)
    wanted = {linear.name for linear in planned.linears if linear.candidates}
    found = {linear.name: linear for linear in planned.dense}
    squares = _with_unreached(squares, subject)
    device, dtype = subject.placement.device, subject.placement.dtype
    rotary = Rotary.at(subject.config.ropes, torch.arange(subject.rows.shape[1], device=device)[None])
    with embedded(subject, folder) as stream, progress.task("measure", total=len(wanted)) as task:
        for index in range(subject.config.num_layers):
            block = load_block(subject.checkpoint, subject.config, subject.architecture, index, dtype, device)
            for ready in ready_stages(block, stream, rotary, wanted):
                for name, candidates in _measure_stage(block.linears, ready, specs, layouts, squares).items():
                    spec = specs[name]
                    found[name] = MeasuredLinear(name, spec.in_features, spec.out_features, candidates)
                    task.advance(note=f"block {index}, {kind_of(name)}")
            if index + 1 == subject.config.num_layers:
                break

            def run_block(hidden: Tensor) -> Tensor:
                return block.forward(hidden.to(device), rotary)  # noqa: B023 - called before the next block is read

            stream.advance(run_block, f"block {index}")
    rows, length = subject.rows.shape
    digest = sha256(subject.rows.contiguous().numpy().tobytes()).hexdigest()
    calibration = {"source": source, "rows": rows, "length": length, "seed": seed, "tokens": digest}
    return replace(
        planned,
        model=fingerprint(subject.checkpoint),
        calibration=calibration,
        linears=tuple(found[name] for name in specs),
    )


def _with_unreached(found: Mapping[str, Tensor], subject: Subject) -> dict[str, Tensor]:
    """Experts that no token of the backward pass reached matter as little as the least of their siblings."""
    kinds: dict[str, list[Tensor]] = {}
    for name, squares in found.items():
        kinds.setdefault(kind_of(name), []).append(squares)
    least = {kind: min(squares, key=lambda own: float(own.sum())) for kind, squares in kinds.items()}
    return {spec.name: found.get(spec.name, least[kind_of(spec.name)]) for spec in subject.linears}


def _measure_stage(
    linears: Mapping[str, Linear],
    ready: ReadyStage,
    specs: Mapping[str, LinearSpec],
    layouts: Mapping[str, Mapping[str, Layout]],
    squares: Mapping[str, Tensor],
) -> dict[str, tuple[Candidate, ...]]:
    """Linears that read one input, solved side by side in one layout after another."""
    weights = [linears[name].weight() for name in ready.names]
    trace = float(len(weights[0])) if ready.factor is None else ready.factor.trace
    found: dict[str, list[Candidate]] = {name: [] for name in ready.names}
    for mix, layout in layouts[ready.names[0]].items():
        with naming(ready.names[0]):
            solutions = solve_together(weights, ready.factor, Exl2Codec(layout))
        for name, solution in zip(ready.names, solutions, strict=True):
            spec = specs[name]
            bits = exl2_layout.stored_bits(layout, spec.out_features, spec.bias)
            damage = 0.5 * float((solution.losses.cpu() * squares[name]).sum()) / trace
            found[name].append(Candidate(mix, bits, solution.error, damage))
    return {name: tuple(candidates) for name, candidates in found.items()}


def _damage_row(name: str, choices: list[tuple[MeasuredLinear, ...]]) -> list[str]:
    return [name, str(sum(map(len, choices))), *(f"{damage_near(choices, bits):.4f}" for bits in SHOWN_BITS)]
