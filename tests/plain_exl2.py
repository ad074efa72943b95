"""EXL2 read in numpy, from the description of the format alone: bits one by one, no code of quantkit.

docs/formats/exl2.md describes what is followed here, section by section; golden files hold it (`tests/formats/test_plain_exl2.py`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open

PARTS = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")


def decode(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Weight float16 `[in, out]` of one linear from its five tensors, features in their own order."""
    words = tensors["q_weight"].view(np.uint32)
    widths, starts = tensors["q_groups"].view(np.uint16).reshape(-1, 2).astype(np.int64).T
    ends = [*starts[1:], words.shape[0]]
    scale_words = tensors["q_scale"].view(np.uint32)
    columns = words.shape[1]
    nibbles = (scale_words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    steps = nibbles.reshape(len(widths), columns).astype(np.int64) + 1
    multiplier = (tensors["q_scale_max"].astype(np.float32) / 256).astype(np.float16)
    stored = []
    for group, (width, start, end) in enumerate(zip(widths, starts, ends, strict=True)):
        # Down the words of one column the codes are one stream of bits, the least significant first.
        bits = (words[start:end, None, :] >> np.arange(32, dtype=np.uint32)[None, :, None]) & 1
        stream = bits.reshape(-1, width, columns).astype(np.int64)
        codes = (stream << np.arange(width)[None, :, None]).sum(axis=1)
        squares = (steps[group] ** 2).astype(np.float16)
        scale = (squares.astype(np.float32) * np.float32(multiplier[group])).astype(np.float16)
        stored.append(((codes - (1 << (width - 1))).astype(np.float32) * scale.astype(np.float32)).astype(np.float16))
    return np.concatenate(stored)[tensors["q_invperm"]]


def decode_folder(folder: Path) -> dict[str, np.ndarray]:
    """The weight of every EXL2 linear in a model folder, float16 `[in, out]`, by the linear's name."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118  (a file is no mapping)
                linear, _, part = name.rpartition(".")
                if part in PARTS:
                    found.setdefault(linear, {})[part] = file.get_tensor(name)
    return {linear: decode(tensors) for linear, tensors in found.items()}


def require_same(folder: Path, dense: Callable[[str], np.ndarray]) -> set[str]:
    """Every EXL2 linear of a folder is what another reader makes of it, `dense`: name → float16 `[out, in]`. Their names."""
    plain = decode_folder(folder)
    for linear, weight in plain.items():
        other = dense(linear)
        assert np.array_equal(weight[:, : other.shape[0]].T, other), linear
    return set(plain)
