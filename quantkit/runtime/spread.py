"""Spread: the layers of a model that one device cannot hold, shared out to several in the order in which they run.

    places = place_layers(layer_bytes, end_bytes, [Room("cuda:0", 20 << 30), Room("cuda:1", 20 << 30)])

Embedding and head stay on the first device, where ids come in and logits go out; hidden states move wherever the next
layer is on another device. Each layer's part of the cache lies beside it.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import BackendError, RequestError, UsageError
from quantkit.models.architecture import EMBEDDING, HEAD

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Room:
    """A device and the bytes that may be used of it."""

    device: str
    free: int


def place_layers(layers: Sequence[int], ends: int, rooms: Sequence[Room]) -> tuple[str, ...]:
    """The device of each layer: the first is filled before the second gets any.

    layers  bytes of each, its part of the cache counted
    ends    bytes of embedding and head, on the first device

    Raises RequestError, with the numbers, where they do not fit.
    """
    places: list[str] = []
    index, left = 0, rooms[0].free - ends
    for size in layers:
        while left < size or left < 0:
            index += 1
            if index == len(rooms) or rooms[0].free < ends:
                raise _too_little(layers, ends, rooms, len(places))
            left = rooms[index].free
        places.append(rooms[index].device)
        left -= size
    return tuple(places)


def _too_little(layers: Sequence[int], ends: int, rooms: Sequence[Room], placed: int) -> RequestError:
    told = ", ".join(f"{room.free / 2**30:,.2f} GiB on `{room.device}`" for room in rooms)
    return RequestError(
        f"embedding and head ({ends / 2**30:,.2f} GiB) and {len(layers)} layers with their cache "
        f"({sum(layers) / 2**30:,.2f} GiB, the largest {max(layers) / 2**30:,.2f}) do not fit into {told}: "
        f"{placed} layers do",
        hint="free memory there, name more devices, ask for fewer tokens, or quantize the model to fewer bits",
    )


def devices_of(device: str) -> tuple[str, ...]:
    """What words of the command line name: `cuda:0,cuda:1` two devices, `cuda` all that are visible.

    Raises UsageError for devices of several kinds and for a GPU named twice, whose memory would count twice,
    BackendError for one that there is not.
    """
    names = tuple(part.strip() for part in device.split(","))
    if len({name.split(":")[0] for name in names}) > 1:
        raise UsageError(f"`--device {device}` names devices of several kinds", hint="--device cuda:0,cuda:1")
    visible = torch.cuda.device_count() if names[0].startswith("cuda") else 0
    if names == ("cuda",) and visible > 1:
        return tuple(f"cuda:{index}" for index in range(visible))
    numbers = [name.partition(":")[2] for name in names] if visible else []
    for name, number in zip(names, numbers, strict=False):
        if number and not (number.isdecimal() and int(number) < visible):
            raise BackendError(f"there is no `{name}`, {visible} devices are visible", hint="--device cuda")
    if len({int(number or 0) for number in numbers}) < len(numbers):
        raise UsageError(f"`--device {device}` names a device twice", hint="--device cuda:0,cuda:1")
    return names


def told(devices: Sequence[torch.device]) -> str | None:
    """Where the layers are, in words; None where all are in one place."""
    counts = Counter(map(str, devices))
    if len(counts) < 2:
        return None
    return "layers: " + ", ".join(f"{count} on `{device}`" for device, count in counts.items())


def weight_bytes_by_layer(checkpoint: Checkpoint, count: int, dtype: torch.dtype) -> tuple[list[int], int]:
    """Bytes in memory of each of `count` layers, and of all else: quantized weights as stored, dense ones in `dtype`,
    the embedding in whichever of the two is larger."""
    layers, ends = [0] * count, 0
    for name in checkpoint.names():
        found, info = LAYER.search(name), checkpoint.info(name)
        numbers = torch.Size(info.shape).numel()
        size = numbers * info.dtype.itemsize
        if name.endswith(".weight"):
            dense = numbers * dtype.itemsize
            size = max(size, dense) if EMBEDDING in name else dense
        if found is None or HEAD in name:
            ends += size
        elif int(found[1]) < count:
            layers[int(found[1])] += size
    return layers, ends
