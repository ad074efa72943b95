"""Recipes: what differs between formats when a model is quantized. Which layout each linear gets, and what config.json
says in the end; everything else is one path."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quantkit.checkpoint.spelling import parts_of
from quantkit.commands.quantization.rules import Rule, as_dynamic, deciding, require_used
from quantkit.errors import FormatError
from quantkit.formats import exl2_config
from quantkit.formats.codec import Codec
from quantkit.formats.exl2 import Exl2Codec
from quantkit.formats.gptq import GptqCodec
from quantkit.mix_plan import MixPlan
from quantkit.models.architecture import HEAD, LinearSpec
from quantkit.plan import Plan, PlannedLinear, plan_linear


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
    """One codec for all linears, and rules for those that differ.

    names       linear → what it is called on disk, which is what rules are matched with
    lm_head     the head is quantized too
    untie_head  the head is the embedding so far, and becomes a weight of its own
    """

    base: GptqCodec
    names: Mapping[str, str]
    rules: tuple[Rule, ...] = ()
    lm_head: bool = False
    untie_head: bool = False

    @property
    def name(self) -> str:
        return self.base.name

    def settings(self) -> dict[str, Any]:
        of_base = ("bits", "group_size", "sym", "act_order", "group_aware", "checkpoint_format")
        return {
            **{key: getattr(self.base, key) for key in of_base},
            "rule": [rule.text for rule in self.rules if rule.changes is not None],
            "skip": [rule.text for rule in self.rules if rule.changes is None],
            "lm_head": self.lm_head,
            "untie_head": self.untie_head,
        }

    def plan(self, specs: Iterable[LinearSpec], head: LinearSpec, stored_bits: Mapping[str, int]) -> Plan:
        """Raises UsageError for a rule that decides nothing, FormatError for a head that cannot be quantized."""
        own = [spec for spec in specs if spec.quantizable]
        asked = [*own, head] if self.lm_head else own
        require_used(self.rules, [self.on_disk(spec.name) for spec in asked])
        planned = [self._planned(spec, stored_bits[spec.name]) for spec in asked]
        last = planned.pop() if self.lm_head else None
        if last is not None and last.layout is None and self._codec(HEAD) is not None:
            raise FormatError(f"`{HEAD}` cannot be quantized: {last.dense_because}", hint="leave out `--lm-head`")
        quantized_head = last if last is not None and last.layout is not None else None
        added = quantized_head.stored_bits if quantized_head else stored_bits[HEAD]
        return Plan(tuple(planned), quantized_head, added_bits=added if self.untie_head else 0)

    def codec(self, linear: PlannedLinear) -> Codec:
        codec = self._codec(linear.name)
        assert codec is not None, "it stays dense"
        return codec

    def config(self, plan: Plan, rows: int, length: int, dataset: str) -> dict[str, Any]:
        return self.base.config(
            lm_head=plan.head is not None,
            true_sequential=False,
            quantized_names=_quantized_names(plan),
            dynamic=as_dynamic(self.rules) | self._dense_rules(plan),
        )

    def side_json(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {"quantize_config.json": config}

    def on_disk(self, linear: str) -> str:
        """What a linear is called in the files, which is what rules are matched with."""
        return self.names.get(linear, linear)

    def _codec(self, linear: str) -> GptqCodec | None:
        rule = deciding(self.rules, self.on_disk(linear))
        if rule is None:
            return self.base
        return None if rule.changes is None else rule.codec(self.base)

    def _planned(self, spec: LinearSpec, stored_bits: int) -> PlannedLinear:
        rule = deciding(self.rules, self.on_disk(spec.name))
        return plan_linear(spec, self._codec(spec.name), stored_bits, f"`{rule.option}`" if rule else None)

    def _dense_rules(self, plan: Plan) -> dict[str, dict[str, Any]]:
        """Rules for the linears that cannot be quantized: one for each kind, or each name where a kind is divided."""
        divided = {linear.kind for linear in plan.quantized}
        rules: dict[str, dict[str, Any]] = {}
        for linear in plan.dense:
            if self._codec(linear.name) is None:
                continue  # its `--skip` says so
            pattern = re.escape(self.on_disk(linear.name))
            if linear.kind not in divided:
                pattern = re.sub(r"\d+(?=\\\.)", r"\\d+", pattern)
            rules[f"-:^{pattern}$"] = {}
        return rules


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
        return exl2_codec(linear)

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


def exl2_codec(linear: PlannedLinear) -> Exl2Codec:
    """Of the layout that was planned, in parts where the linear is fused."""
    assert linear.layout is not None
    parts = zip(parts_of(linear.name), linear.widths, strict=True) if linear.widths else ()
    return Exl2Codec(linear.layout, tuple(parts))


def _quantized_names(plan: Plan) -> list[list[str]] | None:
    """The kinds of linear that are quantized, where others are not: transformers knows no `dynamic`, but takes this.

    None where all are quantized, where a kind is divided between blocks, and with quantized experts: transformers
    cannot read them, and other readers look for full names in the list.
    """
    quantized, dense = ({linear.kind: None for linear in linears} for linears in (plan.quantized, plan.dense))
    divided = quantized.keys() & dense.keys()
    experts = any(linear.is_expert for linear in plan.quantized)
    return [list(quantized)] if dense and not divided and not experts else None
