"""Free memory: what the driver says of a card, and of the machine what its system and its container allow."""

from contextlib import suppress
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")


def free_bytes(device: str | torch.device) -> int | None:
    """What can be had without taking it from others; None where nobody tells."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [number for number in (_of_machine(MEMINFO), _of_container(CONTAINER)) if number is not None]
    return min(known, default=None)


def _of_machine(file: Path) -> int | None:
    """`MemAvailable`: free, and what the system would give up for it."""
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _of_container(folder: Path) -> int | None:
    """Limit less use of the control group (version 2), where there is a limit."""
    with suppress(OSError, ValueError):
        return max(0, int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text()))
    return None
