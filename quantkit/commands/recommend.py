"""`quantkit recommend`: which rate and which cache of a model fit a memory, from its config.json alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit import memory
from quantkit.commands.inspection.blueprint import Blueprint, open_blueprint
from quantkit.commands.inspection.recommend_report import RESIDENT_TOKENS, Budget, Fit, RecommendReport
from quantkit.errors import PlanError, UsageError, in_shell
from quantkit.measurement import Measurement
from quantkit.memory import KV_FORMATS, KvFormat, Rate, Weights
from quantkit.mix_plan import plan_mixes
from quantkit.progress import Progress, Tqdm
from quantkit.settings import RecommendSettings

HEAD_BITS = 6
RATES = (
    *(Rate("exl2", bits, head_bits=HEAD_BITS) for bits in (2.5, 3.0, 3.5, 4.0)),
    Rate("gptq", 4),
    *(Rate("exl2", bits, head_bits=HEAD_BITS) for bits in (4.5, 5.0, 6.0)),
    Rate("gptq", 8),
    Rate("dense", 16),
)
"""From the smallest to the most faithful."""
GROUP_SIZES = (128, 64, 32)
"""Of GPTQ: the first one that divides the inputs of all linears is named, so that no group is short."""
GOOD_ENOUGH = 4.0
"""Bits from which a more faithful cache is preferred to more bits for the weights."""
USUAL_CONTEXT = 32768
LEAST_CONTEXT = 1024


def recommend(model: str | Path, **options: Any) -> RecommendReport:
    """The command for Python; `options` are those of `RecommendSettings`, memories in bytes."""
    return run(RecommendSettings(Path(model), **options), Tqdm())


def run(settings: RecommendSettings, progress: Progress) -> RecommendReport:
    """Raises UsageError for options that cannot be met, PlanError for a measurement of another model."""
    blueprint = open_blueprint(settings.model)
    budget, context = _budget(settings), _context(settings, blueprint)
    kvs = _kvs(settings)
    group_size = _group_size(blueprint)
    sized = [replace(rate, group_size=group_size) for rate in RATES]
    rates = [(rate, _weights(rate, blueprint, budget)) for rate in sized]
    rates.sort(key=lambda pair: pair[1].bits_per_weight)

    def fit(rate: Rate, weights: Weights, kv: KvFormat, tokens: int) -> Fit:
        return _fit(blueprint, budget, settings.batch, rate, weights, kv, tokens)

    caches = []
    for kv in kvs:
        tried = [fit(rate, weights, kv, context) for rate, weights in rates]
        caches.append(_best(tried))
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


def _best(tried: Sequence[Fit]) -> Fit:
    """Of one cache, from the smallest rate up: the most bits that fit on the device, or, where those are few, with the
    older part of the cache elsewhere; the smallest rate where nothing fits."""
    fitting = [fit for fit in tried if fit.fits]
    whole = [fit for fit in fitting if not fit.streamed]
    if whole and whole[-1].weights.bits_per_weight >= GOOD_ENOUGH:
        return whole[-1]
    return fitting[-1] if fitting else tried[0]


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


def _group_size(blueprint: Blueprint) -> int:
    """The largest that divides the inputs of all linears; the usual one where none does."""
    linears = [spec for spec in blueprint.architecture.linears(blueprint.config) if spec.quantizable]
    dividing = (size for size in GROUP_SIZES if all(spec.in_features % size == 0 for spec in linears))
    return next(dividing, GROUP_SIZES[0])


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


def _longest(fit: Callable[[int], Fit], context: int) -> int | None:
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
            hint=f"measure this model: `quantkit measure {in_shell(blueprint.path)} -o measurement.json`",
        )
    expected = {}
    for rate in rates:
        if rate.format == "exl2":
            try:
                expected[rate.name] = plan_mixes(measurement, rate.bits, head_bits=rate.head_bits)[1].damage
            except PlanError:  # out of reach for this model
                continue
    return expected
