"""One of several processes that run models together: `python parallel_worker.py OUT PROMPTS FOLDER…`, with the variables
of `torchrun` in its environment. Leaves what it saw in `OUT/RANK.pt`; tests/runtime/test_parallel.py reads it."""

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


def answers(folder: str, prompts: Path) -> dict[str, object]:
    """Token ids of a sampled answer with guesses, and of a queue of requests in one batch."""
    alone = quantkit.generate(folder, "the thing of an", max_new_tokens=24, temperature=0.8, draft="ngram", ignore_eos=True)
    queue = quantkit.generate(folder, prompts_file=prompts, max_new_tokens=12, ignore_eos=True, token_budget=24)
    return {
        "ids": alone.completion.token_ids,
        "queue": {name: served.completion.token_ids for name, served in queue.answers},
        "processes": (alone.processes, queue.as_json()["processes"]),
    }


def main(out: Path, prompts: Path, folders: list[str]) -> None:
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
    seen["answers"] = answers(folders[0], prompts)
    seen["agreed"] = (ranks.of_first([7 + ranks.rank] * (ranks.rank + 2)), ranks.least(9 - ranks.rank))
    torch.save(seen, out / f"{ranks.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
