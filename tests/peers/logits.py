"""Runs in the peers' environment: what another tool computes from folders that quantkit wrote.

    python logits.py transformers|gptqmodel FOLDER…

Reads FOLDER/probe.safetensors (`input_ids`), writes FOLDER/logits-READER.safetensors (`logits`, float32).
"""

import os
import sys
from pathlib import Path

# GPTQModel: its default number of workers is refused on two cores, and its compilers cost minutes for nothing here.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("GPTQMODEL_DISABLE_PACK_EXT", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from safetensors.torch import load_file, save_file


def load(reader: str, folder: Path) -> torch.nn.Module:
    if reader == "transformers":
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu").eval()
    from gptqmodel import BACKEND, GPTQModel

    return GPTQModel.load(str(folder), device="cpu", dtype=torch.float32, backend=BACKEND.TORCH).model.eval()


def main(reader: str, *folders: str) -> None:
    for folder in map(Path, folders):
        ids = load_file(folder / "probe.safetensors")["input_ids"]
        with torch.no_grad():
            logits = load(reader, folder)(input_ids=ids).logits
        save_file({"logits": logits.float().contiguous()}, folder / f"logits-{reader}.safetensors")


main(*sys.argv[1:])
