"""The CUDA backend: the reference, with the kernels of `cuda/*.cu` in place of its torch operations.

A method checks shapes, allocates by torch and launches; `launcher.py` alone deals with CuPy. Tensors that the launcher
does not reach (in main memory) are left to the reference.
"""

from collections.abc import Sequence
from math import gcd

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.launcher import Launcher
from quantkit.kernels.protocol import Exl2Weight, GptqWeight
from quantkit.kernels.reference import ReferenceBackend, check_codes, check_words
from quantkit.kernels.sources import Defines

Tensors = Sequence[Tensor]

THREADS = 256
SCALE_NAMES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}


class CudaBackend(ReferenceBackend):
    """Kernels on one kind of device, which `launcher` runs."""

    name = "cuda"

    def __init__(self, launcher: Launcher, reason: str = "asked for by name") -> None:
        super().__init__(reason)
        self._launcher = launcher

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
        defines, columns = _columns(out, BITS=weight.bits, SCALE=SCALE_NAMES[weight.scales.dtype])
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

    def _cover(self, name: str, defines: Defines, count: int, inputs: Tensors, output: Tensor, *sizes: int) -> None:
        """A launch with one thread for each of `count` pieces of work."""
        self._run(name, defines, (-(-count // THREADS),), THREADS, inputs, (output,), sizes)

    def _run(
        self,
        name: str,
        defines: Defines,
        grid: Sequence[int],
        threads: int,
        inputs: Tensors,
        outputs: Tensors,
        sizes: Sequence[int],
    ) -> None:
        """Kernel `name` of the file of that name; every kernel takes inputs, outputs and then 32-bit sizes."""
        if not all(grid):
            return
        arguments = (*map(_ready, inputs), *outputs, *map(np.int32, sizes))
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
