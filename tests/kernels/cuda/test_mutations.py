"""Mistakes put into the kernels on purpose: the self-test sees each. docs/results/mutations.md records a run."""

import shutil
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import SCHEDULES, KernelError, compiler
from cuda_on_cpu.launcher import ExecutorLauncher

from quantkit.kernels.cuda import CudaBackend
from quantkit.kernels.self_test import CASES, Outcome

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new`, once, in `file`; the cases of `kernel` have to fail."""

    mistake: str
    kernel: str
    file: str
    old: str
    new: str


MUTATIONS = (
    Mutation(
        "missing barrier after the factor's panel is loaded",
        "solve_rows",
        "solve_rows.cu",
        "      }\n      __syncthreads();\n    }\n#pragma unroll 1",
        "      }\n    }\n#pragma unroll 1",
    ),
    Mutation(
        "missing barrier before the next rows overwrite the tile",
        "grid_error",
        "grid_error.cu",
        "      }\n    }\n    __syncthreads();\n  }",
        "      }\n    }\n  }",
    ),
    Mutation(
        "missing barrier between the parts' sums and their addition",
        "gptq_matmul",
        "matmul.cuh",
        "  __syncthreads();\n  if (part == 0)\n#pragma unroll\n    for (int p",
        "  if (part == 0)\n#pragma unroll\n    for (int p",
    ),
    Mutation(
        "missing wait for activations on their way to shared memory",
        "gptq_matmul",
        "matmul.cuh",
        "      cp_async_wait<0>();\n",
        "",
    ),
    Mutation(
        "wrong shift where a 3-bit code straddles two words",
        "unpack",
        "stream.cuh",
        "if (shift + B > 32) code |= words[word + 1] << (32 - shift);",
        "if (shift + B > 32) code |= words[word + 1] << (32 - shift - (B == 3));",
    ),
    Mutation(
        "wrong shift of the high plane at 3 bits",
        "exl2_matmul",
        "tiles.cuh",
        "4 * s + r, at + low, v);",
        "4 * s + r, at + low - (B == 3), v);",
    ),
    Mutation(
        "wrong place of a zero point at 4 bits",
        "gptq_matmul",
        "tiles.cuh",
        "const int at = place_of<T, B>(v);\n  const u16 h",
        "const int at = B == 4 ? 0 : place_of<T, B>(v);\n  const u16 h",
    ),
    Mutation(
        "off by one at the last thread",
        "pack",
        "pack.cu",
        "if (index >= units * strips) return;",
        "if (index > units * strips) return;",
    ),
    Mutation(
        "off by one at the last column",
        "gptq_matmul",
        "matmul.cuh",
        "if (row < m && column < out) y",
        "if (row < m && column <= out) y",
    ),
    Mutation(
        "off by one at the last run of a split",
        "exl2_matmul",
        "matmul.cuh",
        "held = mine ? max(0, min(each, left - part * each)) : 0;",
        "held = mine ? max(0, min(each, left - part * each - 1)) : 0;",
    ),
    Mutation(
        "missing barrier before activations of the next chunk arrive",
        "gptq_matmul",
        "matmul.cuh",
        "        });\n      }\n    __syncthreads();",
        "        });\n      }",
    ),
    Mutation(
        "counters left behind for the next launch",
        "gptq_matmul",
        "matmul.cuh",
        "  if (threadIdx.x == 0) arrived[tile] = 0;\n",
        "",
    ),
    Mutation(
        "scales of the group before",
        "gptq_matmul",
        "matmul.cuh",
        "        scales.enter(group);\n        if (q + 1",
        "        if (q == 0) scales.enter(group);\n        if (q + 1",
    ),
    Mutation(
        "missing barrier between scores and their softmax",
        "attend",
        "attend.cu",
        "  __syncthreads();\n\n  for (int h = warp;",
        "  for (int h = warp;",
    ),
    Mutation(
        "off by one at the first position of a window",
        "attend",
        "attend.cu",
        "begin = window ? max(0, length - window) : 0;",
        "begin = window ? max(0, length - window + 1) : 0;",
    ),
    Mutation(
        "wrong half of a byte at 4 bits",
        "kv_read",
        "pages.cuh",
        "low >> 16;",
        "low >> 12;",
    ),
    Mutation(
        "ninth bit of a key taken from its neighbour",
        "rope_append",
        "pages.cuh",
        "ninth |= code >> 8 << i;",
        "ninth |= code >> 8 << (i ^ 1);",
    ),
    Mutation(
        "off by one stage of the butterflies",
        "turn_heads",
        "butterfly.cuh",
        "for (int step = 4; step < block; step *= 2)",
        "for (int step = 4; step < block / 2; step *= 2)",
    ),
    Mutation(
        "heads and pages the wrong way round",
        "attend",
        "attend.cu",
        "per_page, kv_head, per_head, 0)",
        "per_head, kv_head, per_page, 0)",
    ),
    Mutation(
        "sign of the rotation",
        "rope_append",
        "rope_append.cu",
        "other = e < pairs ? -second : first;",
        "other = e < pairs ? second : first;",
    ),
    Mutation(
        "a later index wins between equals",
        "argmax",
        "argmax.cu",
        "? a.index < b.index",
        "? a.index > b.index",
    ),
)


def seen(mutation: Mutation, folder: Path, order: str, seed: int) -> str:
    """How the self-test notices, in words; empty where it does not."""
    launcher = ExecutorLauncher(order, seed, folder=folder)
    try:
        for case in CASES[mutation.kernel](CudaBackend(launcher), torch.device("cpu")):
            outcome = Outcome(mutation.kernel, *case)
            if not outcome.passed:
                return f"{outcome.case}: error {outcome.error:.2g}, bound {outcome.bound:.2g}"
    except KernelError as error:
        return str(error).split(" [")[0]
    except AssertionError as error:
        return str(error).splitlines()[0]
    return ""


def mutated(mutation: Mutation, folder: Path) -> Path:
    shutil.copytree(str(files("quantkit.kernels") / "cuda"), folder, dirs_exist_ok=True)
    text = (folder / mutation.file).read_text()
    assert text.count(mutation.old) == 1, f"`{mutation.mistake}` does not fit {mutation.file} any more"
    (folder / mutation.file).write_text(text.replace(mutation.old, mutation.new))
    return folder


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.mistake)
def test_mutations_fit_the_sources(mutation, tmp_path) -> None:
    mutated(mutation, tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.mistake)
def test_a_mistake_is_seen(mutation, tmp_path) -> None:
    folder = mutated(mutation, tmp_path)
    ways = (seen(mutation, folder, order, seed) for order, seed in SCHEDULES)
    found = next(((schedule, way) for schedule, way in zip(SCHEDULES, ways, strict=True) if way), None)
    assert found, f"{mutation.mistake}: no schedule shows it"
    print(f"| {mutation.mistake} | `{mutation.file}` | {' '.join(map(str, found[0]))} | {found[1]} |")
