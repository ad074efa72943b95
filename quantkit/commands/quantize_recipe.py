"""Recipes: what differs between formats when a model is quantized. Which layout each linear gets, and what config.json
says in the end; everything else is one path."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quantkit.formats import exl2_config
from quantkit.formats.codec import Codec
from quantkit.formats.exl2 import Exl2Codec
from quantkit.formats.gptq import GptqCodec
from quantkit.mix_plan import MixPlan
from quantkit.models.architecture import LinearSpec
from quantkit.plan import Plan, PlannedLinear, uniform


class Recipe(Protocol):
    """One format with its settings."""

    @property
    def name(self) -> str: ...

    def settings(self) -> dict[str, Any]:
        """What the report repeats of them."""

    def plan(self, specs: Iterable[LinearSpec], head: LinearSpec, stored_bits: Mapping[str, int]) -> Plan:
        """What every linear gets. `stored_bits` are those of each linear as the source has it, bias included.

        Raises PlanError for a plan of other linears than the model's.
        """

    def codec(self, linear: PlannedLinear) -> Codec:
        """For a linear that is to be quantized."""

    def config(self, plan: Plan, rows: int, length: int, dataset: str) -> dict[str, Any]:
        """`quantization_config`, once all is done; `rows` of `length` tokens of text came from `dataset`."""

    def side_json(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Further JSON files by name."""


@dataclass(frozen=True, slots=True)
class GptqRecipe:
    """One width and group size for all linears; the head stays dense."""

    uniform_codec: GptqCodec

    @property
    def name(self) -> str:
        return self.uniform_codec.name

    def settings(self) -> dict[str, Any]:
        codec = self.uniform_codec
        return {key: getattr(codec, key) for key in ("bits", "group_size", "sym", "act_order")}

    def plan(self, specs: Iterable[LinearSpec], head: LinearSpec, stored_bits: Mapping[str, int]) -> Plan:
        return uniform(specs, self.uniform_codec, stored_bits)

    def codec(self, linear: PlannedLinear) -> Codec:
        return self.uniform_codec

    def config(self, plan: Plan, rows: int, length: int, dataset: str) -> dict[str, Any]:
        return self.uniform_codec.config(true_sequential=False, dynamic=_rules(plan))

    def side_json(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {"quantize_config.json": config}


@dataclass(frozen=True, slots=True)
class Exl2Recipe:
    """A mix of widths for each linear, and one for the head."""

    mixes: MixPlan

    @property
    def name(self) -> str:
        return "exl2"

    def settings(self) -> dict[str, Any]:
        return {
            "bpw": self.mixes.target,
            "head_bits": self.mixes.head_bits,
            "include_head": self.mixes.include_head,
        }

    def plan(self, specs: Iterable[LinearSpec], head: LinearSpec, stored_bits: Mapping[str, int]) -> Plan:
        return self.mixes.layouts(specs, head, stored_bits)

    def codec(self, linear: PlannedLinear) -> Codec:
        assert linear.layout is not None
        return Exl2Codec(linear.layout)

    def config(self, plan: Plan, rows: int, length: int, dataset: str) -> dict[str, Any]:
        head = plan.head
        return exl2_config.write(
            bits=self.mixes.target,
            bits_per_weight=plan.bits_per_weight,
            head_bits=exl2_config.DENSE_HEAD_BITS if head is None else self.mixes.head_bits,
            rows=rows,
            length=length,
            dataset=dataset.rpartition("/")[2],
            head_bits_per_weight=None if head is None else head.stored_bits / head.weights,
        )

    def side_json(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {}


def _rules(plan: Plan) -> dict[str, dict[str, Any]]:
    """`dynamic` rules for the linears that stay dense: one for each kind, or for each name where a kind is divided."""
    divided = {linear.kind for linear in plan.quantized}
    rules: dict[str, dict[str, Any]] = {}
    for linear in plan.dense:
        pattern = re.escape(linear.name)
        if linear.kind not in divided:
            pattern = re.sub(r"\d+(?=\\\.)", r"\\d+", pattern)
        rules[f"-:^{pattern}$"] = {}
    return rules
