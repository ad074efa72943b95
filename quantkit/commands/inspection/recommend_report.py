"""What `quantkit recommend` says: what fits, with its margin, over rates and contexts, and what is recommended."""

from dataclasses import dataclass
from typing import Any

from quantkit import memory
from quantkit.commands.inspection.blueprint import Blueprint
from quantkit.formats.exl2_config import DENSE_HEAD_BITS
from quantkit.memory import KvFormat, Need, Rate, Weights

GIB = 2**30
RESIDENT_TOKENS = 4096 + memory.PAGE_TOKENS
"""What stays on the device of a cache whose older pages are in host memory: the newest positions and the first page."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Where the model is to run. Without a card it is the CPU, which keeps dense weights in float32."""

    memory: int
    host: int | None
    on_device: bool

    @property
    def number_bytes(self) -> int:
        return memory.HALF if self.on_device else 4

    @property
    def overhead(self) -> int:
        return memory.DEVICE_OVERHEAD if self.on_device else memory.HOST_OVERHEAD


@dataclass(frozen=True, slots=True)
class Fit:
    """One rate with one cache at one context. `margin` in bytes, below 0 where it does not fit; `streamed` where it
    fits because the older part of the cache is in host memory."""

    rate: Rate
    kv: KvFormat
    context: int
    weights: Weights
    need: Need
    margin: int
    streamed: bool

    @property
    def fits(self) -> bool:
        return self.margin >= 0

    def as_json(self) -> dict[str, Any]:
        return {
            "rate": self.rate.name,
            "format": self.rate.format,
            "bits_per_weight": self.weights.bits_per_weight,
            "head_bits": self.rate.head_bits,
            "kv": self.kv.name,
            "context": self.context,
            "weights_bytes": self.need.weights,
            "cache_bytes": self.need.cache,
            "activation_bytes": self.need.activations,
            "overhead_bytes": self.need.overhead,
            "total_bytes": self.need.total,
            "margin_bytes": self.margin,
            "fits": self.fits,
            "cache_in_host_memory": self.streamed,
        }


@dataclass(frozen=True, slots=True)
class RecommendReport:
    """`grid` has a row for each rate and a column for each of `contexts`, with the cache `kv`."""

    blueprint: Blueprint
    budget: Budget
    context: int
    batch: int
    kv: KvFormat
    contexts: tuple[int, ...]
    grid: tuple[tuple[Fit, ...], ...]
    caches: tuple[Fit, ...]
    chosen: Fit | None
    least: Fit
    longest: int | None
    expected_kl: dict[str, float]

    def grid_columns(self) -> list[str]:
        kl = ["KL"] if self.expected_kl else []
        return ["margin in GiB", "bits", "weights", *kl, *(_tokens(context) for context in self.contexts)]

    def grid_rows(self) -> list[list[str]]:
        """Margins: what is left over, or below 0 what is lacking; `*` where the older cache is in host memory."""
        rows = []
        for fits in self.grid:
            rate, weights = fits[0].rate, fits[0].weights
            kl = self.expected_kl.get(rate.name)
            shown_kl = [] if not self.expected_kl else ["" if kl is None else f"{kl:.4f}"]
            cells = [f"{_gib(fit.margin)}{'*' if fit.streamed else ''}" for fit in fits]
            rows.append([rate.name, f"{weights.bits_per_weight:.2f}", f"{weights.total / GIB:.1f}", *shown_kl, *cells])
        return rows

    def cache_rows(self) -> list[list[str]]:
        """Each cache at the context that was asked for, with the best rate that fits beside it."""
        return [
            [
                fit.kv.name,
                f"{fit.kv.bytes_per_token(self.blueprint.config) / 1024:.1f}",
                f"{fit.need.cache / GIB:.2f}",
                fit.rate.name if fit.fits else "none",
                f"{_gib(fit.margin)}{'*' if fit.streamed else ''}",
            ]
            for fit in self.caches
        ]

    def rows(self) -> list[list[str]]:
        """The recommendation, or the smallest change that makes one possible."""
        where = "card" if self.budget.on_device else "machine"
        rows = [
            ["model", f"{self.blueprint.family}, {self.blueprint.parameters:,} parameters"],
            [where, f"{self.budget.memory / GIB:.1f} GiB, {self.batch} × {self.context:,} positions"],
        ]
        fit = self.chosen
        if fit is None:
            least = f"{self.least.rate.name} with {self.least.kv.name} needs {self.least.need.total / GIB:.1f} GiB"
            rows += [["recommended", "nothing fits"], ["the least", least]]
            if self.longest is not None:
                rows.append(["what would fit", f"{self.longest:,} positions with these"])
            return rows
        head = "as it is" if fit.rate.head_bits == DENSE_HEAD_BITS else f"{fit.rate.head_bits} bits"
        need = fit.need
        rows += [
            ["recommended", f"{fit.rate.name}, head {head}, cache {fit.kv.name}"],
            ["weights", f"{need.weights / GIB:.2f} GiB, {fit.weights.bits_per_weight:.2f} bits per weight of linears"],
            ["cache", f"{need.cache / GIB:.2f} GiB" + (", its older part in host memory" if fit.streamed else "")],
            ["activations", f"{need.activations / GIB:.2f} GiB, prompts in pieces of {memory.PREFILL_TOKENS}"],
            ["overhead", f"{need.overhead / GIB:.2f} GiB, assumed"],
            ["margin", f"{fit.margin / GIB:.2f} GiB"],
        ]
        if fit.rate.name in self.expected_kl:
            rows.append(["expected KL", f"{self.expected_kl[fit.rate.name]:.4f}"])
        return [*rows, ["made by", self.command()], ["run by", self.run_command()]]

    def command(self) -> str:
        """What makes the recommended model."""
        rate = self.chosen.rate if self.chosen else self.least.rate
        path = self.blueprint.path if self.blueprint.path.is_dir() else "MODEL"
        if rate.format == "dense":
            return "nothing: it fits as it is"
        if rate.format == "gptq":
            return f"quantkit quantize {path} -o OUT --bits {rate.bits:g} --group-size {rate.group_size}"
        return f"quantkit quantize {path} -o OUT --format exl2 --bpw {rate.bits:g} --head-bits {rate.head_bits}"

    def run_command(self) -> str:
        """What runs it with the cache that the figures are of."""
        fit = self.chosen or self.least
        path = self.blueprint.path if self.blueprint.path.is_dir() else "MODEL"
        words = f"quantkit generate {path if fit.rate.format == 'dense' else 'OUT'} --chat Hello --kv {fit.kv.name}"
        return words + (f" --kv-resident {RESIDENT_TOKENS}" if fit.streamed else "")

    def as_json(self) -> dict[str, Any]:
        return {
            "model": str(self.blueprint.path),
            "family": self.blueprint.family,
            "parameters": self.blueprint.parameters,
            "memory_bytes": self.budget.memory,
            "host_bytes": self.budget.host,
            "on_device": self.budget.on_device,
            "context": self.context,
            "batch": self.batch,
            "recommended": None if self.chosen is None else self.chosen.as_json(),
            "command": self.command() if self.chosen else None,
            "run_command": self.run_command() if self.chosen else None,
            "least": self.least.as_json(),
            "longest_context": self.longest,
            "kv": self.kv.name,
            "grid": [fit.as_json() for fits in self.grid for fit in fits],
            "caches": [
                {"bytes_per_token": fit.kv.bytes_per_token(self.blueprint.config), **fit.as_json()}
                for fit in self.caches
            ],
            "expected_kl": self.expected_kl,
            "assumed": {
                "page_tokens": memory.PAGE_TOKENS,
                "scale_bytes": memory.SCALE_BYTES,
                "numbers_per_scale": memory.SCALE_ROWS,
                "prefill_tokens": memory.PREFILL_TOKENS,
                "overhead_bytes": self.budget.overhead,
            },
        }


def _tokens(context: int) -> str:
    return f"{context // 1024}k" if context % 1024 == 0 else str(context)


def _gib(size: int) -> str:
    """With its sign, and three figures at most."""
    return f"{size / GIB:+.1f}" if abs(size) >= 10 * GIB else f"{size / GIB:+.2f}"
