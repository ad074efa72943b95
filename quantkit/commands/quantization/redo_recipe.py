"""The recipe of a folder that is there already: what each of its linears is stored as."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.checkpoint.reader import Checkpoint
from quantkit.commands.quantization.exl2 import choose_gptq
from quantkit.commands.quantization.job import Subject
from quantkit.commands.quantization.recipe import Recipe, exl2_codec
from quantkit.commands.quantization.widths import written_rules
from quantkit.formats import exl2
from quantkit.formats.codec import Codec, Layout
from quantkit.mix_plan import with_layout
from quantkit.models.architecture import HEAD, LinearSpec
from quantkit.plan import Plan, PlannedLinear
from quantkit.settings import QuantizeSettings

DENSE_THERE = "it is dense in the result"


def stored_recipe(settings: QuantizeSettings, subject: Subject, result: Checkpoint) -> Recipe:
    """Of `result`, which these settings have made. A GPTQ folder follows from its settings and the widths that it says
    were chosen; the mixes of EXL2 are read from the tensors, since nobody knows the measurement any more."""
    if settings.format == "gptq":
        recipe = choose_gptq(settings, subject)
        dynamic = (result.quantization or {}).get("dynamic") or {}
        return replace(recipe, rules=(*recipe.rules, *written_rules(dynamic, recipe)))
    asked = {"bpw": settings.bpw, "head_bits": settings.head_bits, "include_head": settings.include_head}
    layouts = {spec.name: _layout(result, spec.name) for spec in (*subject.linears, subject.head)}
    known = {name: layout for name, layout in layouts.items() if layout is not None}
    return StoredExl2Recipe(asked, known, result.quantization or {})


@dataclass(frozen=True, slots=True)
class StoredExl2Recipe:
    """
    asked    the settings that made the folder
    layouts  of each linear that is quantized there
    said     what its config.json says
    """

    asked: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    said: Mapping[str, Any]

    @property
    def name(self) -> str:
        return "exl2"

    def settings(self) -> dict[str, Any]:
        return dict(self.asked)

    def plan(self, specs: Iterable[LinearSpec], head: LinearSpec, stored_bits: Mapping[str, int]) -> Plan:
        planned = (self._planned(spec, stored_bits[spec.name]) for spec in specs if spec.quantizable)
        own = self.layouts.get(head.name)
        return Plan(tuple(planned), None if own is None else with_layout(head, own))

    def codec(self, linear: PlannedLinear) -> Codec:
        return exl2_codec(linear)

    def config(self, plan: Plan, rows: int, length: int, dataset: str) -> dict[str, Any]:
        return dict(self.said)

    def side_json(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {}

    def _planned(self, spec: LinearSpec, stored_bits: int) -> PlannedLinear:
        if spec.name in self.layouts:
            return with_layout(spec, self.layouts[spec.name])
        return PlannedLinear(spec.name, spec.in_features, spec.out_features, None, stored_bits, DENSE_THERE)


def _layout(result: Checkpoint, linear: str) -> Layout | None:
    """None for a linear that is dense, or a head that is not there. The parts of a fused one have one layout."""
    if linear == HEAD and not result.suffixes(HEAD):
        return None
    words = [name for name in result.tensors_of(linear) if name.endswith(f".{exl2.MARK}")]
    if not words:
        return None
    module = words[0].removesuffix(f".{exl2.MARK}")
    return exl2.read_layout(module, result.tensor(f"{module}.q_groups"), result.info(words[0]).shape[0])
