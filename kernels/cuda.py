"""The CUDA backend: the reference, with the kernels of `cuda/*.cu` in place of its torch operations.

A method checks shapes, allocates by torch and launches; `launcher.py` alone deals with CuPy. Tensors that the launcher
does not reach (in main memory) are left to the reference.
"""

from collections.abc import Sequence
from math import gcd

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.cuda_steps import CudaSteps
from quantkit.kernels.launcher import Launcher
from quantkit.kernels.matmul_shape import Shape
from quantkit.kernels.protocol import Exl2Weight, GptqWeight, Repacked
from quantkit.kernels.reference import ReferenceBackend, check_codes, check_words
from quantkit.kernels.sources import Defines
from quantkit.kernels.tiles import (
    Exl2Tiles,
    GptqTiles,
    exl2_codes,
    exl2_tiles,
    gptq_codes,
    gptq_tiles,
    untile_columns,
)
from quantkit.kernels.workspace import Workspace

Tensors = Sequence[Tensor]

THREADS = 256
# Above this many rows of x a weight is expanded once and multiplied by the vendor's library.
FEW_ROWS = 64
# Runs that one block of an expand kernel takes: as in `expand.cuh`.
EXPANDED_RUNS = 16
# Rows that one launch of `solve_rows` rounds; more are taken in parts, with a product in between.
SOLVED_ROWS = 128
NULL = 0  # eight bytes, as every Python integer that is passed to a kernel
MMA_NAMES = {torch.float16: "MmaF16", torch.bfloat16: "MmaBF16"}
FLOAT_NAMES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}


class CudaBackend(ReferenceBackend):
    """Kernels on one kind of device, which `launcher` runs. `steps`: what a decode step needs besides products."""

    name = "cuda"

    def __init__(self, launcher: Launcher, reason: str = "asked for by name") -> None:
        super().__init__(reason)
        self._launcher = launcher
        self.steps = CudaSteps(launcher)

    def device(self) -> torch.device:
        """The device that is current."""
        return self._launcher.device()

    def reaches(self, tensor: Tensor) -> bool:
        """Whether its kernels can use the memory of `tensor`."""
        return self._launcher.reaches(tensor)

    def multiplies(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether it multiplies a few rows of this dtype by a packed weight in one kernel."""
        least = {torch.float16: 75, torch.bfloat16: 80}.get(dtype)
        return least is not None and self._launcher.architecture(device) >= least

    def within(self) -> tuple["CudaBackend", Workspace]:
        """The same backend in memory that is made once, see `Workspace`."""
        workspace = Workspace(self._launcher)
        return CudaBackend(workspace, self.reason), workspace

    def processors(self, device: torch.device) -> int:
        """Multiprocessors of a device."""
        return self._launcher.processors(device)

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        if not self._launcher.reaches(codes):
            return super().pack(codes, bits)
        unit_codes, _ = check_codes(codes, bits)
        rows, out = codes.shape
        words = self._launcher.empty((rows * bits // 32, out), torch.int32, codes.device)
        defines, columns = _columns(out, BITS=bits)
        units = rows // unit_codes
        self._cover("pack", defines, units * out // columns, (codes,), words, units, out)
        return words

    def unpack(self, words: Tensor, bits: int) -> Tensor:
        if not self._launcher.reaches(words):
            return super().unpack(words, bits)
        _, unit_words = check_words(words, bits)
        rows, out = words.shape
        codes = self._launcher.empty((rows * 32 // bits, out), torch.uint8, words.device)
        defines, columns = _columns(out, BITS=bits)
        units = rows // unit_words
        self._cover("unpack", defines, units * out // columns, (words,), codes, units, out)
        return codes

    def gptq_dequantize(self, weight: GptqWeight) -> Tensor:
        if not self._launcher.reaches(weight.words):
            return super().gptq_dequantize(weight)
        _, unit_words = check_words(weight.words, weight.bits)
        out = weight.words.shape[1]
        result = self._launcher.empty((weight.group.numel(), out), torch.float16, weight.words.device)
        defines, columns = _columns(out, BITS=weight.bits, SCALE=FLOAT_NAMES[weight.scales.dtype])
        units = weight.words.shape[0] // unit_words
        inputs = (weight.words, weight.scales, weight.zeros, weight.group)
        self._cover("gptq_dequantize", defines, units * out // columns, inputs, result, units, out)
        return result

    def exl2_dequantize(self, weight: Exl2Weight) -> Tensor:
        if not self._launcher.reaches(weight.words):
            return super().exl2_dequantize(weight)
        device, out = weight.words.device, weight.words.shape[1]
        result = self._launcher.empty((weight.order.numel(), out), torch.float16, device)
        table, row, word = [], 0, 0
        for bits, rows in weight.groups:
            table.append((bits, rows, row, word))
            row, word = row + rows, word + rows * bits // 32
        groups = torch.tensor(table, dtype=torch.int32, device=device)
        inputs = (weight.words, weight.scale_codes, weight.scale_max, groups, weight.order)
        self._run("exl2_dequantize", {}, (-(-out // 512), len(table)), 128, inputs, (result,), (out,))
        return result

    def gptq_repack(self, weight: GptqWeight) -> Repacked:
        if not self._launcher.reaches(weight.words):
            return super().gptq_repack(weight)
        return gptq_tiles(self.unpack(weight.words, weight.bits), weight)

    def gptq_restore(self, repacked: Repacked) -> GptqWeight:
        if not isinstance(repacked, GptqTiles):
            return super().gptq_restore(repacked)
        codes, group = gptq_codes(repacked)
        out = repacked.out_features
        scales, zeros = (untile_columns(values)[:, :out].contiguous() for values in (repacked.scales, repacked.zeros))
        words = self.pack(codes, repacked.bits)
        return GptqWeight(words, scales.to(repacked.scale_dtype), zeros, group, repacked.bits)

    def gptq_matmul(self, x: Tensor, repacked: Repacked) -> Tensor:
        if not isinstance(repacked, GptqTiles):
            return super().gptq_matmul(x, repacked)
        defines: dict[str, int | str] = {"BITS": repacked.bits, "SCALE": FLOAT_NAMES[repacked.scales.dtype]}
        shift = repacked.group_shift
        inputs = (repacked.words, repacked.scales, repacked.zeros, repacked.run_group if shift is None else None)
        sizes = (len(repacked.run_group), repacked.scales.shape[1], shift or 0)
        if self._fused(x):
            return self._matmul("gptq_matmul", defines, x, repacked, inputs, sizes)
        return x @ self._expand("gptq_expand", defines, x.dtype, repacked, inputs, sizes)

    def exl2_repack(self, weight: Exl2Weight) -> Repacked:
        if not self._launcher.reaches(weight.words):
            return super().exl2_repack(weight)
        codes, word = [], 0
        for bits, rows in weight.groups:
            words = rows * bits // 32
            codes.append(self.unpack(weight.words[word : word + words], bits))
            word += words
        return exl2_tiles(codes, self.unpack(weight.scale_codes.t(), 4).t(), weight)

    def exl2_restore(self, repacked: Repacked) -> Exl2Weight:
        if not isinstance(repacked, Exl2Tiles):
            return super().exl2_restore(repacked)
        codes, scale_codes, order = exl2_codes(repacked)
        words = torch.cat([self.pack(part, bits) for part, (bits, _) in zip(codes, repacked.groups, strict=True)])
        packed = self.pack(scale_codes.t(), 4).t().contiguous()
        return Exl2Weight(words, packed, repacked.scale_max, repacked.groups, order)

    def exl2_matmul(self, x: Tensor, repacked: Repacked) -> Tensor:
        if not isinstance(repacked, Exl2Tiles):
            return super().exl2_matmul(x, repacked)
        inputs = (repacked.words, repacked.scale_codes, repacked.scale_max, repacked.runs)
        sizes = (len(repacked.runs), len(repacked.groups), repacked.words.shape[1])
        if self._fused(x):
            return self._matmul("exl2_matmul", {}, x, repacked, inputs, sizes)
        return x @ self._expand("exl2_expand", {}, x.dtype, repacked, inputs, sizes)

    def grid_error(self, rows: Tensor, importance: Tensor, scales: Tensor, zeros: Tensor, top: int) -> Tensor:
        if not self._launcher.reaches(rows):
            return super().grid_error(rows, importance, scales, zeros, top)
        (g, out), n = rows.shape, len(scales)
        errors = self._launcher.empty((n, out), torch.float32, rows.device)
        grid = (-(-out // 32), -(-n // 32))
        self._run("grid_error", {}, grid, THREADS, (rows, importance, scales, zeros), (errors,), (g, out, n, top))
        return errors

    def solve_rows(
        self, weight: Tensor, target: Tensor, factor: Tensor, group: Tensor, scales: Tensor, zeros: Tensor, top: int
    ) -> tuple[Tensor, Tensor]:
        if not self._launcher.reaches(weight):
            return super().solve_rows(weight, target, factor, group, scales, zeros, top)
        b, out = weight.shape
        codes = self._launcher.empty((b, out), torch.uint8, weight.device)
        errors = self._launcher.empty((b, out), torch.float32, weight.device)
        for start in range(0, b, SOLVED_ROWS):
            rows = slice(start, min(b, start + SOLVED_ROWS))
            fed = target[rows] if start == 0 else target[rows] + factor[rows, :start] @ errors[:start]
            inputs = (weight[rows], fed, factor[rows, rows], group[rows], scales, zeros)
            outputs = (codes[rows], errors[rows])
            sizes = (rows.stop - start, out, top)
            self._run("solve_rows", {}, (-(-out // 32),), THREADS, inputs, outputs, sizes)
        return codes, errors

    def _fused(self, x: Tensor) -> bool:
        """Whether the matmul kernels take this x: few rows, of a dtype that the tensor cores multiply."""
        return len(x) <= FEW_ROWS and self.multiplies(x.dtype, x.device)

    def _matmul(
        self,
        name: str,
        defines: Defines,
        x: Tensor,
        tiles: GptqTiles | Exl2Tiles,
        inputs: Sequence[Tensor | None],
        sizes: Sequence[int],
    ) -> Tensor:
        """`sizes` of the weight, runs first, stand between those of x and y and the last one, the runs of a split."""
        rows, in_features, out, runs = len(x), tiles.in_features, tiles.out_features, sizes[0]
        y = self._launcher.empty((rows, out), x.dtype, x.device)
        shape = Shape.of(rows, out, runs, self._launcher.processors(x.device))
        partial = self._launcher.empty(shape.partial if shape.splits > 1 else (1,), torch.float32, x.device)
        arrived = self._launcher.counters(shape.grid[0] * shape.grid[1], x.device)
        self._run(
            name,
            {**defines, "TOKENS": shape.tokens, "DTYPE": MMA_NAMES[x.dtype]},
            shape.grid,
            THREADS,
            (x, tiles.order, *inputs),
            (y, partial, arrived),
            (rows, in_features, out, *sizes, shape.range),
        )
        return y

    def _expand(
        self,
        name: str,
        defines: Defines,
        dtype: torch.dtype,
        tiles: GptqTiles | Exl2Tiles,
        inputs: Sequence[Tensor | None],
        sizes: Sequence[int],
    ) -> Tensor:
        """[in, out] in `dtype`: the float16 weight, for a product by the vendor's library."""
        dense = self._launcher.empty((tiles.in_features, tiles.out_features), dtype, tiles.words.device)
        grid = (len(tiles.words), -(-sizes[0] // EXPANDED_RUNS))
        defines = {**defines, "VALUE": FLOAT_NAMES[dtype]}
        self._run(name, defines, grid, 128, (tiles.order, *inputs), (dense,), (tiles.out_features, *sizes))
        return dense

    def _cover(self, name: str, defines: Defines, count: int, inputs: Tensors, output: Tensor, *sizes: int) -> None:
        """A launch with one thread for each of `count` pieces of work."""
        self._run(name, defines, (-(-count // THREADS),), THREADS, inputs, (output,), sizes)

    def _run(
        self,
        name: str,
        defines: Defines,
        grid: Sequence[int],
        threads: int,
        inputs: Sequence[Tensor | None],
        outputs: Tensors,
        sizes: Sequence[int],
    ) -> None:
        """Kernel `name` of the file of that name; every kernel takes inputs, outputs and then 32-bit sizes."""
        if not all(grid):
            return
        ready = (NULL if value is None else _ready(value) for value in inputs)
        arguments = (*ready, *outputs, *map(np.int32, sizes))
        self._launcher.run(name, defines, name, grid, threads, arguments, device=outputs[0].device)


def _columns(out: int, **defines: int | str) -> tuple[Defines, int]:
    """The macros with COLUMNS, the neighbouring columns of one thread, and that number."""
    columns = 1 if out % 4 else 4
    return {**defines, "COLUMNS": columns}, columns


def _ready(tensor: Tensor) -> Tensor:
    """Rows one after another, each starting where a vector load of up to 16 bytes that divides it can start."""
    tensor = tensor.contiguous()
    row_bytes = tensor.shape[-1] * tensor.element_size() if tensor.dim() else 0
    return tensor if tensor.data_ptr() % gcd(16, row_bytes) == 0 else tensor.clone()
