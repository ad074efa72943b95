"""Whether a measurement predicts: a few blocks, quantized one at a time, and the KL divergence that each one causes.

The model runs in float32 over the first tokens of the text, as it is, and beside it once from each of these blocks on
with that block quantized. What it then predicts is compared with what the original does (teacher forcing).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum

import torch
from torch import Tensor

from quantkit.commands.quantization.job import Subject
from quantkit.evaluators.divergence import divergences
from quantkit.formats.codec import StoredTensor
from quantkit.formats.dense import DenseTensor
from quantkit.measurement import Candidate, Check, MeasuredLinear
from quantkit.models.architecture import block_of
from quantkit.models.transformer import Block, Head, Rotary, load_block, load_embedding, load_head
from quantkit.progress import Progress

CHECKED_BITS = 3.2
"""Each linear in the layout nearest to so many bits: coarse enough to be seen, as fine as a plan would choose."""
MOST_BLOCKS = 4
MOST_TOKENS = 1024
LOGIT_VALUES = 1 << 23


def checked_blocks(layers: int) -> list[int]:
    """The first, the last, and two between them; the worst is checked as well."""
    steps = min(MOST_BLOCKS, layers) - 1
    return sorted({round(step * (layers - 1) / max(1, steps)) for step in range(steps + 1)})


def worst_block(linears: Iterable[MeasuredLinear]) -> int:
    """The block of most damage by the prediction, of equals the first: where it matters most whether it is right."""
    blocks: dict[int, list[MeasuredLinear]] = {}
    for linear in linears:
        blocks.setdefault(block_of(linear.name), []).append(linear)
    return max(blocks, key=lambda number: coarse_damage(blocks[number]))


def coarse_damage(linears: Iterable[MeasuredLinear]) -> float:
    """What is predicted of linears in the layouts in which they are checked, in whatever order they come."""
    return fsum(checked_candidate(linear).damage for linear in linears if linear.candidates)


def checked_candidate(linear: MeasuredLinear) -> Candidate:
    """The layout in which a linear of a checked block is quantized."""
    return min(linear.candidates, key=lambda found: abs(found.bits / linear.weights - CHECKED_BITS))


@torch.inference_mode()
def check_prediction(
    subject: Subject,
    measured: Sequence[MeasuredLinear],
    perturbed: Mapping[int, Mapping[str, StoredTensor]],
    progress: Progress,
) -> tuple[Check, ...]:
    """What blocks do to the model, beside what the measurement says of them.

    measured   all linears of the blocks
    perturbed  block → its linears by name, as `checked_candidate` has them
    """
    perturbed = {block: names for block, names in perturbed.items() if names}
    seen, tokens = _seen(subject, perturbed, progress)
    by_name = {linear.name: linear for linear in measured}
    checks = []
    for block, names in perturbed.items():
        own = [by_name[name] for name in names]
        chosen = [checked_candidate(linear) for linear in own]
        bits = sum(found.bits for found in chosen) / sum(linear.weights for linear in own)
        checks.append(Check(block, bits, coarse_damage(own), seen[block], tokens))
    return tuple(checks)


def _seen(
    subject: Subject, perturbed: Mapping[int, Mapping[str, StoredTensor]], progress: Progress
) -> tuple[dict[int, float], int]:
    """The mean KL divergence in nats that each block causes, and the number of tokens it is the mean of."""
    config, device = subject.config, subject.placement.device
    rows = _first_tokens(subject.rows)
    rotary = Rotary.at(config.ropes, torch.arange(rows.shape[1], device=device)[None])
    source, architecture = subject.checkpoint, subject.architecture
    hidden = load_embedding(source, config, architecture, torch.float32, device)(rows.to(device))
    beside: dict[int, Tensor] = {}
    with progress.task("check", total=config.num_layers + 1) as task:
        for index in range(config.num_layers):
            block = load_block(source, config, architecture, index, torch.float32, device)
            entering, hidden = hidden, block.forward(hidden, rotary)
            beside = {number: block.forward(states, rotary) for number, states in beside.items()}
            if index in perturbed:
                _put(block, perturbed[index])
                beside[index] = block.forward(entering, rotary)
            task.advance(note=f"block {index}")
        head = load_head(source, config, architecture, torch.float32, device)
        seen = _mean_divergences(head, hidden, beside)
        task.advance(note="head")
    return seen, rows.numel()


def _first_tokens(rows: Tensor) -> Tensor:
    """Whole rows while they are few tokens, else the beginning of the first."""
    return rows[: max(1, MOST_TOKENS // rows.shape[1]), :MOST_TOKENS]


def _put(block: Block, stored: Mapping[str, StoredTensor]) -> None:
    for name, linear in block.linears.items():
        if name in stored:
            linear.replace(DenseTensor(stored[name].dequantize().T, stored[name].bias))


def _mean_divergences(head: Head, reference: Tensor, beside: Mapping[int, Tensor]) -> dict[int, float]:
    """Logits exist for a few positions at a time."""
    sums = dict.fromkeys(beside, 0.0)
    for places in _pieces(reference.shape[0] * reference.shape[1], head.linear.out_features):
        original = head(reference.flatten(0, 1)[places])
        for number, states in beside.items():
            sums[number] += float(divergences(original, head(states.flatten(0, 1)[places])).sum())
    return {number: total / (reference.shape[0] * reference.shape[1]) for number, total in sums.items()}


def _pieces(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, LOGIT_VALUES // vocabulary)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))
