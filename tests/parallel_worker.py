"""One of several processes that run models together: `python parallel_worker.py OUT FOLDER…`, with the variables of
`torchrun` in its environment. Leaves what it saw in `OUT/RANK.pt`; tests/runtime/test_parallel.py reads it."""

import os
import sys
from pathlib import Path

import torch

import quantkit
from quantkit.runtime.cache import KVCache
from quantkit.runtime.ranks import Ranks
from quantkit.runtime.share_source import weight_bytes

IDS = torch.tensor([[3, 17, 250, 41, 8, 99, 300, 12, 77, 5, 161], [7, 7, 2, 310, 45, 6, 13, 8, 21, 34, 55]])


def see(model: quantkit.load) -> dict[str, object]:
    """Logits of all positions at once, and of the same read in two pieces into a cache."""
    with torch.inference_mode():
        logits = model(IDS)
        cache = KVCache(model.config, 2, IDS.shape[1], model.dtype)
        pieces = torch.cat([model(IDS[:, :8], cache=cache), model(IDS[:, 8:], cache=cache)], dim=1)
        hidden = model.hidden(IDS)
    return {
        "logits": logits,
        "cached": pieces,
        "hidden": hidden,
        "bytes": weight_bytes(model),
        "cache_bytes": cache.size_bytes,
        "kinds": {name: type(linear.stored).__name__ for name, linear in model.linears.items()},
    }


def main(out: Path, folders: list[str]) -> None:
    torch.set_num_threads(1)
    read = [0]
    original = os.preadv

    def counted(*arguments):
        count = original(*arguments)
        read[0] += count
        return count

    os.preadv = counted
    ranks = Ranks.join("cpu")
    seen = {}
    for folder in folders:
        read[0] = 0
        model = quantkit.load(folder, ranks=ranks)
        seen[folder] = {**see(model), "read": read[0]}
    torch.save(seen, out / f"{ranks.rank}.pt")
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
