"""How fast this machine's kernels are: `make bench`.

Each product of a quantized 4096 x 4096 weight is timed beside the reference, a dense float32 product and a plain read
of as many bytes, all in one run, since only ratios carry over to another machine. Best of several runs.
"""

import sys
import time
from collections.abc import Callable

import torch

from quantkit import kernels
from quantkit.kernels import random_weights

SIZE = 4096
KINDS = [(4, 128), (4, 32), (3, 128), (2, 128), (8, 128)]
ROWS = [1, 4, 16, 64, 256]


def best_ms(run: Callable[[], object], times: int) -> float:
    """Milliseconds of the fastest of `times` runs, after one that is not counted."""
    run()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds) * 1e3


def main() -> None:
    chosen, reference = kernels.backend("cpu"), kernels.backend("cpu", "reference")
    dense = torch.randn(SIZE, SIZE)
    say = sys.stdout.write
    say(f"{SIZE} x {SIZE}, {torch.get_num_threads()} threads, backend {chosen.name} ({chosen.reason})\n")
    say(f"{'weight':>14} {'rows':>5} {'ms':>9} {'of reading it':>14} {'of dense fp32':>14} {'of reference':>13}\n")
    for bits, group_size in KINDS:
        weight = random_weights.gptq(SIZE, SIZE, bits, group_size)
        repacked, plain = chosen.gptq_repack(weight), reference.gptq_repack(weight)
        bytes_read = torch.ones(repacked.size_bytes // 4)
        reading = best_ms(bytes_read.sum, 10)
        for rows in ROWS:
            x = torch.randn(rows, SIZE)
            own = best_ms(lambda x=x, repacked=repacked: chosen.gptq_matmul(x, repacked), 10)
            slow = best_ms(lambda x=x, plain=plain: reference.gptq_matmul(x, plain), 2)
            full = best_ms(lambda x=x: x @ dense, 5)
            ratios = f"{own / reading:13.1f}x {own / full:13.2f}x {own / slow:12.3f}x"
            say(f"{f'{bits} bits g{group_size}':>14} {rows:5} {own:9.3f} {ratios}\n")


if __name__ == "__main__":
    main()
