"""Models shared by several processes against the same ones in one: logits, bytes, and how each kind of linear is held.

    torchrun --nproc-per-node 3 docs/bench/parallel.py MODEL…

Prints a row of a Markdown table for each model. The text is read once, all positions at once.
"""

import sys
from collections import Counter

import torch

import quantkit
from quantkit.runtime.ranks import Ranks, is_first
from quantkit.runtime.share_source import weight_bytes

IDS = torch.randint(5, 300, (1, 64), generator=torch.Generator().manual_seed(0))


def main(folders: list[str]) -> None:
    ranks = Ranks.join("cpu")
    if is_first():
        print("| model | processes | largest difference / std of logits | bytes | share · processes | `o`, `down` |")
        print("| --- | --- | --- | --- | --- | --- |")
    for folder in folders:
        with torch.inference_mode():
            model = quantkit.load(folder, ranks=ranks)
            logits, own = model(IDS), weight_bytes(model)
            kinds = Counter(
                f"{name.rpartition('.')[2]} {type(linear.stored).__name__.removesuffix('Tensor').lower()}"
                for name, linear in model.linears.items()
                if name.endswith(("o_proj", "down_proj"))
            )
            del model
            shares = ranks.gather(torch.tensor([[own]], dtype=torch.float64), [1] * ranks.size)[0].tolist()
            if not is_first():
                continue
            alone = quantkit.load(folder)
            expected, whole = alone(IDS), weight_bytes(alone)
            del alone
        difference = float((logits - expected).abs().max() / expected.std())
        held = " ".join(f"{share * ranks.size / whole:.3f}" for share in shares)
        print(f"| {folder} | {ranks.size} | {difference:.1e} | {whole:,} | {held} | {', '.join(kinds)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
