"""Random GPTQ and AWQ models on disk: the models of tests/tiny.py, their linears random codes on random grids.

    path = tiny_gptq.write_model(tmp_path / "model", bits=3, group_size=64, sym=False, act_order=True)

Nothing is solved here: any codes, any zero points, any order of groups. `awq` packs by rules stated on their own.
"""

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit import kernels
from quantkit.formats.gptq_config import GptqSettings, write
from quantkit.formats.gptq_zeros import write_zeros


def write_model(
    path: Path,
    *,
    bits: int = 4,
    group_size: int = 32,
    sym: bool = True,
    act_order: bool = False,
    checkpoint_format: str = "gptq",
    least_zero: int = 1,
    seed: int = 0,
    dtype: str = "float16",
    **overrides: Any,
) -> Path:
    """A complete folder; returns `path`. `least_zero` bounds asymmetric zero points from below."""
    tiny.write_model(path, dtype=dtype, num_hidden_layers=1, **overrides)
    settings = GptqSettings(bits, group_size, sym, act_order, checkpoint_format)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if _is_linear(name)]:
        out_features, in_features = tensors.pop(name).shape
        packed = random_linear(in_features, out_features, settings, least_zero, generator)
        tensors |= {name.replace("weight", suffix): tensor for suffix, tensor in packed.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    _describe(path, write(settings))
    return path


def random_linear(
    in_features: int, out_features: int, settings: GptqSettings, least_zero: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """The tensors of one linear on disk, by suffix."""
    rows = in_features if settings.group_size == -1 else min(settings.group_size, in_features)
    groups, top = -(-in_features // rows), (1 << settings.bits) - 1
    q = torch.randint(0, top + 1, (in_features, out_features), generator=generator, dtype=torch.uint8)
    zeros = torch.full((groups, out_features), 1 << settings.bits - 1, dtype=torch.uint8)
    if not settings.sym:
        zeros = torch.randint(least_zero, top + 1, zeros.shape, generator=generator, dtype=torch.uint8)
    order = torch.arange(in_features)
    if settings.act_order:
        order = torch.randperm(in_features, generator=generator)
    g_idx = torch.empty(in_features, dtype=torch.int32)
    g_idx[order] = (torch.arange(in_features) // rows).to(torch.int32)
    return {
        "qweight": kernels.backend("cpu").pack(q, settings.bits),
        "qzeros": write_zeros(zeros, settings.bits, settings),
        "scales": random_scales(groups, out_features, generator),
        "g_idx": g_idx,
    }


def random_scales(groups: int, out_features: int, generator: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, (groups, out_features), generator=generator) * 2 - 1
    return (signs * (0.001 + 0.02 * torch.rand(groups, out_features, generator=generator))).to(torch.float16)


def write_awq(path: Path, *, group_size: int = 32, sym: bool = False, seed: int = 0, **overrides: Any) -> dict[str, Tensor]:
    """An AWQ folder. Returns the weights `[in, out]` that it stands for, float16, by linear."""
    tiny.write_model(path, dtype="float16", num_hidden_layers=1, **overrides)
    generator = torch.Generator().manual_seed(seed)
    tensors, weights = load_file(path / "model.safetensors"), {}
    for name in [name for name in tensors if _is_linear(name)]:
        out_features, in_features = tensors.pop(name).shape
        rows = in_features if group_size == -1 else group_size
        groups, module = in_features // rows, name.removesuffix(".weight")
        q = torch.randint(0, 16, (in_features, out_features), generator=generator)
        zeros = torch.randint(0, 16, (groups, out_features), generator=generator)
        zeros = torch.full_like(zeros, 8) if sym else zeros
        scales = random_scales(groups, out_features, generator)
        tensors |= {f"{module}.qweight": awq_words(q), f"{module}.qzeros": awq_words(zeros), f"{module}.scales": scales}
        spread = [part.repeat_interleave(rows, 0) for part in (zeros, scales)]
        weights[module] = (q - spread[0]).to(torch.float16) * spread[1]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": not sym, "version": "gemm"}
    _describe(path, config)
    return weights


def awq_words(values: Tensor) -> Tensor:
    """One word at a time: nibble i of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for word in range(words.shape[1]):
        for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words[:, word] += values[:, 8 * word + column].long() * 16**nibble
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def _describe(path: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
