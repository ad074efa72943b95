"""How a config states its rope: `rope_theta` and `rope_scaling`, or `rope_parameters`, perhaps one per layer type."""

import math
from collections.abc import Mapping
from typing import Any

from quantkit.errors import UnsupportedModel
from quantkit.models.architecture import Architecture
from quantkit.models.keys import Keys
from quantkit.models.rope import DynamicRope, LinearRope, Llama3Rope, LongRope, Rope, YarnRope
from quantkit.models.windows import FULL, SLIDING, Windows

LOCAL_THETA = 10_000.0

COMMON = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"})
PARAMETERS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "longrope": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}
    ),
}


def read_ropes(
    keys: Keys, family: Architecture, head_dim: int, max_positions: int, windows: Windows
) -> tuple[Rope, ...]:
    """The rope of each layer.

    Raises UnsupportedModel for an unknown variant, a parameter that the variant does not have, and a fact that is
    stated twice with two values.
    """
    reader = _Reader(keys, family, head_dim, max_positions)
    stated = _stated(keys)
    if not family.local_rope:
        return (reader.rope(stated, "rope_theta", family.rope_theta),) * len(windows)
    if keys.values.get("rope_parameters") is None:
        whole, local = stated, Keys({}, stated.where)
    else:
        if not set(stated.values) <= {FULL, SLIDING}:
            raise keys.refuse("rope_parameters", f"this family has one rope for `{FULL}` and one for `{SLIDING}`")
        whole, local = (Keys(stated.take(kind, {}), f"{stated.where}.{kind}") for kind in (FULL, SLIDING))
    long_rope = reader.rope(whole, "rope_theta", family.rope_theta)
    short_rope = reader.rope(local, "rope_local_base_freq", LOCAL_THETA)
    return tuple(long_rope if window is None else short_rope for window in windows)


def _stated(keys: Keys) -> Keys:
    """The object with the parameters, under whichever of its two names."""
    objects = {name: keys.take(name, {}) for name in ("rope_parameters", "rope_scaling")}
    for name, value in objects.items():
        if not isinstance(value, dict):
            raise keys.refuse(name, "expected an object")
    new, old = objects.values()
    if new and old and _shared_part(new) != _shared_part(old):
        raise keys.refuse("rope_scaling", "`rope_parameters` says something else: keep one of them")
    name = "rope_parameters" if new else "rope_scaling"
    return Keys(objects[name], f"{keys.where}: {name}")


def _shared_part(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What both spellings hold: all but the base, and the type under one name."""
    part = {key: value for key, value in parameters.items() if key not in COMMON and value is not None}
    return part | {"rope_type": parameters.get("rope_type") or parameters.get("type")}


class _Reader:
    """Builds ropes from parameter objects of one config."""

    def __init__(self, keys: Keys, family: Architecture, head_dim: int, max_positions: int) -> None:
        self.keys = keys
        self.family = family
        self.head_dim = head_dim
        self.max_positions = max_positions

    def rope(self, stated: Keys, theta_key: str, default_theta: float) -> Rope:
        kind = self._kind(stated)
        for key, value in stated.values.items():
            if value is not None and key not in COMMON | PARAMETERS[kind]:
                raise stated.refuse(key, f"rope type `{kind}` has no such parameter")
        theta = self._once(stated, "rope_theta", theta_key, default_theta)
        dim = self._rotating(stated)
        if kind == "linear":
            return LinearRope(theta, dim, stated.number("factor"))
        if kind == "dynamic":
            return DynamicRope(theta, dim, stated.number("factor"), self.max_positions)
        if kind == "llama3":
            return self._llama3(stated, theta, dim)
        if kind == "yarn":
            return self._yarn(stated, theta, dim)
        if kind == "longrope":
            return self._longrope(stated, theta, dim)
        return Rope(theta, dim)

    def _kind(self, stated: Keys) -> str:
        kinds = {stated.text(key) for key in ("rope_type", "type") if stated.values.get(key) is not None}
        kinds = {"longrope" if self._is_longrope(kind, stated) else kind for kind in kinds} or {"default"}
        if len(kinds) > 1:
            raise stated.refuse("type", f"`rope_type` is `{stated.text('rope_type')}`: keep one of them")
        kind = kinds.pop()
        if kind not in PARAMETERS:
            named = "rope_type" if stated.values.get("rope_type") is not None else "type"
            raise UnsupportedModel(
                f"unknown rope type `{kind}` (`{named}` in `{stated.where}`)",
                hint=f"supported are {', '.join(PARAMETERS)}",
            )
        return kind

    @staticmethod
    def _is_longrope(kind: str, stated: Keys) -> bool:
        """The first Phi-3 models called it `su`, and some of them `yarn`."""
        return kind == "su" or (kind == "yarn" and "short_factor" in stated.values)

    def _rotating(self, stated: Keys) -> int:
        part = self._once(stated, "partial_rotary_factor", "partial_rotary_factor", 1.0)
        if part != 1.0 and not self.family.partial_rotary:
            owner = stated if stated.values.get("partial_rotary_factor") is not None else self.keys
            raise owner.refuse("partial_rotary_factor", "this model family rotates whole heads")
        dim = int(self.head_dim * part)
        if dim % 2 or not 0 < dim <= self.head_dim:
            raise UnsupportedModel(
                f"{dim} of {self.head_dim} elements of a head would rotate (`head_dim`, `partial_rotary_factor` in "
                f"`{self.keys.where}`): the number must be even",
                hint="correct the two keys: they are of another model",
            )
        return dim

    def _once(self, stated: Keys, inner: str, outer: str, default: float) -> float:
        """A number that may stand in the rope object or beside it, but not in both with two values."""
        inside, outside = stated.number(inner, None), self.keys.number(outer, None)
        if inside is not None and outside is not None and inside != outside:
            raise stated.refuse(inner, f"`{outer}` beside it is {outside}: keep one of them")
        return inside or outside or default

    def _original(self, stated: Keys) -> int:
        """Positions of the pretraining. Phi-3 states it beside the rope object."""
        name = "original_max_position_embeddings"
        inside, outside = stated.whole(name, None), self.keys.whole(name, None)
        if inside and outside and inside != outside:
            raise stated.refuse(name, f"`{name}` beside it is {outside}: keep one of them")
        return inside or outside or self.max_positions

    def _llama3(self, stated: Keys, theta: float, dim: int) -> Rope:
        low, high = stated.number("low_freq_factor"), stated.number("high_freq_factor")
        if low >= high:
            raise stated.refuse("high_freq_factor", f"it must be greater than `low_freq_factor`, {low}")
        return Llama3Rope(theta, dim, stated.number("factor"), low, high, self._original(stated))

    def _yarn(self, stated: Keys, theta: float, dim: int) -> Rope:
        factor = stated.number("factor")
        top, bottom = stated.number("mscale", None), stated.number("mscale_all_dim", None)
        scores = _yarn_scores(factor, 1.0)
        if top is not None and bottom is not None:
            scores = _yarn_scores(factor, top) / _yarn_scores(factor, bottom)
        return YarnRope(
            theta,
            dim,
            factor,
            self._original(stated),
            stated.number("attention_factor", None) or scores,
            stated.number("beta_fast", 32.0),
            stated.number("beta_slow", 1.0),
            stated.flag("truncate", True),
        )

    def _longrope(self, stated: Keys, theta: float, dim: int) -> Rope:
        original = self._original(stated)
        factor = stated.number("factor", None) or self.max_positions / original
        scores = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return LongRope(
            theta,
            dim,
            stated.numbers("short_factor", dim // 2),
            stated.numbers("long_factor", dim // 2),
            original,
            stated.number("attention_factor", None) or scores,
            self.family.long_restart,
        )


def _yarn_scores(factor: float, weight: float) -> float:
    """YaRN, equation 22: `0.1 · ln(factor) + 1`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
