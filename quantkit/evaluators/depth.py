"""Error by depth: how far the residual stream of a candidate is from its reference's behind each block."""

import torch
from torch import Tensor

from quantkit.models.rope import Rotary
from quantkit.models.transformer import Model


@torch.inference_mode()
def depth_errors(reference: Model, candidate: Model, ids: Tensor) -> list[float]:
    """`‖candidate - reference‖ / ‖reference‖` of the states behind each block, over int64 ids `[b, s]`.

    The first token of each row is left out: in many models it has a norm a thousand times that of all others.
    """
    models = (reference, candidate)
    rotary = [Rotary.at(model.config.ropes, torch.arange(ids.shape[1], device=model.device)[None]) for model in models]
    states = [model.embedding(ids.to(model.device)) for model in models]
    errors = []
    for blocks in zip(reference.blocks, candidate.blocks, strict=True):
        states = [block.forward(x, turn) for block, x, turn in zip(blocks, states, rotary, strict=True)]
        right, found = (x[:, 1:].to(reference.device) for x in states)
        errors.append(float((found - right).norm() / right.norm()))
    return errors
