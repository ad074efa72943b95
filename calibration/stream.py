"""Hidden states on their way through the blocks: one block's outputs are the next one's inputs.

    stream = ActivationStream.start(model.embed, rows, batch_rows=8)
    for index in range(layers):
        for hidden in stream.batches(): ...          # look at the block's inputs
        stream.advance(block, f"block {index}")      # put its outputs in their place

What is held is `[rows, length, hidden]` once, whatever the number of blocks: an advance replaces batch after batch. It
stays in memory, or in files of a folder that are read and written as plain bytes (a memory map would count as memory
of the process again). Such a folder can be sealed, and be taken up again by another process.

float32 is the default; bfloat16 halves the size, and rounds small entries no more coarsely than the massive ones beside
them, where float16 would overflow.
"""

import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quantkit.errors import CalibrationError

DTYPES = (torch.float32, torch.bfloat16)


class ActivationStream:
    """Hidden states of all calibration rows, `tokens` of them, between two blocks, in batches of whole rows."""

    def __init__(
        self,
        slots: "_Slots",
        row_counts: list[int],
        length: int,
        dtype: torch.dtype,
        at_once: int | None = None,
    ) -> None:
        self.tokens = sum(row_counts) * length
        self._at_once = at_once
        self._length = length
        self._slots = slots
        self._row_counts = row_counts
        self._dtype = dtype

    @classmethod
    def start(
        cls,
        embed: Callable[[Tensor], Tensor],
        rows: Tensor,
        *,
        batch_rows: int,
        dtype: torch.dtype = torch.float32,
        folder: Path | None = None,
    ) -> "ActivationStream":
        """The states before the first block.

        embed       int64 [b, length] → floats [b, length, hidden]
        rows        int64 [rows, length]: token ids
        batch_rows  rows of a batch; the last batch may have fewer
        dtype       float32 or bfloat16: what is stored, and what `batches` gives
        folder      an existing folder of the caller's for the states; None keeps them in memory
        """
        assert dtype in DTYPES, "float16 ends at 65504: residual streams reach it"
        parts = rows.split(batch_rows)
        slots = _InMemory() if folder is None else _OnDisk(folder)
        stream = cls(slots, [len(part) for part in parts], rows.shape[1], dtype)
        for number, part in enumerate(parts):
            stream._put(number, embed(part), "the embedding")
        return stream

    @classmethod
    def resume(
        cls,
        folder: Path,
        seal: str,
        rows: Tensor,
        *,
        batch_rows: int,
        hidden_size: int,
        dtype: torch.dtype = torch.float32,
    ) -> "ActivationStream":
        """The states of a folder that a stream of the same rows and batches gave this `seal`.

        Raises CalibrationError where a file is missing or is not what it was.
        """
        counts = [len(part) for part in rows.split(batch_rows)]
        slots = _OnDisk(folder, [torch.Size((count, rows.shape[1], hidden_size)) for count in counts], dtype)
        stream = cls(slots, counts, rows.shape[1], dtype)
        for hidden in stream.batches():
            slots.check(hidden)
        if slots.seal() != seal:
            raise CalibrationError(
                f"the hidden states in `{folder}` are not what was written", hint="start over with `--restart`"
            )
        return stream

    def seal(self) -> str:
        """Waits until all states are on the disk. Returns what `resume` compares them with: a checksum in batch order.

        Only for a stream in a folder, whose batches were written once.
        """
        assert isinstance(self._slots, _OnDisk), "states in memory end with their process"
        self._slots.sync()
        return self._slots.seal()

    def batches(self) -> Iterator[Tensor]:
        """The states `[b, length, hidden]` in row order. They are not to be changed in place."""
        for number in range(len(self._row_counts)):
            hidden = self._slots.get(number)
            yield from (hidden,) if self._at_once is None else hidden.split(self._at_once)

    def finer(self, rows: int) -> "ActivationStream":
        """The same states for a reader that takes no more than so many rows at once."""
        return ActivationStream(self._slots, self._row_counts, self._length, self._dtype, rows)

    def advance(self, block: Callable[[Tensor], Tensor], name: str) -> None:
        """Replace every batch by what the block makes of it. Raises CalibrationError for NaN or infinity."""
        for number in range(len(self._row_counts)):
            self._put(number, block(self._slots.get(number)), name)

    def follow(
        self,
        block: Callable[[Tensor], Tensor],
        name: str,
        *,
        dtype: torch.dtype | None = None,
        folder: Path | None = None,
    ) -> "ActivationStream":
        """Another stream, of what the block makes of each batch; this one stays. Raises as `advance` does.

        dtype   of the new one, by default that of this one
        folder  as in `start`; not one that another stream uses
        """
        slots = _InMemory() if folder is None else _OnDisk(folder)
        stream = ActivationStream(slots, self._row_counts, self._length, dtype or self._dtype)
        for number in range(len(self._row_counts)):
            stream._put(number, block(self._slots.get(number)), name)
        return stream

    def aside(self, batches: Iterable[Tensor], *, folder: Path | None = None) -> "ActivationStream":
        """Another stream of the same rows, of these batches: float32 or bfloat16 `[b, length, width]`. Nothing of it is
        checked, and it has no seal: it is for the process that has made it."""
        slots: _Slots = _InMemory() if folder is None else _OnDisk(folder, sums=False)
        made = self._dtype
        for number, batch in enumerate(batches):
            made = batch.dtype
            slots.put(number, batch.detach().to("cpu"))
        return ActivationStream(slots, self._row_counts, self._length, made)

    def _put(self, number: int, hidden: Tensor, name: str) -> None:
        if hidden.numel() and not math.isfinite(float(hidden.detach().abs().amax())):  # NaN counts as the greatest
            finite = torch.isfinite(hidden).flatten(1).all(1)
            row = sum(self._row_counts[:number]) + int((~finite).nonzero()[0])
            raise CalibrationError(
                f"{name} gives NaN or infinity in calibration row {row}",
                hint="use `--dtype fp32`; if it stays, a weight of the checkpoint is damaged",
            )
        self._slots.put(number, hidden.detach().to("cpu", self._dtype))


class _Slots(Protocol):
    def get(self, number: int) -> Tensor: ...

    def put(self, number: int, hidden: Tensor) -> None: ...


class _InMemory:
    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}

    def get(self, number: int) -> Tensor:
        return self._held[number]

    def put(self, number: int, hidden: Tensor) -> None:
        self._held[number] = hidden


class _OnDisk:
    """One file of raw values for each batch. Without `sums` there is no seal."""

    def __init__(
        self,
        folder: Path,
        shapes: list[torch.Size] | None = None,
        dtype: torch.dtype | None = None,
        *,
        sums: bool = True,
    ) -> None:
        self._folder, self._sums = folder, sums
        self._forms = {number: (shape, dtype) for number, shape in enumerate(shapes or [])}
        self._checksum = 0

    def get(self, number: int) -> Tensor:
        shape, dtype = self._forms[number]
        hidden = torch.empty(shape, dtype=dtype)
        path = self._path(number)
        view, filled = _bytes(hidden), 0
        try:
            with open(path, "rb", buffering=0, opener=_without_links) as file:
                while filled < len(view) and (count := file.readinto(view[filled:])):
                    filled += count
        except OSError as error:
            raise CalibrationError(
                f"hidden states cannot be read from `{path}`: {error.strerror}", hint="start again, with `--restart`"
            ) from error
        if filled < len(view):
            raise CalibrationError(
                f"`{path}` has {filled:,} bytes of hidden states, expected {len(view):,}",
                hint="another process changed the file: start again, with `--restart`",
            )
        return hidden

    def put(self, number: int, hidden: Tensor) -> None:
        self._forms[number] = hidden.shape, hidden.dtype
        hidden = hidden.contiguous()
        if self._sums:
            self.check(hidden)
        view = _bytes(hidden)
        try:
            with open(self._path(number), "wb", buffering=0, opener=_without_links) as file:
                while len(view):
                    view = view[file.write(view) :]
        except OSError as error:
            raise self._refused(error) from error

    def check(self, hidden: Tensor) -> None:
        """Adds the next batch to the checksum."""
        self._checksum = zlib.crc32(_bytes(hidden), self._checksum)

    def seal(self) -> str:
        assert self._sums, "nothing is known of these files"
        return f"{self._checksum:08x}"

    def sync(self) -> None:
        """Waits for the disk, once all files are written: it has been at work in the meantime."""
        try:
            for place in (*(self._path(number) for number in self._forms), self._folder):
                descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> CalibrationError:
        return CalibrationError(
            f"hidden states cannot be written to `{self._folder}`: {error.strerror}",
            hint="free some space there and give the same command again: what is finished stays",
        )

    def _path(self, number: int) -> Path:
        return self._folder / f"hidden-{number:05}.bin"


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).view(-1).numpy().data
