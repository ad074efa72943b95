"""load: a model folder → a Model, each linear in the form it is stored in."""

from pathlib import Path

import torch

from quantkit.checkpoint.merged import Weighted, merge
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.errors import UsageError
from quantkit.models.contents import check_contents
from quantkit.models.transformer import Model
from quantkit.runtime.parallel import ParallelPlan
from quantkit.runtime.placement import DTYPES, Placement
from quantkit.runtime.ranks import Ranks
from quantkit.runtime.share_source import load_share


def load(
    path: str | Path, device: str = "cpu", dtype: str | torch.dtype | None = None, ranks: Ranks | None = None
) -> Model:
    """A model from a folder, quantized or not, or from the hub by its id. Needs no tokenizer.

        model = quantkit.load("models/llama")
        logits = model(input_ids)            # int64 [batch, seq] → float32 [batch, seq, vocab]

    dtype  of the multiplications: `fp32`, `bf16`, `fp16` or a torch dtype; None or `auto` is fp32 on a CPU
    ranks  the processes to share the model with, `Ranks.join()` under `torchrun`; each holds its part, and all call the
           model with the same ids

    Raises CheckpointError for a folder that cannot be read, or that lacks a tensor or has one too many;
    UnsupportedModel for a model this code cannot compute; UsageError for another dtype, or what cannot be shared out.
    """
    return load_model(open_checkpoint(path), device, dtype, ranks=ranks)


def load_model(
    checkpoint: Checkpoint,
    device: str = "cpu",
    dtype: str | torch.dtype | None = None,
    adapters: Weighted = (),
    ranks: Ranks | None = None,
) -> Model:
    """The model of a checkpoint that is open already; see `load`.

    adapters  with their weights, merged for good into a model that is not quantized; see `runtime.adapters` for others
    """
    if isinstance(dtype, torch.dtype):
        named = [name for name, known in DTYPES.items() if known == dtype]
        if not named:
            raise UsageError(f"cannot compute in `{dtype}`", hint=f"use one of {', '.join(DTYPES)}")
        dtype = named[0]
    placement = Placement.choose(device, dtype or "auto")
    config, architecture = checkpoint.model_config, checkpoint.architecture
    check_contents(checkpoint, config, architecture)
    source = merge(checkpoint, adapters) if adapters else checkpoint
    if ranks is not None and ranks.size > 1:
        plan = ParallelPlan.make(config, ranks.size, checkpoint.quantization is not None)
        return load_share(source, architecture, plan, ranks, placement.dtype, placement.device)
    return Model.load(source, config, architecture, placement.dtype, placement.device)
