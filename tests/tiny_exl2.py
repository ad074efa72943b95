"""Random EXL2 models on disk: the models of tests/tiny.py, their linears random codes in a random order of rows.

    path = tiny_exl2.write_model(tmp_path / "model", head=True, family="Phi3ForCausalLM")

Nothing is solved here. Fused linears are in parts, as readers of EXL2 have them.
"""

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file

from quantkit.formats import exl2
from quantkit.formats.codec import Codes, Grid, Group, Layout
from quantkit.formats.exl2 import Exl2Tensor

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def layout(rows: int) -> Layout:
    """A third of the rows at 6 bits, a half at 4, the rest at 2, in groups of 32 and 64."""
    wide, middle = rows // 96 * 32, rows // 64 * 32
    groups = [Group(6, 32)] * (wide // 32) + _groups(4, middle) + _groups(2, rows - wide - middle)
    return Layout(tuple(groups))


def _groups(bits: int, rows: int) -> list[Group]:
    return [Group(bits, min(64, rows - start)) for start in range(0, rows, 64)]


def random_linear(
    own: Layout, columns: int, generator: torch.Generator, *, bias: bool = False, order: torch.Tensor | None = None
) -> Exl2Tensor:
    grids, q = [], []
    for group in own.groups:
        code = torch.randint(0, 16, (columns,), generator=generator, dtype=torch.uint8)
        stored = {"q_scale": code, "q_scale_max": (0.01 + 0.1 * torch.rand(1, generator=generator)[0]).to(torch.float16)}
        middle = torch.full((columns,), 1 << group.bits - 1, dtype=torch.int32)
        grids.append(Grid(torch.ones(columns), middle, (1 << group.bits) - 1, stored))
        q.append(torch.randint(0, 1 << group.bits, (group.rows, columns), generator=generator, dtype=torch.uint8))
    order = torch.randperm(own.rows, generator=generator) if order is None else order
    given = torch.randn(columns, generator=generator) if bias else None
    return exl2.encode(Codes(torch.cat(q), tuple(grids), own, order), given)


def write_model(path: Path, family: str = "LlamaForCausalLM", *, head: bool = False, seed: int = 0, **overrides: Any) -> Path:
    """A complete folder; returns `path`. With `head` its output linear is quantized too."""
    tiny.write_model(path, family, dtype="float16", **overrides)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    for name in [name for name in tensors if name.endswith("_proj.weight") or (head and name == "lm_head.weight")]:
        out_features, in_features = tensors.pop(name).shape
        module = name.removesuffix(".weight")
        for part, width in _parts(module, out_features, config):
            bias = tensors.pop(f"{part}.bias", None) is not None
            made = random_linear(layout(in_features), width, generator, bias=bias)
            tensors |= {f"{part}.{suffix}": tensor for suffix, tensor in made.tensors().items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "exl2", "version": "0.1.1", "bits": 4.0, "lm_head": 6}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return path


def _parts(module: str, width: int, config: dict[str, Any]) -> list[tuple[str, int]]:
    parent, _, last = module.rpartition(".")
    if last == "gate_up_proj":
        widths = [width // 2] * 2
    elif last == "qkv_proj":
        heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
        widths = [width * count // (heads + 2 * kv) for count in (heads, kv, kv)]
    else:
        return [(module, width)]
    return [(f"{parent}.{part}", own) for part, own in zip(PARTS[last], widths, strict=True)]
