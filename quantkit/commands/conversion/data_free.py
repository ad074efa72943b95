"""EXL2 from the weights alone: nearest codes, no text, no model, one linear in memory at a time.

Widths are allocated by what rounding does to each linear, ‖W - Q‖² / ‖W‖², all linears counting alike: for small errors
the divergence of a model grows in proportion to a weighted sum of these (arXiv 2411.17525, theorem 1), and without
data the weights of that sum are unknown. The error of a mix is found on some columns of each linear, since all columns
of a group are rounded alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.decoded import DecodedCheckpoint
from quantkit.checkpoint.fingerprint import fingerprint
from quantkit.checkpoint.reader import Checkpoint
from quantkit.commands.conversion.folder import has_own_head, rewriting
from quantkit.commands.measuring.outline import candidate_layouts
from quantkit.commands.quantization.job import stored_bits
from quantkit.commands.quantization.recipe import exl2_codec
from quantkit.formats import exl2_config, exl2_layout
from quantkit.formats.codec import Codes, Layout, StoredTensor
from quantkit.formats.exl2 import Exl2Codec
from quantkit.inventory import head_spec
from quantkit.measurement import Candidate, MeasuredLinear, Measurement
from quantkit.mix_plan import plan_mixes
from quantkit.models.architecture import EMBEDDING, HEAD, LinearSpec
from quantkit.plan import PlannedLinear
from quantkit.progress import Progress

COLUMNS = 128
"""Columns on which mixes are compared."""


@dataclass(frozen=True, slots=True, eq=False)
class DataFree:
    """A model whose linears have been measured by their weights."""

    source: Checkpoint
    head_bits: int
    measurement: Measurement

    @classmethod
    def measured(cls, source: Checkpoint, head_bits: int, progress: Progress) -> "DataFree":
        """Raises FormatError for weights that EXL2 cannot hold."""
        decoded = DecodedCheckpoint.of(source)
        specs = _specs(source)
        linears = []
        with progress.task("measure weights", total=len(specs)) as task:
            for spec in specs:
                layouts = candidate_layouts(spec, decoded.group_rows(spec.name, spec.in_features))
                linears.append(_measure(source.linear(spec.name), spec, layouts, stored_bits(source, spec.name)))
                task.advance(note=spec.name)
        head = head_spec(source.model_config)
        weights = head.in_features * head.out_features
        measurement = Measurement(fingerprint(source, progress), head.in_features, weights, {}, tuple(linears))
        return cls(source, head_bits, measurement)

    def predict(self, rate: float) -> float:
        """Relative squared errors of all linears together. Raises PlanError for a rate out of reach."""
        return plan_mixes(self.measurement, rate, head_bits=self.head_bits)[1].damage

    def write(self, rate: float, out: Path, overwrite: bool, progress: Progress) -> None:
        """Raises PlanError for a rate out of reach, FormatError for weights that EXL2 cannot hold."""
        source, head = self.source, head_spec(self.source.model_config)
        mixes, _ = plan_mixes(self.measurement, rate, head_bits=self.head_bits)
        before_bits = {spec.name: stored_bits(source, spec.name) for spec in _specs(source)}
        plan = mixes.layouts(_specs(source), head, before_bits)
        with (
            rewriting(source, out, progress, overwrite=overwrite) as new,
            progress.task("quantize", total=len(plan.work)) as task,
        ):
            for linear in plan.work:
                before = _read(source, linear)
                codes = nearest(before, linear)
                stored = exl2_codec(linear).encode(codes, before.bias)
                new.add_linear(linear.name, stored, codes.dequantize())
                task.advance(note=linear.name)
            new.add_others()
            quantization = exl2_config.write(
                bits=rate,
                bits_per_weight=plan.bits_per_weight,
                head_bits=self.head_bits if plan.head else exl2_config.DENSE_HEAD_BITS,
                rows=0,
                length=0,
                dataset="none",
                head_bits_per_weight=plan.head.stored_bits / plan.head.weights if plan.head else None,
            )
            new.finish({**source.config, "quantization_config": quantization})


def nearest(before: StoredTensor, linear: PlannedLinear) -> Codes:
    """The weight rounded in the layout that was planned for it."""
    weight = before.dequantize().to(torch.float32).contiguous()
    order = _order(weight, before.row_groups)
    assert linear.layout is not None
    return _round(weight[order], linear.layout, order)


def _round(rows: Tensor, layout: Layout, order: Tensor) -> Codes:
    """Rows in the order given, each group on the grid of least squared error."""
    codec = Exl2Codec(layout)
    grids, q = [], []
    for group, start, end in layout.spans():
        own = rows[start:end].contiguous()
        grid = codec.fit(own, group.bits, torch.ones(len(own)))
        grids.append(grid)
        q.append(grid.quantize(own))
    return Codes(torch.cat(q), tuple(grids), layout, order)


def _order(weight: Tensor, groups: Tensor | None) -> Tensor:
    """Most important rows first, as far as weights tell, old groups together. int64 [in].

    With act-order the source has its most active inputs in the first groups. Else the groups with the largest weights
    come first: their codes are the coarsest. Rows without groups keep their order.
    """
    rows = len(weight)
    if groups is None or int(groups.max()) == 0:
        return torch.arange(rows)
    if bool((groups.diff() >= 0).all()):
        count = int(groups.max()) + 1
        energy = torch.zeros(count).index_add_(0, groups, weight.square().mean(1))
        sizes = torch.bincount(groups, minlength=count)
        means = energy / sizes.clamp(min=1)
        means[sizes < sizes.max()] = -1  # a short last group stays last: all others keep their borders
        rank = torch.argsort(torch.argsort(means, descending=True, stable=True))
        groups = rank[groups]
    return torch.argsort(groups, stable=True)


def _measure(
    before: StoredTensor, spec: LinearSpec, layouts: Mapping[str, Layout], stored_bits: int
) -> MeasuredLinear:
    if not layouts:
        reason = exl2_layout.shape_refusal(spec.in_features, 2)
        return MeasuredLinear(spec.name, spec.in_features, spec.out_features, (), stored_bits, reason)
    weight = before.dequantize().to(torch.float32)
    order = _order(weight, before.row_groups)
    columns = torch.linspace(0, spec.out_features - 1, min(COLUMNS, spec.out_features)).long()
    rows = weight[:, columns][order].contiguous()
    energy = float(rows.double().square().sum()) or 1.0
    found = []
    for mix, layout in layouts.items():
        missed = _round(rows, layout, torch.arange(len(rows))).dequantize() - rows
        error = float(missed.double().square().sum()) / energy
        found.append(Candidate(mix, exl2_layout.stored_bits_in_parts(layout, spec.widths, spec.bias), error, error))
    return MeasuredLinear(spec.name, spec.in_features, spec.out_features, tuple(found))


def _specs(source: Checkpoint) -> list[LinearSpec]:
    return [spec for spec in source.architecture.linears(source.model_config) if spec.quantizable]


def _read(source: Checkpoint, linear: PlannedLinear) -> StoredTensor:
    tied = linear.name == HEAD and not has_own_head(source)
    return source.linear(EMBEDDING if tied else linear.name)
