"""What an error at each output of each linear does to the model: gradients from one streaming backward pass.

An error e_t at the outputs of a linear, for token t, moves the loss by about ½ (g_tᵀ e_t)², g_t its gradient there.
With labels drawn from the model's own predictions, the mean of this is the second-order part of KL (Martens, arXiv
1412.1193). A rounded weight errs in proportion to its input, so squares of gradients are weighed with |x_t|².
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration.stream import ActivationStream
from quantkit.errors import CalibrationError
from quantkit.models.architecture import Architecture
from quantkit.models.block import Block
from quantkit.models.config import ModelConfig
from quantkit.models.fan import Activations
from quantkit.models.rope import Rotary
from quantkit.models.source import Device, Source
from quantkit.models.transformer import Head, load_block, load_embedding, load_head
from quantkit.progress import Progress

LOGITS_AT_ONCE = 1 << 24


def output_gradients(
    source: Source,
    config: ModelConfig,
    architecture: Architecture,
    rows: Tensor,
    *,
    seed: int,
    dtype: torch.dtype,
    device: Device,
    folder: Path | None,
    progress: Progress,
) -> dict[str, Tensor]:
    """For each linear that a token reached: `Σ_t g_tn² |x_t|² / tokens` of each output n, float64 `[out]`.

    rows    int64 [rows, length]: token ids; each row is one batch
    seed    draws the labels
    dtype   of the multiplications; float16 is taken as bfloat16, since gradients need the range
    folder  an existing folder for the states that enter the blocks; None keeps them in memory

    The model runs forward once, and what enters each block is kept; then block after block is read again, from the
    last to the first, run with autograd and left with the gradient at its input. Raises CalibrationError where
    gradients are not finite.
    """
    dtype = torch.bfloat16 if dtype == torch.float16 else dtype
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    layers = config.num_layers
    # Autograd refuses what inference mode has made, and the caller may be in it.
    with torch.inference_mode(False), torch.no_grad(), progress.task("gradients", total=2 * layers) as task:
        rotary = Rotary.at(config.ropes, torch.arange(rows.shape[1], device=device)[None])
        embedding = load_embedding(source, config, architecture, dtype, device)
        entering = [_stream(iter([embedding(row[None].to(device)) for row in rows]), rows, folder, 0)]
        for index in range(layers):
            block = load_block(source, config, architecture, index, dtype, device)
            outputs = (block.forward(hidden.to(device), rotary) for hidden in entering[-1].batches())
            entering.append(_stream(outputs, rows, folder, index + 1))
            task.advance(note=f"block {index}, forward")
        head = load_head(source, config, architecture, dtype, device)
        gradients = [_at_head(head, hidden.to(device), generator) for hidden in entering.pop().batches()]
        for index in reversed(range(layers)):
            block = load_block(source, config, architecture, index, dtype, device)
            for row, hidden in enumerate(entering.pop().batches()):
                gradients[row] = _through(block, hidden.to(device), rotary, gradients[row], found)
            task.advance(note=f"block {index}, backward")
    for name, sums in found.items():
        if not bool(torch.isfinite(sums).all()):
            raise CalibrationError(f"the gradients at `{name}` are not finite", hint="use `--dtype fp32`")
        found[name] = sums / rows.numel()
    return found


def _stream(outputs: Iterator[Tensor], rows: Tensor, folder: Path | None, number: int) -> ActivationStream:
    own = None
    if folder is not None:
        own = folder / f"block-{number}"
        own.mkdir()
    return ActivationStream.start(lambda _: next(outputs), rows, batch_rows=1, dtype=torch.bfloat16, folder=own)


def _at_head(head: Head, hidden: Tensor, generator: torch.Generator) -> Tensor:
    """The gradient of Σ_t -ln p(label_t) at the states `[1, s, hidden]` behind the last block, labels drawn from p."""
    parts = []
    for part in hidden.to(torch.float32).split(max(1, LOGITS_AT_ONCE // head.linear.out_features), dim=1):
        states = part.clone().requires_grad_()
        with torch.enable_grad():
            logits = head(states)
        slope = logits.softmax(-1)  # minus 1 at the label: the gradient at the logits
        cumulative = slope.cumsum(-1, dtype=torch.float64)
        chances = torch.rand(*slope.shape[:2], 1, dtype=torch.float64, generator=generator).to(slope.device)
        labels = torch.searchsorted(cumulative, chances * cumulative[..., -1:], right=True)
        labels = labels.clamp(max=slope.shape[-1] - 1)
        slope.scatter_add_(-1, labels, torch.full_like(labels, -1, dtype=slope.dtype))
        parts.append(torch.autograd.grad(logits, states, slope)[0])
    return torch.cat(parts, dim=1)


def _through(block: Block, hidden: Tensor, rotary: Rotary, gradient: Tensor, found: dict[str, Tensor]) -> Tensor:
    """The gradient at the input of a block from that at its output; squares at its linears are added to `found`."""
    seen: list[Activations] = []
    entering = hidden.to(torch.float32).clone().requires_grad_()
    with torch.enable_grad():
        leaving = block.forward(entering, rotary, observe=seen.append)
    outputs = [output for activations in seen for output in activations.outputs]
    into, *at_outputs = torch.autograd.grad(leaving, [entering, *outputs], gradient)
    squares = iter(at_outputs)
    for activations in seen:
        energies = activations.inputs.detach().double().square().sum(1)
        for name in activations.stage.linears:
            rows = next(squares).flatten(0, -2).double().square()
            found[name] = found.get(name, 0) + (energies @ rows).cpu()
    return into
