"""The memory model against memory: models are loaded in processes of their own, what they took beside what was said.

    python docs/bench/memory.py MODEL… [--dtype fp32] [--tokens 512]

Linux only: the peak is the kernel's own (`VmHWM`), set back after torch was imported.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

MIB = 2**20


def resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def measure(folder: str, dtype: str, tokens: int) -> dict:
    """In this process: bytes after loading, and the most while a prompt was read, above those of torch alone."""
    import torch

    from quantkit.models.transformer import Model  # noqa: F401 - imported before the count begins
    from quantkit.runtime.cache import KVCache
    from quantkit.runtime.load import load

    torch.randn(64, 64) @ torch.randn(64, 64)
    before = resident("VmRSS")
    model = load(folder, dtype=dtype)
    loaded = resident("VmRSS") - before
    cache = KVCache(model.config, 1, tokens + 16, model.dtype)
    with torch.inference_mode():
        model.forward(torch.zeros(1, 8, dtype=torch.int64), last_only=True)  # kernels are compiled
        held = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        model.forward(torch.full((1, tokens), 5), cache=cache, last_only=True)
    return {"idle": before, "loaded": loaded, "prompt": resident("VmHWM") - held}


def predict(folder: str, dtype: str, tokens: int) -> dict:
    from quantkit import memory
    from quantkit.checkpoint.reader import open_checkpoint
    from quantkit.memory import KvFormat, Rate, activation_bytes, weights_at

    checkpoint = open_checkpoint(folder)
    config, number = checkpoint.model_config, {"fp32": 4, "bf16": 2, "fp16": 2}[dtype]
    said = checkpoint.quantization or {}
    rate = Rate("gptq", said["bits"], said["group_size"]) if said.get("quant_method") == "gptq" else Rate("dense", 16)
    weights = weights_at(rate, config, checkpoint.architecture, number)
    cache = number // 2 * KvFormat("fp16", 16, 16).bytes_per_token(config) * tokens
    return {
        "idle": memory.HOST_OVERHEAD,
        "loaded": weights.total,
        "prompt": cache + activation_bytes(config, tokens, tokens, 1, number),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.models[0], options.dtype, options.tokens)))
        return
    print("| model | dtype | part | said, MiB | taken, MiB | ratio |\n| --- | --- | --- | --- | --- | --- |")
    for model in options.models:
        asked = ["--dtype", options.dtype, "--tokens", str(options.tokens)]
        command = [sys.executable, __file__, model, "--child", *asked]
        taken = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        said = predict(model, options.dtype, options.tokens)
        for sizes in (said, taken):
            sizes["total"] = sum(sizes.values())
        for part, size in said.items():
            ratio = taken[part] / size
            name = f"{Path(model).name} | {options.dtype}"
            print(f"| {name} | {part} | {size / MIB:.1f} | {taken[part] / MIB:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
