"""Workspace: memory that launches write into, made at their first run and the same at every further one.

    workspace = Workspace(launcher)
    workspace.enter("layer")                  # what is asked for from here on is given out in the same order as before
    y = workspace.empty((8, 4096), torch.float16, device)

A captured graph holds addresses: whatever it writes into has to be there at each replay, for nothing else. So a second
run through a scope gets the memory of the first, and while it is `sealed` nothing can be made any more.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quantkit.errors import BackendError
from quantkit.kernels.launcher import Argument, Launcher
from quantkit.kernels.sources import Defines


class Workspace:
    """A launcher in front of another. Runs that enter a scope share its memory, so one must be done before the next
    writes; what is outgrown stays, since graphs may point at it."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._scopes: dict[str, list[Tensor]] = {}
        self._outgrown: list[Tensor] = []
        self._scope, self._next = "", 0
        self._sealed = False

    @property
    def size_bytes(self) -> int:
        slots = [slot for scope in self._scopes.values() for slot in scope]
        return sum(slot.numel() for slot in slots + self._outgrown)

    def enter(self, scope: str) -> None:
        """Give out the memory of this scope from its beginning."""
        self._scope, self._next = scope, 0

    @contextmanager
    def sealed(self) -> Iterator[None]:
        """Where memory that was not made before is asked for, BackendError is raised."""
        self._sealed = True
        try:
            yield
        finally:
            self._sealed = False

    def device(self) -> torch.device:
        return self._launcher.device()

    def reaches(self, tensor: Tensor) -> bool:
        return self._launcher.reaches(tensor)

    def architecture(self, device: torch.device) -> int:
        return self._launcher.architecture(device)

    def processors(self, device: torch.device) -> int:
        return self._launcher.processors(device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        slots = self._scopes.setdefault(self._scope, [])
        if self._next == len(slots) or slots[self._next].numel() < size:
            self._make(slots, size, device)
        slot = slots[self._next]
        self._next += 1
        return slot[:size].view(dtype).view(tuple(shape))

    def counters(self, count: int, device: torch.device) -> Tensor:
        return self._launcher.counters(count, device)

    def run(
        self,
        name: str,
        defines: Defines,
        entry: str,
        grid: Sequence[int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        device: torch.device,
        shared_bytes: int = 0,
    ) -> None:
        self._launcher.run(name, defines, entry, grid, threads, arguments, device=device, shared_bytes=shared_bytes)

    def _make(self, slots: list[Tensor], size: int, device: torch.device) -> None:
        if self._sealed:
            raise BackendError(
                f"{size} bytes are asked for in `{self._scope}` by launches that are being recorded",
                hint="run the same launches once before they are recorded",
            )
        made = self._launcher.empty((max(size, 1),), torch.uint8, device)
        self._outgrown += slots[self._next : self._next + 1]
        slots[self._next : self._next + 1] = [made]
