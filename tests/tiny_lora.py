"""LoRA adapters on disk, as PEFT writes them, with random tensors."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_adapter(
    path: Path, modules: dict[str, tuple[int, int, int]], seed: int = 0, extra=None, **config
) -> dict[str, torch.Tensor]:
    """module → (out, in, rank). Returns B·A of each module, float64; `config` overrides keys of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    path.mkdir()
    tensors, products = dict(extra or {}), {}
    for module, (outputs, inputs, rank) in modules.items():
        a, b = torch.randn(rank, inputs, generator=generator), 0.1 * torch.randn(outputs, rank, generator=generator)
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        products[module] = b.double() @ a.double()
    save_file(tensors, path / "adapter_model.safetensors")
    full = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "use_rslora": False, **config}
    (path / "adapter_config.json").write_text(json.dumps(full))
    return products
