"""Runs in the peers' environment: what another tool computes from folders that quantkit wrote.

    python logits.py transformers|gptqmodel FOLDER…

Reads FOLDER/probe.safetensors (`input_ids`), writes FOLDER/read-by-READER.safetensors: `logits` float32, and for
GPTQModel the weight of each linear as its own kernel dequantizes it, float16 [out, in]. For a folder that the reader
cannot load, the reason is in FOLDER/read-by-READER.txt.
"""

import os
import sys
import traceback
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

        options = {"dtype": torch.float32, "device_map": "cpu", "output_loading_info": True}
        model, loading = AutoModelForCausalLM.from_pretrained(folder, **options)
        # It warns of tensors that it did not find or had no place for, and runs on with random ones.
        faults = {fault: sorted(names) for fault, names in loading.items() if names}
        assert not faults, faults
        return model.eval()
    from gptqmodel import BACKEND, GPTQModel

    # Its torch kernel refuses float32.
    return GPTQModel.load(str(folder), device="cpu", dtype=torch.float16, backend=BACKEND.TORCH).model.eval()


def weights(reader: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    if reader == "transformers":
        return {}
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    linears = {name: module for name, module in model.named_modules() if isinstance(module, TorchLinear)}
    return {name: linear.dequantize_weight().T.to(torch.float16).contiguous() for name, linear in linears.items()}


def main(reader: str, *folders: str) -> None:
    for folder in map(Path, folders):
        try:
            save_file(read(reader, folder), folder / f"read-by-{reader}.safetensors")
        except Exception:  # whatever a reader raises is its answer to this folder
            (folder / f"read-by-{reader}.txt").write_text(traceback.format_exc())


def read(reader: str, folder: Path) -> dict[str, torch.Tensor]:
    ids = load_file(folder / "probe.safetensors")["input_ids"]
    model = load(reader, folder)
    # Before the forward pass, which may rearrange what a kernel holds.
    found = weights(reader, model)
    with torch.no_grad():
        found["logits"] = model(input_ids=ids).logits.float().contiguous()
    return found


main(*sys.argv[1:])
