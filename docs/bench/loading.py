"""The peak of memory while a model is loaded, beside the bytes of its weights as they then run.

    python docs/bench/loading.py MODEL… [--dtype bf16]

Each in a process of its own, Linux only: the peak is the kernel's (`VmHWM`), set back when everything is imported and a
first kernel has been compiled, which belongs to the idle process.
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


def measure(folder: str, dtype: str, warm: str | None) -> dict:
    """In this process. `warm` is a small model of the same format, loaded before, so that its kernels are there."""
    import torch

    from quantkit import heap
    from quantkit.formats.repacked import RepackedTensor
    from quantkit.runtime.load import load

    torch.randn(64, 64) @ torch.randn(64, 64)
    heap.settle()  # as the command line does
    if warm:
        load(warm, dtype=dtype)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    model = load(folder, dtype=dtype)
    peak, held = resident("VmHWM"), resident("VmRSS")
    weights = model.embedding.weight.nbytes + sum(
        linear.stored.repacked.size_bytes
        if isinstance(linear.stored, RepackedTensor)
        else sum(tensor.nbytes for tensor in linear.stored.tensors().values())
        for linear in (*model.linears.values(), model.head.linear)
    )
    return {"idle": before, "weights": weights, "held": held - before, "peak": peak - before}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--warm")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        sys.stdout.write(json.dumps(measure(given.models[0], given.dtype, given.warm)))
        return
    sys.stdout.write("| model | idle, MiB | weights | held | peak | peak / weights |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- | --- |\n")
    for folder in given.models:
        warm = ["--warm", given.warm] if given.warm else []
        command = [sys.executable, __file__, folder, "--dtype", given.dtype, "--one", *warm]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        figures = " | ".join(f"{found[name] / MIB:.1f}" for name in ("idle", "weights", "held", "peak"))
        sys.stdout.write(f"| {Path(folder).name} | {figures} | {found['peak'] / found['weights']:.3f} |\n")


if __name__ == "__main__":
    main()
