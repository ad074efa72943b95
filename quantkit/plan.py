"""Plan: which linears of a model are quantized, in which layout, which stay dense and why; known before any work.

`plan = uniform(specs, codec, stored_bits)` gives every linear the codec's own layout, `plan_linear` one of them;
`plan.check_done(names)` compares what was planned with what was written, so that no linear can be skipped in silence.
Nothing here reads a weight.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import OWN_FAULT, FormatError, GateError
from quantkit.formats.codec import Codec, Layout
from quantkit.models.architecture import LinearSpec


@dataclass(frozen=True, slots=True)
class PlannedLinear:
    """One linear: the layout it gets, or, where `layout` is None, why it stays dense.

    short_group  rows of the last group and of the others, where the last is shorter and that is out of the ordinary
    widths       outputs of each part of a fused linear that is written in parts
    """

    name: str
    in_features: int
    out_features: int
    layout: Layout | None
    stored_bits: int
    dense_because: str | None = None
    short_group: tuple[int, int] | None = None
    widths: tuple[int, ...] = ()

    @property
    def weights(self) -> int:
        return self.in_features * self.out_features

    @property
    def kind(self) -> str:
        """The name without the numbers of block and expert: `mlp.experts.down_proj`."""
        return kind_of(self.name)

    @property
    def is_expert(self) -> bool:
        """Of a mixture: one of many that a router chooses from."""
        return ".experts." in self.name


def kind_of(name: str) -> str:
    """`model.layers.3.mlp.experts.1.up_proj` → `mlp.experts.up_proj`: what all blocks call this linear."""
    parts = name.split(".")
    block = next((index for index, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(part for part in parts[block + 1 :] if not part.isdigit())


@dataclass(frozen=True, slots=True)
class Plan:
    """Every linear of the blocks, in the order of the model; and the head where that is quantized too, which no sum
    below counts, unless the head is new: a tied one that becomes a weight of its own takes `added_bits` more.
    `notes` are remarks on the whole."""

    linears: tuple[PlannedLinear, ...]
    head: PlannedLinear | None = None
    added_bits: int = 0
    notes: tuple[str, ...] = ()

    @property
    def work(self) -> tuple[PlannedLinear, ...]:
        """All that is to be solved, the head last."""
        return self.quantized if self.head is None else (*self.quantized, self.head)

    @property
    def quantized(self) -> tuple[PlannedLinear, ...]:
        return tuple(linear for linear in self.linears if linear.layout is not None)

    @property
    def dense(self) -> tuple[PlannedLinear, ...]:
        return tuple(linear for linear in self.linears if linear.layout is None)

    @property
    def short(self) -> tuple[PlannedLinear, ...]:
        """Quantized linears whose last group is shorter than the others."""
        return tuple(linear for linear in self.linears if linear.short_group)

    @property
    def stored_bits(self) -> int:
        return sum(linear.stored_bits for linear in self.linears) + self.added_bits

    @property
    def bits_per_weight(self) -> float:
        """All stored bits of all linears, dense ones, side data and an added head included, for each weight."""
        return self.stored_bits / max(1, sum(linear.weights for linear in self.linears))

    def remarks(self) -> list[str]:
        """What a person should know before work starts: one line for each oddity, linears of a kind taken together."""
        dense = ((linear.kind, f"stays dense: {linear.dense_because}") for linear in self.dense)
        short = (
            (linear.kind, "the last group has {} rows, the others {}".format(*linear.short_group))
            for linear in self.short
            if linear.short_group
        )
        counts: dict[tuple[str, str], int] = {}
        for remark in (*dense, *short):
            counts[remark] = counts.get(remark, 0) + 1
        return [*(f"`{kind}` ({count}×) {text}" for (kind, text), count in counts.items()), *self.notes]

    def require_regular(self) -> None:
        """`--strict`: FormatError when any linear stays dense or ends in a short group."""
        hint = "leave out `--strict` to accept this, "
        if self.dense:
            worst = self.dense[0]
            raise FormatError(
                f"`{worst.name}` cannot be quantized: {worst.dense_because} ({len(self.dense)} such linears)",
                hint=hint + "or use another format",
            )
        for linear in self.short:
            last, rows = linear.short_group or (0, 0)
            divisors = [size for size in (1024, 512, 256, 128, 64, 32) if self._divides_all(size)]
            mixed = linear.layout is not None and len({group.bits for group in linear.layout.groups}) > 1
            instead = "or use another format" if mixed else f"or use `--group-size {divisors[0] if divisors else -1}`"
            raise FormatError(
                f"`{linear.name}` has {linear.in_features} input rows, which group size {rows} does not divide: "
                f"the last group has {last} ({len(self.short)} such linears)",
                hint=hint + instead,
            )

    def _divides_all(self, group_size: int) -> bool:
        return all(linear.in_features % group_size == 0 for linear in self.quantized)

    def check_done(self, done: Iterable[str]) -> None:
        """GateError unless exactly the planned linears were quantized."""
        planned, names = {linear.name for linear in self.work}, set(done)
        for name in sorted(planned - names):
            what = f"`{name}` was planned but not quantized ({len(planned - names)} such linears)"
            raise GateError(what, hint=OWN_FAULT)
        for name in sorted(names - planned):
            what = f"`{name}` was quantized but not planned ({len(names - planned)} such linears)"
            raise GateError(what, hint=OWN_FAULT)

    def as_json(self) -> dict[str, Any]:
        head = self.head
        return {
            "bits_per_weight": self.bits_per_weight,
            "head_bits_per_weight": None if head is None else head.stored_bits / head.weights,
            "added_bytes": self.added_bits // 8,
            "quantized": len(self.quantized),
            "dense": [{"name": linear.name, "reason": linear.dense_because} for linear in self.dense],
            "short_groups": [
                {"name": linear.name, "rows": linear.short_group[0], "group_size": linear.short_group[1]}
                for linear in self.short
                if linear.short_group
            ],
        }


def uniform(specs: Iterable[LinearSpec], codec: Codec, stored_bits: Mapping[str, int]) -> Plan:
    """One layout rule for all linears.

    stored_bits  of each linear as the source has it, bias included: what those take that the codec cannot hold
    """

    return Plan(tuple(plan_linear(spec, codec, stored_bits[spec.name]) for spec in specs if spec.quantizable))


def plan_linear(
    spec: LinearSpec, codec: Codec | None, stored_bits: int, dense_because: str | None = None
) -> PlannedLinear:
    """One linear in the codec's own layout. Without a codec, or where it cannot hold the linear, it stays dense, in its
    `stored_bits`."""
    name, rows, columns = spec.name, spec.in_features, spec.out_features
    refusal = dense_because if codec is None else codec.refusal(rows, columns)
    if codec is None or refusal is not None:
        return PlannedLinear(name, rows, columns, None, stored_bits, refusal)
    layout, bits = codec.layout(rows), codec.stored_bits(rows, columns, spec.bias)
    first, last = layout.groups[0].rows, layout.groups[-1].rows
    return PlannedLinear(name, rows, columns, layout, bits, short_group=(last, first) if last < first else None)
