"""load: a model folder → a Model, each linear in the form it is stored in."""

from pathlib import Path

import torch

from quantkit.checkpoint.merged import Weighted, merge
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.errors import UsageError
from quantkit.memory import PREFILL_TOKENS, activation_bytes
from quantkit.models.contents import check_contents
from quantkit.models.transformer import Model
from quantkit.runtime.free_memory import free_bytes
from quantkit.runtime.parallel import ParallelPlan
from quantkit.runtime.placement import DTYPES, Placement
from quantkit.runtime.ranks import Ranks
from quantkit.runtime.share_source import load_share
from quantkit.runtime.spread import Room, devices_of, place_layers, weight_bytes_by_layer


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
    layer_cache: int = 0,
) -> Model:
    """The model of a checkpoint that is open already; see `load`. Where several devices are named or visible, and the
    first cannot hold it, its layers are shared out to them by their free memory. Raises RequestError where all of them
    cannot.

    adapters  with their weights, merged for good into a model that is not quantized; see `runtime.adapters` for others
    layer_cache  bytes of cache that each layer needs beside its weights
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
        if "," in placement.device:
            raise UsageError(
                f"`--device {placement.device}` for a model that {ranks.size} processes share",
                hint="leave out `--device`, each process takes a device of its own",
            )
        plan = ParallelPlan.make(config, ranks.size, checkpoint.quantization is not None)
        return load_share(source, architecture, plan, ranks, placement.dtype, placement.device)
    first, places = _places(checkpoint, placement, layer_cache)
    return Model.load(source, config, architecture, placement.dtype, first, places)


def _places(checkpoint: Checkpoint, placement: Placement, layer_cache: int) -> tuple[str, tuple[str, ...]]:
    """The device of embedding and head, and that of each layer where several are there to choose from."""
    devices = devices_of(placement.device)
    if len(devices) == 1:
        return devices[0], ()
    config = checkpoint.model_config
    layers, ends = weight_bytes_by_layer(checkpoint, config.num_layers, placement.dtype)
    working = activation_bytes(config, PREFILL_TOKENS, PREFILL_TOKENS, 1, placement.dtype.itemsize)
    rooms = []
    for device in devices:
        free = free_bytes(device)
        if free is None:
            raise UsageError(f"nobody tells how much of `{device}` is free", hint=f"--device {devices[0]}")
        rooms.append(Room(device, free - working))
    return devices[0], place_layers([size + layer_cache for size in layers], ends, rooms)
