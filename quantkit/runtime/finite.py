"""Logits that are no finite numbers: refused, and the first layer that made one is named."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from quantkit.errors import GateError
from quantkit.models.rope import Rotary
from quantkit.models.transformer import Model

Result = TypeVar("Result")


def require_finite(logits: Tensor) -> None:
    """Raises GateError when a logit is NaN or infinite: whatever is made of such logits means nothing."""
    if math.isfinite(float(logits.sum())):  # then every one is, and no mask was made: 40 times faster
        return
    finite = torch.isfinite(logits)
    if not bool(finite.all()):
        raise GateError(
            f"{finite.numel() - int(finite.sum())} of {finite.numel()} logits are not finite numbers",
            hint="run with `--dtype fp32`; if it stays, the checkpoint is damaged",
        )


def locate(model: Model, ids: Tensor, work: Callable[[], Result]) -> Result:
    """The result of `work` on ids `[b, s]`; a GateError it raises gets the layer where the trouble begins added."""
    try:
        return work()
    except GateError as error:
        raise GateError(f"{error.message}: the first come from {_first_layer(model, ids)}", hint=error.hint) from error


@torch.inference_mode()
def _first_layer(model: Model, ids: Tensor) -> str:
    rotary = Rotary.at(model.config.ropes, torch.arange(ids.shape[1], device=model.device)[None])
    hidden = model.embedding(ids.to(model.device))
    if not bool(torch.isfinite(hidden).all()):
        return "the embedding"
    for index, block in enumerate(model.blocks):
        hidden = block.forward(hidden, rotary)
        if not bool(torch.isfinite(hidden).all()):
            return f"block {index}"
    return "the head"
