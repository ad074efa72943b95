"""Quantize a model with another tool, from the very tokens that quantkit calibrates with.

    # in the peers' environment (`make peers`):
    python docs/bench/peers/quantize.py TOOL MODEL TOKENS OUT --bits 4 --group-size 64

TOOL is `gptqmodel` (its defaults), `gptqmodel-best` (act-order, mse 2.4, GPTAQ at its alpha of 0.25) or `autoround`
(200 iterations). TOKENS is the JSON list of rows that `docs/bench/quality.py tokens` writes. Beside the weights in OUT,
`cost.json` says what the run took, `quantize` being the call alone, without importing, reading and writing.
"""

import argparse
import json
import os
import re
import time
from importlib.metadata import version
from pathlib import Path

# GPTQModel: its default number of workers is refused on two cores, and its compilers cost minutes for nothing here.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("GPTQMODEL_DISABLE_PACK_EXT", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch

PACKAGES = {"gptqmodel": "gptqmodel", "gptqmodel-best": "gptqmodel", "autoround": "auto-round"}
AUTOROUND_ITERATIONS = 200
AUTOROUND_BATCH = 8


def quantize_gptqmodel(model: Path, rows: list[list[int]], out: Path, bits: int, group_size: int, best: bool) -> dict:
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization.config import GPTAQConfig

    chosen = {"desc_act": True, "mse": 2.4, "gptaq": GPTAQConfig(alpha=0.25)} if best else {}
    config = QuantizeConfig(bits=bits, group_size=group_size, device="cpu", offload_to_disk=False, **chosen)
    loaded = GPTQModel.load(str(model), config, dtype=torch.float32)
    text = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
    cost = timed(lambda: loaded.quantize(text, batch_size=4))
    loaded.save(str(out))
    return cost


def quantize_autoround(model: Path, rows: list[list[int]], out: Path, bits: int, group_size: int) -> dict:
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    tuner = AutoRound(
        loaded,
        AutoTokenizer.from_pretrained(model),
        scheme=f"W{bits}A16",
        group_size=group_size,
        sym=True,
        dataset=list(torch.tensor(rows).split(AUTOROUND_BATCH)),
        nsamples=len(rows),
        seqlen=len(rows[0]),
        batch_size=AUTOROUND_BATCH,
        iters=AUTOROUND_ITERATIONS,
        enable_torch_compile=False,
        device_map="cpu",
    )
    return timed(lambda: tuner.quantize_and_save(str(out), format="auto_gptq"))


def timed(work) -> dict:
    start = time.monotonic(), time.process_time()
    work()
    return {"quantize_seconds": time.monotonic() - start[0], "quantize_cpu_seconds": time.process_time() - start[1]}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("tool", choices=("gptqmodel", "gptqmodel-best", "autoround"))
    for name in ("model", "tokens", "out"):
        options.add_argument(name, type=Path)
    options.add_argument("--bits", type=int, default=4)
    options.add_argument("--group-size", type=int, default=64)
    asked = options.parse_args()
    rows = json.loads(asked.tokens.read_text())
    start = time.monotonic()
    if asked.tool == "autoround":
        cost = quantize_autoround(asked.model, rows, asked.out, asked.bits, asked.group_size)
    else:
        best = asked.tool == "gptqmodel-best"
        cost = quantize_gptqmodel(asked.model, rows, asked.out, asked.bits, asked.group_size, best)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    cost |= {
        "tool": asked.tool,
        "bits": asked.bits,
        "group_size": asked.group_size,
        "rows": len(rows),
        "seconds": time.monotonic() - start,
        "cpu_seconds": time.process_time(),
        "peak_memory_bytes": int(peak[1]) * 1024 if peak else 0,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers", PACKAGES[asked.tool])},
    }
    # AutoRound may name a folder of its own inside the one it is given.
    place = asked.out if (asked.out / "config.json").is_file() else next(asked.out.glob("*/config.json")).parent
    (place / "cost.json").write_text(json.dumps(cost, indent=1))
    print(json.dumps(cost))


main()
