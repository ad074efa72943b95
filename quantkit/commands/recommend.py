"""`quantkit recommend`: which rate and which cache of a model fit a memory, from its config.json alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import memory
from quantkit.commands.blueprint import Blueprint, open_blueprint
from quantkit.errors import PlanError, UsageError
from quantkit.measurement import Measurement
from quantkit.memory import KV_FORMATS, KvFormat, Need, Rate, Weights
from quantkit.mix_plan import plan_mixes
from quantkit.progress import Progress
from quantkit.settings import RecommendSettings

HEAD_BITS = 6
RATES = (
    *(Rate("exl2", bits, head_bits=HEAD_BITS) for bits in (2.5, 3.0, 3.5, 4.0)),
    Rate("gptq", 4, 128),
    *(Rate("exl2", bits, head_bits=HEAD_BITS) for bits in (4.5, 5.0, 6.0)),
    Rate("gptq", 8, 128),
    Rate("dense", 16),
)
"""From the smallest to the most faithful."""
GOOD_ENOUGH = 4.0
"""Bits from which a more faithful cache is preferred to more bits for the weights."""
RESIDENT_TOKENS = 4096 + memory.PAGE_TOKENS
"""What stays on the device of a cache whose older pages are in host memory: the newest positions and the first page."""
USUAL_CONTEXT = 32768
LEAST_CONTEXT = 1024
GIB = 2**30


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
            cells = [f"{fit.margin / GIB:+.1f}{'*' if fit.streamed else ''}" for fit in fits]
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
                f"{fit.margin / GIB:+.1f}{'*' if fit.streamed else ''}",
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
        head = "as it is" if fit.rate.head_bits == memory.DENSE_HEAD_BITS else f"{fit.rate.head_bits} bits"
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
        return [*rows, ["made by", self.command()]]

    def command(self) -> str:
        """What makes the recommended model."""
        rate = self.chosen.rate if self.chosen else self.least.rate
        path = self.blueprint.path if self.blueprint.path.is_dir() else "MODEL"
        if rate.format == "dense":
            return "nothing: it fits as it is"
        if rate.format == "gptq":
            return f"quantkit quantize {path} -o OUT --bits {rate.bits:g} --group-size {rate.group_size}"
        return f"quantkit quantize {path} -o OUT --format exl2 --bpw {rate.bits:g} --head-bits {rate.head_bits}"

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


def recommend(model: str | Path, **options: Any) -> RecommendReport:
    """The command for Python; `options` are those of `RecommendSettings`, memories in bytes."""
    from quantkit.progress import Tqdm

    return run(RecommendSettings(Path(model), **options), Tqdm())


def run(settings: RecommendSettings, progress: Progress) -> RecommendReport:
    """Raises UsageError for options that cannot be met, PlanError for a measurement of another model."""
    blueprint = open_blueprint(settings.model)
    budget, context = _budget(settings), _context(settings, blueprint)
    kvs = _kvs(settings)
    rates = [(rate, _weights(rate, blueprint, budget)) for rate in RATES]
    rates.sort(key=lambda pair: pair[1].bits_per_weight)

    def fit(rate: Rate, weights: Weights, kv: KvFormat, tokens: int) -> Fit:
        return _fit(blueprint, budget, settings.batch, rate, weights, kv, tokens)

    caches = []
    for kv in kvs:
        tried = [fit(rate, weights, kv, context) for rate, weights in rates]
        caches.append(next((found for found in reversed(tried) if found.fits), tried[0]))
    chosen = _choose(caches)
    least = fit(*rates[0], min(kvs, key=lambda kv: kv.bytes_per_token(blueprint.config)), context)
    contexts = _contexts(context, blueprint.config.context)
    kv = (chosen or least).kv
    return RecommendReport(
        blueprint=blueprint,
        budget=budget,
        context=context,
        batch=settings.batch,
        kv=kv,
        contexts=contexts,
        grid=tuple(tuple(fit(rate, weights, kv, tokens) for tokens in contexts) for rate, weights in rates),
        caches=tuple(caches),
        chosen=chosen,
        least=least,
        longest=None if chosen else _longest(lambda tokens: fit(*rates[0], least.kv, tokens), context),
        expected_kl=_expected_kl(settings.measurement, blueprint, [rate for rate, _ in rates]),
    )


def _fit(
    blueprint: Blueprint, budget: Budget, batch: int, rate: Rate, weights: Weights, kv: KvFormat, context: int
) -> Fit:
    config = blueprint.config
    needed = memory.need(
        config,
        weights,
        kv,
        context,
        batch,
        compute_bytes=budget.number_bytes,
        overhead=budget.overhead,
    )
    margin = budget.memory - needed.total
    if margin >= 0 or budget.host is None or not budget.on_device or context <= RESIDENT_TOKENS:
        return Fit(rate, kv, context, weights, needed, margin, streamed=False)
    resident = margin + needed.cache - kv.cache_bytes(config, RESIDENT_TOKENS, batch)
    streamed = resident >= 0 and needed.cache + memory.HOST_OVERHEAD <= budget.host
    return Fit(rate, kv, context, weights, needed, resident if streamed else margin, streamed)


def _choose(caches: Sequence[Fit]) -> Fit | None:
    """The most faithful cache beside which the weights get enough bits, else whatever gives them most."""
    good = [fit for fit in caches if fit.fits and fit.weights.bits_per_weight >= GOOD_ENOUGH]
    whole = [fit for fit in good if not fit.streamed]
    fitting = [fit for fit in caches if fit.fits]
    if good:
        return (whole or good)[0]
    return max(fitting, key=lambda fit: fit.weights.bits_per_weight, default=None)


def _weights(rate: Rate, blueprint: Blueprint, budget: Budget) -> Weights:
    return memory.weights_at(rate, blueprint.config, blueprint.architecture, budget.number_bytes)


def _budget(settings: RecommendSettings) -> Budget:
    if settings.vram is None and settings.ram is None:
        raise UsageError("neither a card nor a machine is given", hint="use `--vram 24GB`, or `--ram 64GB` for a CPU")
    if settings.vram is not None:
        return Budget(settings.vram, settings.ram, on_device=True)
    return Budget(settings.ram or 0, None, on_device=False)


def _context(settings: RecommendSettings, blueprint: Blueprint) -> int:
    most = blueprint.config.context
    if settings.batch < 1:
        raise UsageError(f"a batch of {settings.batch} is no batch", hint="use `--batch 1`")
    if settings.context is None:
        return min(USUAL_CONTEXT, most)
    if not 1 <= settings.context <= most:
        raise UsageError(
            f"a context of {settings.context} positions is not between 1 and the {most} of this model",
            hint=f"use `--context {most}`",
        )
    return settings.context


def _kvs(settings: RecommendSettings) -> list[KvFormat]:
    if settings.kv is None:
        return list(KV_FORMATS.values())
    if settings.kv not in KV_FORMATS:
        raise UsageError(f"unknown cache format `{settings.kv}`", hint=f"use `--kv` {', '.join(KV_FORMATS)}")
    return [KV_FORMATS[settings.kv]]


def _contexts(asked: int, most: int) -> tuple[int, ...]:
    """At most five: what was asked for, and halves and doubles of it that the model has."""
    around = {asked, *(asked * 2**step for step in range(1, 9)), *(asked // 2**step for step in range(1, 3)), most}
    usable = sorted(context for context in around if min(LEAST_CONTEXT, asked) <= context <= most)
    place = usable.index(asked)
    first = max(0, min(place - 2, len(usable) - 5))
    return tuple(usable[first : first + 5])


def _longest(fit: Any, context: int) -> int | None:
    """The longest context, in whole pages, that does fit."""
    low, high = 0, context // memory.PAGE_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fit(middle * memory.PAGE_TOKENS).fits else (low, middle - 1)
    return low * memory.PAGE_TOKENS or None


def _expected_kl(path: Path | None, blueprint: Blueprint, rates: Sequence[Rate]) -> dict[str, float]:
    """By rate, of the EXL2 ones that the measurement can plan."""
    if path is None:
        return {}
    measurement = Measurement.load(path)
    shapes = {
        spec.name: (spec.in_features, spec.out_features)
        for spec in blueprint.architecture.linears(blueprint.config)
        if spec.quantizable
    }
    if {linear.name: (linear.in_features, linear.out_features) for linear in measurement.linears} != shapes:
        raise PlanError(
            f"`{path}` measures other linears than `{blueprint.path}` has",
            hint=f"measure this model: `quantkit measure {blueprint.path} -o measurement.json`",
        )
    expected = {}
    for rate in rates:
        if rate.format == "exl2":
            try:
                expected[rate.name] = plan_mixes(measurement, rate.bits, head_bits=rate.head_bits)[1].damage
            except PlanError:  # out of reach for this model
                continue
    return expected


def _tokens(context: int) -> str:
    return f"{context // 1024}k" if context % 1024 == 0 else str(context)
