"""What a decode step needs besides products, on CUDA: the reference of `steps.py`, with kernels in place of torch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.launcher import Argument, Launcher
from quantkit.kernels.sources import Defines
from quantkit.kernels.steps import GROUP, PAGE, Pages, ReferenceSteps

THREADS = 256
HALF_NAMES = {torch.float16: "F16", torch.bfloat16: "BF16"}
FORMAT_NAMES = {(16, 16): "KV16", (9, 8): "K9V8", (4, 4): "KV4", (8, 4): "K8V4"}
# The longest head that `attend` is made for.
WIDEST_HEAD = 128
# Elements that one warp of `rope_append` and `turn_heads` turns.
WIDEST_TURN = 128
# Query heads that one block of `attend` serves: their sums are in registers.
MOST_HEADS = 8
NULL = 0


class CudaSteps(ReferenceSteps):
    """Operations on tensors that `launcher` reaches; what no kernel is made for is left to the reference."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def rms_norm(
        self, hidden: Tensor, update: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
    ) -> Tensor:
        fits = hidden.is_contiguous() and (update is None or update.dtype == dtype)
        if not self._takes(dtype, hidden) or not fits:
            return super().rms_norm(hidden, update, weight, epsilon, dtype)
        rows, width = hidden.shape
        y = self._launcher.empty((rows, width), dtype, hidden.device)
        added = NULL if update is None else update.contiguous()
        arguments = (added, weight, hidden, y, np.int32(width), np.float32(epsilon))
        self._run("rms_norm", {"HALF": HALF_NAMES[dtype]}, (rows,), THREADS, arguments, hidden.device)
        return y

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        if not self._takes(gate.dtype, gate):
            return super().silu_mul(gate, up)
        y = self._launcher.empty(gate.shape, gate.dtype, gate.device)
        grid = (-(-gate.numel() // (8 * THREADS)),)
        arguments = (_aligned(gate), _aligned(up), y, np.int32(gate.numel()))
        self._run("silu_mul", {"HALF": HALF_NAMES[gate.dtype]}, grid, THREADS, arguments, gate.device)
        return y

    def rope_append(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Pages, values: Pages
    ) -> Tensor:
        if not self._takes(q.dtype, q) or not self._keeps(keys, values, q.dtype):
            return super().rope_append(q, k, v, cos, sin, slots, keys, values)
        tokens, heads, dim = q.shape
        rotated = self._launcher.empty(q.shape, q.dtype, q.device)
        jobs = tokens * (heads + 2 * k.shape[1])
        inputs = (value.contiguous() for value in (q, k, v, cos, sin, slots))
        sizes = map(np.int32, (tokens, heads, k.shape[1], dim, cos.shape[1]))
        rows, blocks = _apart(keys), (keys.block, values.block)
        turns = (*map(np.int32, blocks), *map(_factor, blocks))
        arguments = (*inputs, rotated, *_stored(keys), *_stored(values), *sizes, *rows, *turns)
        grid = (-(-jobs * 32 // THREADS),)
        self._run("rope_append", self._defines(q.dtype, keys, values), grid, THREADS, arguments, q.device)
        return rotated

    def turn_heads(self, heads: Tensor, block: int) -> Tensor:
        dim = heads.shape[-1]
        if block == 1 or not self._takes(heads.dtype, heads) or dim > WIDEST_TURN or dim % GROUP:
            return super().turn_heads(heads, block)
        turned, rows = self._launcher.empty(heads.shape, heads.dtype, heads.device), heads.numel() // dim
        sizes = map(np.int32, (rows, dim, block))
        arguments: tuple[Argument, ...] = (_aligned(heads), turned, *sizes, _factor(block))
        grid = (-(-rows * 32 // THREADS),)
        self._run("turn_heads", {"HALF": HALF_NAMES[heads.dtype]}, grid, THREADS, arguments, heads.device)
        return turned

    def kv_read(self, pages: Pages, slots: Tensor, dtype: torch.dtype) -> Tensor:
        if not self._takes(dtype, slots) or (pages.bits == 16 and pages.codes.dtype != dtype):
            return super().kv_read(pages, slots, dtype)
        tokens, kv_heads, dim = len(slots), pages.codes.shape[1], pages.head_dim
        out = self._launcher.empty((tokens, kv_heads, dim), dtype, slots.device)
        grid = (-(-out.numel() // (8 * THREADS)),)
        sizes = map(np.int32, (tokens, kv_heads, dim))
        arguments = (*_stored(pages), slots.contiguous(), out, *sizes, *_apart(pages))
        self._run("kv_read", {"HALF": HALF_NAMES[dtype], "BITS": pages.bits}, grid, THREADS, arguments, slots.device)
        return out

    def attend(
        self,
        q: Tensor,
        keys: Pages,
        values: Pages,
        table: Tensor,
        lengths: Tensor,
        scale: float,
        *,
        window: int = 0,
        cap: float = 0.0,
    ) -> Tensor:
        rows, heads, dim = q.shape
        if not self._takes(q.dtype, q) or not self._keeps(keys, values, q.dtype) or dim > WIDEST_HEAD:
            return super().attend(q, keys, values, table, lengths, scale, window=window, cap=cap)
        kv_heads = keys.codes.shape[1]
        together = next(count for count in range(MOST_HEADS, 0, -1) if heads // kv_heads % count == 0)
        # Blocks past the end of a sequence return at once: its length stays on the device, as a captured graph needs.
        splits = table.shape[1] if not window else min(table.shape[1], -(-window // PAGE) + 1)
        grid = (splits, heads // together, rows)
        y = self._launcher.empty(q.shape, q.dtype, q.device)
        partial = self._launcher.empty((rows * grid[1], splits, together, dim + 2), torch.float32, q.device)
        arguments = (
            *(q.contiguous(), *_stored(keys), *_stored(values), table.contiguous(), lengths),
            *(y, partial, self._launcher.counters(rows * grid[1], q.device)),
            *map(np.int32, (heads, kv_heads, table.shape[1], window)),
            *_apart(keys),
            *map(np.float32, (scale, cap)),
        )
        defines = {**self._defines(q.dtype, keys, values), "HEADS": together, "DIM": dim}
        self._run("attend", defines, grid, 128, arguments, q.device)
        return self.turn_heads(y, values.block)

    def argmax(self, logits: Tensor) -> Tensor:
        if not self._launcher.reaches(logits) or logits.dtype != torch.float32:
            return super().argmax(logits)
        rows, vocab = logits.shape
        blocks = max(1, min(64, vocab // (4 * THREADS)))
        chosen = self._launcher.empty((rows,), torch.int64, logits.device)
        best = self._launcher.empty((rows, blocks), torch.float32, logits.device)
        index = self._launcher.empty((rows, blocks), torch.int32, logits.device)
        counters = self._launcher.counters(rows, logits.device)
        arguments = (logits.contiguous(), chosen, best, index, counters, np.int32(vocab))
        self._run("argmax", {}, (blocks, rows), THREADS, arguments, logits.device)
        return chosen

    def _takes(self, dtype: torch.dtype, tensor: Tensor) -> bool:
        return dtype in HALF_NAMES and self._launcher.reaches(tensor)

    def _keeps(self, keys: Pages, values: Pages, dtype: torch.dtype) -> bool:
        """Whether kernels are made for such pages; 16-bit pages hold the halves of the queries."""
        both = (keys, values)
        same = all(pages.bits < 16 or pages.codes.dtype == dtype for pages in both) and _apart(keys) == _apart(values)
        turned = all(pages.block == 1 or pages.head_dim <= WIDEST_TURN for pages in both)
        return same and turned and (keys.bits, values.bits) in FORMAT_NAMES

    def _defines(self, dtype: torch.dtype, keys: Pages, values: Pages) -> dict[str, int | str]:
        return {"HALF": HALF_NAMES[dtype], "FORMAT": FORMAT_NAMES[keys.bits, values.bits]}

    def _run(
        self,
        name: str,
        defines: Defines,
        grid: Sequence[int],
        threads: int,
        arguments: Sequence[Argument],
        device: torch.device,
    ) -> None:
        if all(grid):
            self._launcher.run(name, defines, name, grid, threads, arguments, device=device)


def _aligned(tensor: Tensor) -> Tensor:
    """Without gaps, from an address that loads of 16 bytes can start at."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _stored(pages: Pages) -> tuple[Argument, Argument]:
    """Codes as bytes whatever they are, and scales."""
    return pages.codes.view(torch.uint8), NULL if pages.scales is None else pages.scales


def _apart(pages: Pages) -> tuple[np.int32, np.int32]:
    """Rows between two pages, and between two heads."""
    width = pages.codes.shape[3]
    return np.int32(pages.codes.stride(0) // width), np.int32(pages.codes.stride(1) // width)


def _factor(block: int) -> np.float32:
    return np.float32(block**-0.5)
