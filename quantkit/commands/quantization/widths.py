"""`--effort best` for a target that reads several widths in one folder: each linear gets the width that its damage is
worth, and all of them together take no more bits than `--bits` gives them alike.

Each linear is solved in each width that the target reads, which is measured as `quantkit measure` measures EXL2, and
the allocator chooses. The choice is written as rules, as if somebody had given them with `--rule`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.allocation import allocate
from quantkit.calibration.sensitivity import Sensitivity
from quantkit.checkpoint.spelling import fused_of
from quantkit.commands.measuring.block import Trial, Trials
from quantkit.commands.measuring.walk import measure_blocks
from quantkit.commands.quantization.job import Subject
from quantkit.commands.quantization.recipe import GptqRecipe
from quantkit.commands.quantization.rules import Rule, as_dynamic, deciding
from quantkit.job.job import Job
from quantkit.measurement import MeasuredLinear
from quantkit.mix_plan import choice_options, chosen_by_linear
from quantkit.models.architecture import LinearSpec, block_of
from quantkit.plan import kind_of
from quantkit.progress import Progress

STEPS = "widths"
WIDTHS = (2, 3, 4, 8)

BLOCK = "BLOCK"
"""What stands for the number of a block in a name."""


@dataclass(frozen=True, slots=True)
class Freedom:
    """Widths that linears may have; `alone` where those that read one input may differ."""

    widths: tuple[int, ...]
    alone: bool


def choose_widths(
    recipe: GptqRecipe, freedom: Freedom, subject: Subject, job: Job, sensitivity: Sensitivity, progress: Progress
) -> GptqRecipe:
    """The recipe with a rule for each linear that gets another width than `--bits`. Linears that a rule of the user's
    decides about, and those that cannot be quantized, are left alone.

    job          keeps what is measured, one step for each block
    sensitivity  what a backward pass over the first rows has found
    """
    trials = width_trials(recipe, freedom, subject)
    measured = measure_blocks(subject, job, STEPS, trials, sensitivity, progress)
    together = _together([spec for spec in subject.linears if spec.name in trials], alone=freedom.alone)
    choices = [[measured[name] for name in names] for names in together]
    base = str(recipe.base.bits)
    budget = sum(trials[name][base].bits for name in trials)
    found = allocate(choice_options(choices), budget, sum(measured[name].weights for name in trials))
    widths = {name: int(chosen.mix) for name, chosen in chosen_by_linear(choices, found).items()}
    counts = ", ".join(f"{count} of {bits} bits" for bits, count in sorted(Counter(widths.values()).items()))
    alike = _damage(measured.values(), base)
    progress.say(f"widths of linears: {counts}; predicted damage {found.damage:.4f}, all of {base} bits {alike:.4f}")
    other = {recipe.on_disk(name): bits for name, bits in widths.items() if bits != recipe.base.bits}
    return replace(recipe, rules=(*recipe.rules, *width_rules(other)))


def width_trials(recipe: GptqRecipe, freedom: Freedom, subject: Subject) -> Trials:
    """The candidates of each linear that is free, called by their bits."""
    codecs = {str(bits): replace(recipe.base, bits=bits) for bits in freedom.widths}
    return {
        spec.name: {
            name: Trial(codec, codec.stored_bits(spec.in_features, spec.out_features, spec.bias))
            for name, codec in codecs.items()
        }
        for spec in subject.linears
        if deciding(recipe.rules, recipe.on_disk(spec.name)) is None
        and all(codec.refusal(spec.in_features, spec.out_features) is None for codec in codecs.values())
    }


def width_rules(bits: Mapping[str, int]) -> tuple[Rule, ...]:
    """One rule for all blocks in which a linear has the same width, by its name on disk."""
    blocks: dict[tuple[str, int], list[str]] = {}
    for name, width in bits.items():
        before, number, after = re.split(r"(?<=\.)(\d+)(?=\.)", name, maxsplit=1)
        blocks.setdefault((f"{before}{BLOCK}{after}", width), []).append(number)
    return tuple(
        Rule("^" + _named(form).replace(BLOCK, f"(?:{'|'.join(numbers)})") + "$", {"bits": width})
        for (form, width), numbers in blocks.items()
    )


def written_rules(dynamic: Mapping[str, Any], recipe: GptqRecipe) -> tuple[Rule, ...]:
    """The rules that `choose_widths` gave a folder with this `dynamic`, beside those of its recipe."""
    known = as_dynamic(recipe.rules)
    return tuple(
        Rule(pattern.removeprefix("+:"), {"bits": changes["bits"]})
        for pattern, changes in dynamic.items()
        if pattern not in known and pattern.startswith("+:") and changes.keys() == {"bits"}
    )


def _named(form: str) -> str:
    """The pattern of a name, and of what it is called where several linears are run as one: older readers know no
    other."""
    before, dot, last = form.rpartition(".")
    fused = fused_of(form)
    return re.escape(before + dot) + (last if fused is None else f"(?:{last}|{fused.rpartition('.')[2]})")


def _together(specs: Iterable[LinearSpec], *, alone: bool) -> list[tuple[str, ...]]:
    """Linears that must have one width: each by itself, or those of one input, and with them all experts of a block."""
    if alone:
        return [(spec.name,) for spec in specs]
    together: dict[tuple[int, str], list[str]] = {}
    for spec in specs:
        together.setdefault((block_of(spec.name), kind_of(spec.stage)), []).append(spec.name)
    return [tuple(names) for names in together.values()]


def _damage(measured: Iterable[MeasuredLinear], candidate: str) -> float:
    return sum(one.damage for linear in measured for one in linear.candidates if one.mix == candidate)
