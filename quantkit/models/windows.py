"""Attention windows: which layers see only the last positions, read from a config the way its family means it.

Each function gives one entry per layer: the number of positions a query sees, itself included, or None for the whole
past. Where `layer_types` is present it decides; the rules below are for configs without it.
"""

from collections.abc import Callable

from quantkit.models.keys import Keys

Windows = tuple[int | None, ...]

SLIDING, FULL = "sliding_attention", "full_attention"


def everywhere(keys: Keys, layers: int) -> Windows:
    """Mistral, Mixtral, Phi-3: `sliding_window` holds for every layer; null is no window."""
    keys.nullable("sliding_window")
    return (keys.whole("sliding_window", None),) * layers


def everywhere_if_used(keys: Keys, layers: int) -> Windows:
    """Qwen3-MoE: `sliding_window` in every layer, when `use_sliding_window` is set."""
    return (_switched_window(keys),) * layers


def upper_layers(keys: Keys, layers: int) -> Windows:
    """Qwen2, Qwen3: from layer `max_window_layers` on, when `use_sliding_window` is set."""
    return _switched(keys, layers, lambda layer, bound: layer >= bound)


def even_lower_layers(keys: Keys, layers: int) -> Windows:
    """Qwen2-MoE: every second layer below `max_window_layers`, when `use_sliding_window` is set."""
    return _switched(keys, layers, lambda layer, bound: layer % 2 == 0 and layer < bound)


def alternate(keys: Keys, layers: int) -> Windows:
    """Gemma 2: every second layer, the first included."""
    sliding = layer_types(keys, layers) or [layer % 2 == 0 for layer in range(layers)]
    return _choose(sliding, keys.whole("sliding_window"))


def all_but_each_nth(keys: Keys, layers: int) -> Windows:
    """Gemma 3: all layers but each `sliding_window_pattern`-th (6 where it is absent)."""
    period = keys.whole("sliding_window_pattern", None) or keys.whole("_sliding_window_pattern", 6)
    sliding = layer_types(keys, layers) or [(layer + 1) % period != 0 for layer in range(layers)]
    return _choose(sliding, keys.whole("sliding_window"))


def layer_types(keys: Keys, layers: int) -> list[bool] | None:
    """True for each layer with a window, as `layer_types` has it; None where the config does not say."""
    types = keys.take("layer_types", None)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {SLIDING, FULL}:
        raise keys.refuse("layer_types", f"expected {layers} times `{FULL}` or `{SLIDING}`")
    return [kind == SLIDING for kind in types]


def _switched_window(keys: Keys) -> int | None:
    """`sliding_window`, which says nothing while `use_sliding_window` is false."""
    keys.take("sliding_window", None)  # accounted for in either case
    return keys.whole("sliding_window") if keys.flag("use_sliding_window", False) else None


def _switched(keys: Keys, layers: int, slides: Callable[[int, int], bool]) -> Windows:
    window = _switched_window(keys)
    if window is None:
        return (None,) * layers
    types = layer_types(keys, layers)
    if types is None:
        bound = keys.take("max_window_layers")
        if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
            raise keys.refuse("max_window_layers", "expected a layer number")
        types = [slides(layer, bound) for layer in range(layers)]
    return _choose(types, window)


def _choose(sliding: list[bool], window: int) -> Windows:
    return tuple(window if slides else None for slides in sliding)
