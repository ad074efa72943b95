"""Decoding: the passes of a model that add a few tokens to each text, in one call on a CPU, by kernels on a GPU.

    decoding = Decoding.of(model, pool)
    if decoding.takes([1, 4]):                  # never where decode steps take the plain path, which `path` says
        logits = decoding.logits([first, second], [[7], [9, 4, 4, 8]])        # [5, vocab]

A step serves a number of rows and a number of pages, each rounded up to a power of two. On a GPU one that was not seen
before runs launch by launch and is then captured as a graph, which those that follow replay.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit import kernels
from quantkit.errors import BackendError
from quantkit.kernels.cuda import FEW_ROWS, CudaBackend
from quantkit.kernels.graphs import CudaGraphs, Launches, Recorder
from quantkit.models.transformer import Model, require_known
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.decode_path import GRAPHS, KERNELS, NATIVE, PLAIN, DecodePath, decode_path
from quantkit.runtime.decode_step import DecodeStep, Weights, slot
from quantkit.runtime.page_pool import PagePool
from quantkit.runtime.page_store import PAGE

if TYPE_CHECKING:
    from quantkit.runtime.native_step import NativeStep

MOST_TOKENS = 8
"""Of one text in a pass. More are a piece of a prompt: its keys and values are read once for all of them elsewhere."""


class Decoding:
    """Decode steps of one model over one pool. `path` says how they ran so far."""

    def __init__(self, model: Model, pool: PagePool, recorder: Recorder | None) -> None:
        """Without a `recorder` a GPU is given every launch one by one."""
        self.path = decode_path(model, pool)
        self._model, self._pool = model, pool
        self._threads = torch.get_num_threads()
        self._recorder = recorder
        self._weights: Weights | None = None
        if self.path.name == KERNELS and recorder is None:
            self.path = DecodePath(KERNELS, "this device has no CUDA graphs")
        if self.path.name == KERNELS:
            backend = kernels.backend(model.device.type)
            assert isinstance(backend, CudaBackend)
            self._weights = Weights(model, backend)
        self._steps: dict[tuple[int, int], DecodeStep | NativeStep] = {}
        self._replays: dict[tuple[int, int], Launches] = {}

    @classmethod
    def of(cls, model: Model, pool: PagePool) -> "Decoding":
        """With graphs on a GPU."""
        return cls(model, pool, CudaGraphs(model.device) if model.device.type == "cuda" else None)

    def takes(self, counts: Sequence[int]) -> bool:
        """Whether a pass of so many tokens of each text is a decode step."""
        return self.path.name != PLAIN and max(counts) <= MOST_TOKENS and sum(counts) <= FEW_ROWS

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """For a step and what is made of its logits: on the CPU torch keeps to one thread. Its others look out for work
        long after an operation on 32,768 numbers, and a step beside them takes twice as long."""
        if self.path.name != NATIVE:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)

    @torch.inference_mode()
    def logits(self, sequences: Sequence[CacheSequence], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Reads these tokens of each sequence, at least one, which it has then: float32 logits of every one, `[n,
        vocab]`, in memory of the caller's own.

        Raises CacheFull before anything is stored, RequestError for ids outside the vocabulary.
        """
        count = sum(map(len, tokens))
        step = self.ready(sequences, tokens)
        self._run(step)
        for sequence, some in zip(sequences, tokens, strict=True):
            sequence.length += len(some)
        return step.logits[:count].clone()

    @torch.inference_mode()
    def ready(self, sequences: Sequence[CacheSequence], tokens: Sequence[Sequence[int]]) -> "DecodeStep | NativeStep":
        """The step that reads these tokens, its buffers filled, before it is launched. Raises as `logits` does."""
        ids = [token for some in tokens for token in some]
        require_known(torch.tensor(ids), self._model.config.vocab_size)
        for sequence, some in zip(sequences, tokens, strict=True):
            sequence.prepare(len(some))
        positions: list[int] = []
        slots: list[int] = []
        tables: list[list[int]] = []
        for sequence, some in zip(sequences, tokens, strict=True):
            places = _places(sequence, sequence.length + len(some))
            for position in range(sequence.length, sequence.length + len(some)):
                positions.append(position)
                slots.append(slot(places[position // PAGE], position))
                tables.append(places[: position // PAGE + 1])
        step = self._step(len(ids), max(map(len, tables)))
        step.fill(ids, positions, slots, tables)
        return step

    def _step(self, rows: int, pages: int) -> "DecodeStep | NativeStep":
        pages = min(_bucket(pages), self._pool.capacity // PAGE)
        if self._weights is not None:
            key = _bucket(rows), pages
            if key not in self._steps:
                self._steps[key] = DecodeStep(self._model, self._pool, self._weights, *key)
            return self._steps[key]
        from quantkit.runtime.native_step import NativeStep, padded  # Numba need not be there for a GPU

        key = padded(rows), pages
        if key not in self._steps:
            self._steps[key] = NativeStep(self._model, self._pool, *key, self._threads)
        return self._steps[key]

    def _run(self, step: "DecodeStep | NativeStep") -> None:
        if self._weights is None:
            step.launch()
            return
        key = step.rows, step.pages
        if key in self._replays:
            self._replays[key]()
            return
        step.launch()
        if self._recorder is None:
            return
        try:
            with self._weights.workspace.sealed():
                self._replays[key] = self._recorder.record(step.launch)
            self.path = DecodePath(GRAPHS, "")
        except (RuntimeError, BackendError) as error:
            told = error.message if isinstance(error, BackendError) else str(error).split("\n")[0]
            self.path = DecodePath(KERNELS, f"the launches of a step could not be captured: {told}")
            self._recorder = None


def _bucket(count: int) -> int:
    """The power of two that holds it."""
    return 1 << (count - 1).bit_length()


def _places(sequence: CacheSequence, end: int) -> list[int]:
    """Of the pages of a sequence up to position `end`, in its pool's device tier."""
    places = []
    for page in sequence.pages[: -(-end // PAGE)]:
        assert page is not None and page.device is not None
        places.append(page.device)
    return places
