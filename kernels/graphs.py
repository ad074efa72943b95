"""Launches recorded once and replayed: a decode step has hundreds of them, each of which costs the host microseconds.

    replay = CudaGraphs(device).record(launches)
    buffer.copy_(new)                         # the same launches, on what the same buffers hold by now
    replay()
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

Launches = Callable[[], None]


class Recorder(Protocol):
    """How launches are recorded. Tests stand in a tape of what was launched."""

    def record(self, launches: Launches) -> Launches:
        """Calls `launches`, which ran before, at least once more, and returns what repeats them without it.

        They read and write the same memory each time, leave the same behind when run twice, allocate nothing and never
        wait for the device. Raises RuntimeError or BackendError where they cannot be recorded.
        """


class CudaGraphs:
    """CUDA graphs of one device, all captured on one stream: the counters of kernels that count blocks belong to a
    stream, and have to be there, and zero, before a capture begins."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: tuple[torch.cuda.Stream, Any] | None = None

    def record(self, launches: Launches) -> Launches:
        if self._made is None:
            self._made = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        stream, pool = self._made
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            launches()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            launches()
        return graph.replay
