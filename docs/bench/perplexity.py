"""Perplexity over all windows of a text in bfloat16, beside transformers in the same process, window after window.

    python docs/bench/perplexity.py MODEL TEXT [--length 2048] [--windows N] [--threads 1]

Both read the same token ids, some windows each in turn, so that what else the machine does falls on both. Prints
seconds of the processor and on the wall, and both perplexities. TEXT is what `quantkit eval perplexity --text` takes.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

TURN = 4
"""Windows that one reads before it is the other's turn."""
Score = Callable[[torch.Tensor], list[float]]
"""Windows `[windows, length]` → mean negative log-likelihood of each."""


def main() -> None:
    from transformers import AutoModelForCausalLM

    from quantkit.calibration.text import read_text
    from quantkit.evaluators.perplexity import cut_windows, score
    from quantkit.runtime.load import load
    from quantkit.runtime.tokenizer import Tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--windows", type=int)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    ids = Tokenizer.open(given.model).encode(read_text(given.text))
    count = given.windows or len(ids) // given.length
    ours = load(given.model, dtype="bf16")
    windows = cut_windows(ids, given.length, count, ours.config.context)
    peer = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).eval()

    def score_ours(rows: torch.Tensor) -> list[float]:
        return list(score(ours, rows).window_nll)

    def score_theirs(rows: torch.Tensor) -> list[float]:
        with torch.inference_mode():
            return [float(peer(row[None], labels=row[None]).loss) for row in rows]

    contestants: dict[str, Score] = {"quantkit": score_ours, "transformers": score_theirs}
    losses: dict[str, list[float]] = {name: [] for name in contestants}
    spent = {name: [0.0, 0.0] for name in contestants}
    for run in contestants.values():
        run(windows[:1, :64])  # what is compiled once is not counted
    for place, rows in enumerate(windows.split(TURN)):
        turn = list(contestants.items())
        for name, run in turn if place % 2 else reversed(turn):
            wall, processor = time.perf_counter(), time.process_time()
            losses[name] += run(rows)
            spent[name][0] += time.process_time() - processor
            spent[name][1] += time.perf_counter() - wall
    for name, values in losses.items():
        cpu, wall = spent[name]
        perplexity = math.exp(sum(values) / len(values))
        sys.stdout.write(
            f"{name}: {len(values)} windows of {given.length}, {cpu:.0f} s of the processor, {wall:.0f} s on the wall, "
            f"perplexity {perplexity:.4f}, of the first ten {math.exp(sum(values[:10]) / len(values[:10])):.4f}\n"
        )
    ratio = spent["quantkit"][0] / spent["transformers"][0]
    sys.stdout.write(f"ratio of processor seconds {ratio:.3f}, {given.threads} threads\n")


if __name__ == "__main__":
    main()
