"""What a measurement will hold, known before any work: the layouts of each linear with their bits, damage not yet.

It answers what needs no damage: whether a budget can be met, and which linears EXL2 cannot hold.
"""

from collections.abc import Sequence

from quantkit.checkpoint.decoded import DecodedCheckpoint
from quantkit.commands.measuring.block import Trial, Trials
from quantkit.commands.quantization.job import Subject
from quantkit.formats import exl2_layout, exl2_mix
from quantkit.formats.codec import Layout
from quantkit.formats.exl2 import Exl2Codec
from quantkit.measurement import Candidate, MeasuredLinear, Measurement
from quantkit.models.architecture import LinearSpec


def exl2_trials(subject: Subject) -> Trials:
    """The candidates of every linear that EXL2 can hold; those of one that was quantized before keep its groups of rows
    together."""
    source, trials = subject.checkpoint, {}
    for spec in subject.linears:
        rows = source.group_rows(spec.name, spec.in_features) if isinstance(source, DecodedCheckpoint) else None
        if layouts := candidate_layouts(spec, rows):
            trials[spec.name] = {
                mix: Trial(Exl2Codec(layout), exl2_layout.stored_bits_in_parts(layout, spec.widths, spec.bias))
                for mix, layout in layouts.items()
            }
    return trials


def candidate_layouts(spec: LinearSpec, group_rows: int | None = None) -> dict[str, Layout]:
    """By mix: the candidates that a linear of this shape can hold, no layout twice; nothing where it can hold none."""
    layouts: dict[str, Layout] = {}
    if exl2_layout.shape_refusal(spec.in_features, 2) is None:
        mixes: Sequence[str] = exl2_mix.CANDIDATES
        for text in mixes if group_rows is None else exl2_mix.aligned(mixes, spec.in_features, group_rows):
            mix = exl2_mix.spell(exl2_mix.held(exl2_mix.read(text), spec.in_features))
            layout = exl2_layout.mixed(spec.in_features, exl2_mix.read(mix))
            if layout not in layouts.values():
                layouts[mix] = layout
    return layouts


def outline(subject: Subject) -> Measurement:
    """The measurement of this model with all errors and damages 0, and neither fingerprint nor text."""
    stored_bits, head, trials = subject.stored_bits, subject.head, exl2_trials(subject)
    linears = tuple(
        MeasuredLinear(
            spec.name,
            spec.in_features,
            spec.out_features,
            tuple(Candidate(mix, trial.bits, 0.0, 0.0) for mix, trial in trials.get(spec.name, {}).items()),
            0 if spec.name in trials else stored_bits[spec.name],
            exl2_layout.shape_refusal(spec.in_features, 2),
        )
        for spec in subject.linears
    )
    return Measurement("", head.in_features, head.in_features * head.out_features, {}, linears)
