"""Gradients at the outputs of every linear: a backward pass through a model of which one block is in memory.

The loss is that of labels drawn from the model's own predictions. The mean square of its gradients is the Fisher
information, which is the curvature of KL (Martens, arXiv 1412.1193, section 9): what an error does to the model.

The model runs forward once, and what enters each block is kept. Then block after block is read again, from the last to
the first, run once more with autograd, and left with the gradient at its input. In memory are one block, what it
computes for `BATCH_TOKENS` tokens, and the states that enter the blocks, unless they go to files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration.stream import ActivationStream
from quantkit.models.architecture import Architecture, Stage
from quantkit.models.config import ModelConfig
from quantkit.models.fan import Activations
from quantkit.models.rope import Rotary
from quantkit.models.source import Device, Source
from quantkit.models.streamed import StreamedBlocks
from quantkit.models.transformer import Block, Embedding, Head, load_embedding, load_head
from quantkit.progress import Progress

BATCH_TOKENS = 1024
LOGITS_AT_ONCE = 1 << 24
LABEL_SPAN = 512


@dataclass(frozen=True, slots=True, eq=False)
class StageGradients:
    """One stage and one batch of tokens.

    inputs   float32 [m, in]: what its linears read
    outputs  [m, out] of each linear, in its dtype and the order of the stage: the gradients of the summed loss of all
             tokens
    tokens   int64 [m]: where these tokens are in the text, row after row
    """

    stage: Stage
    inputs: Tensor
    outputs: tuple[Tensor, ...]
    tokens: Tensor


Watch = Callable[[StageGradients], None]


def run_backward(
    source: Source,
    config: ModelConfig,
    architecture: Architecture,
    rows: Tensor,
    watch: Watch,
    *,
    seed: int,
    dtype: torch.dtype,
    device: Device,
    folder: Path | None,
    progress: Progress,
    batch_tokens: int | None = None,
    logits_at_once: int | None = None,
) -> None:
    """Show every stage to `watch`, batch after batch, from the last block to the first.

    rows    int64 [rows, length]: token ids
    seed    draws the labels
    dtype   of the multiplications and of the states kept; float16 is taken as bfloat16, since gradients need the range
    folder  an existing folder for the states, with nothing in it; None keeps them in memory
    batch_tokens  how many go through a block together, `BATCH_TOKENS` if not given; never less than a row
    logits_at_once  numbers of the logits that are held, `LOGITS_AT_ONCE` if not given

    Raises CalibrationError where states or gradients between blocks are not finite.
    """
    dtype = torch.bfloat16 if dtype == torch.float16 else dtype
    blocks = StreamedBlocks(source, config, architecture, dtype, device)
    # Autograd refuses what inference mode has made, and the caller may be in it.
    with torch.inference_mode(False), torch.no_grad(), progress.task("gradients", total=2 * len(blocks)) as task:
        rotary = Rotary.at(config.ropes, torch.arange(rows.shape[1], device=device)[None])
        sizes = batch_tokens or BATCH_TOKENS, logits_at_once or LOGITS_AT_ONCE
        walk = _Walk(rows, rotary, dtype, device, folder, *sizes)
        states = [walk.embed(load_embedding(source, config, architecture, dtype, device))]
        for index in range(len(blocks)):
            states.append(walk.follow(blocks[index], states[-1], index))
            task.advance(note=f"block {index}, forward")
        gradients = walk.draw(load_head(source, config, architecture, dtype, device), states.pop(), seed)
        for index in reversed(range(len(blocks))):
            walk.descend(blocks[index], states.pop(), gradients, index, watch)
            task.advance(note=f"block {index}, backward")


@dataclass(frozen=True, slots=True, eq=False)
class _Walk:
    """The text on its way through the blocks and back."""

    rows: Tensor
    rotary: Rotary
    dtype: torch.dtype
    device: Device
    folder: Path | None
    batch_tokens: int
    logits_at_once: int

    def embed(self, embedding: Embedding) -> ActivationStream:
        return ActivationStream.start(
            lambda ids: embedding(ids.to(self.device)),
            self.rows,
            batch_rows=self._batch_rows,
            dtype=self.dtype,
            folder=self._place("block-0"),
        )

    def follow(self, block: Block, states: ActivationStream, index: int) -> ActivationStream:
        """What the block makes of the states, beside them."""
        return states.follow(
            lambda hidden: block.forward(self._read(hidden), self.rotary),
            f"block {index}",
            folder=self._place(f"block-{index + 1}"),
        )

    def draw(self, head: Head, states: ActivationStream, seed: int) -> ActivationStream:
        """The gradients where the head reads. Each token has a random number of its own, however rows are batched."""
        chances = torch.rand(self.rows.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        batches = iter(chances.split(self._batch_rows))
        return states.follow(
            lambda hidden: _loss_gradient(
                head, self._read(hidden), next(batches).to(self.device), self.logits_at_once
            ),
            "the loss",
            dtype=torch.float32,
            folder=self._place("gradients"),
        )

    def descend(
        self, block: Block, states: ActivationStream, gradients: ActivationStream, index: int, watch: Watch
    ) -> None:
        """Replace the gradients behind the block by those before it."""
        entering = states.batches()
        places = iter(torch.arange(self.rows.numel()).split(self._batch_rows * self.rows.shape[1]))

        def run(gradient: Tensor) -> Tensor:
            hidden, tokens = self._read(next(entering)), next(places)
            into, stages = _through(block, hidden, self.rotary, gradient.to(self.device))
            for seen, outputs in stages:
                own = tokens if seen.tokens is None else tokens[seen.tokens.cpu()]
                watch(StageGradients(seen.stage, seen.inputs.detach().to(torch.float32), outputs, own))
            return into

        gradients.advance(run, f"the backward pass of block {index}")

    @property
    def _batch_rows(self) -> int:
        return max(1, self.batch_tokens // self.rows.shape[1])

    def _read(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.device, torch.float32)

    def _place(self, name: str) -> Path | None:
        if self.folder is None:
            return None
        place = self.folder / name
        place.mkdir()
        return place


def _loss_gradient(head: Head, hidden: Tensor, chances: Tensor, at_once: int = LOGITS_AT_ONCE) -> Tensor:
    """Of Σ_t -ln p(label_t) at the states `[b, s, hidden]`, with labels for the chances `[b, s]`."""
    gradients = []
    size = max(1, at_once // head.linear.out_features)
    for part, chance in zip(hidden.flatten(0, 1).split(size), chances.flatten().split(size), strict=True):
        states = part.detach().requires_grad_()
        with torch.enable_grad():
            logits = head(states)
        slope = logits.softmax(-1)  # minus 1 at the label: the gradient at the logits
        labels = draw_labels(slope, chance)[:, None]
        slope.scatter_add_(-1, labels, torch.full_like(labels, -1, dtype=slope.dtype))
        gradients.append(torch.autograd.grad(logits, states, slope)[0])
    return torch.cat(gradients).reshape(hidden.shape)


def draw_labels(probabilities: Tensor, chances: Tensor) -> Tensor:
    """The first token of each row where the sum of all up to it passes the chance: int64 [n].

    probabilities  float32 [n, vocab]
    chances        float64 [n], from 0 up to 1, of the whole sum of a row

    Sums of spans of tokens say in which of them it is, so that few sums are taken token by token.
    """
    spans = torch.stack([part.sum(-1) for part in probabilities.split(LABEL_SPAN, dim=1)], 1).double()
    sums = spans.cumsum(1)
    below = 1 - 2**-50  # so that no rounding leads past the last token that has a chance
    goal = chances[:, None].clamp(max=below) * sums[:, -1:]
    span = torch.searchsorted(sums, goal, right=True)
    rest = goal - (sums - spans).gather(1, span)
    first = span * LABEL_SPAN
    tokens = first + torch.arange(LABEL_SPAN, device=first.device)
    last = probabilities.shape[1] - 1
    own = probabilities.gather(1, tokens.clamp(max=last)).cumsum(1, dtype=torch.float64)
    inside = torch.searchsorted(own, torch.minimum(rest, own[:, -1:] * below), right=True)
    return (first + inside).clamp_(max=last)[:, 0]


def _through(
    block: Block, hidden: Tensor, rotary: Rotary, gradient: Tensor
) -> tuple[Tensor, list[tuple[Activations, tuple[Tensor, ...]]]]:
    """The gradient at the input of a block from that at its output, and those at the linears, `[m, out]`."""
    seen: list[Activations] = []
    entering = hidden.detach().requires_grad_()
    with torch.enable_grad():
        leaving = block.forward(entering, rotary, observe=seen.append)
    outputs = [output for activations in seen for output in activations.outputs]
    into, *found = torch.autograd.grad(leaving, [entering, *outputs], gradient)
    left = iter(found)
    return into, [
        (activations, tuple(next(left).flatten(0, -2) for _ in activations.outputs))
        for activations in seen
    ]
