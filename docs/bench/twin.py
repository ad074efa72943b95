"""A model's perturbed twin: noise of 0.08 of the rms of each 32 consecutive inputs, on every linear of its blocks.

    python docs/bench/twin.py MODEL OUT

The one small model at hand has weights that were rounded to 4 bits before, in blocks of 32. Noise takes them off that
grid. It is Gaussian, drawn from a fixed seed, tensor after tensor in the order of their names; all else stays.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

NOISE = 0.08
BLOCK = 32
SEED = 0


def perturb(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`[out, in]` of any float dtype, `in` a multiple of BLOCK → the same with noise, in the same dtype."""
    blocks = weight.to(torch.float32).unflatten(1, (-1, BLOCK))
    rms = blocks.square().mean(-1, keepdim=True).sqrt()
    noise = torch.randn(blocks.shape, generator=generator)
    return (blocks + NOISE * rms * noise).flatten(1).to(weight.dtype)


def main(model: Path, out: Path) -> None:
    shutil.copytree(model, out)
    generator = torch.Generator().manual_seed(SEED)
    for file in sorted(out.glob("*.safetensors")):
        tensors = load_file(file)
        for name in sorted(tensors):
            if name.endswith("_proj.weight"):
                tensors[name] = perturb(tensors[name], generator)
        save_file(tensors, file, metadata={"format": "pt"})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
