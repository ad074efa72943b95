"""What a compiled kernel costs, read from NVRTC's log and the disassembly: no GPU, no driver.

    python tests/cuda_facts.py > docs/results/cuda-kernels.md      the table of all kernels
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from quantkit.kernels import nvrtc
from quantkit.kernels.sources import Defines, Source, names, source

# Of one multiprocessor: threads, blocks, bytes of shared memory (with 1 KiB a block that the system keeps from sm_80 on).
LIMITS = {75: (1024, 16, 65536), 80: (2048, 32, 167936), 86: (1536, 16, 102400), 89: (1536, 24, 102400)} | {
    90: (2048, 32, 233472),
    120: (1536, 24, 102400),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one kernel in one cubin. `spilled_bytes` are of local memory, for whatever reason; `mix` counts machine instructions, and is empty where nvdisasm is not installed."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    mix: Counter[str]

    def occupancy(self, architecture: int, threads: int, dynamic_bytes: int = 0) -> float:
        """Share of a multiprocessor's threads that can be resident."""
        most_threads, most_blocks, memory = LIMITS[architecture]
        shared = self.shared_bytes + dynamic_bytes + (1024 if architecture >= 80 else 0)
        by_registers = 65536 // (-(-self.registers // 8) * 8 * threads)
        return min(most_threads // threads, most_blocks, by_registers, memory // max(shared, 1)) * threads / most_threads

    def count(self, instruction: str) -> int:
        """How often instructions with all parts of this name occur: `LDG.128` counts `LDG.E.NA.128.CONSTANT`."""
        parts = set(instruction.split("."))
        return sum(times for name, times in self.mix.items() if parts <= set(name.split(".")))


def facts(kernel: Source, defines: Defines, architecture: int) -> dict[str, Facts]:
    """By name of the kernel."""
    cubin = nvrtc.library().compile(kernel, defines, architecture)
    found = {}
    for part in re.split(r"Compiling entry function '", cubin.log)[1:]:
        name = part[: part.index("'")]
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        spilled = sum(map(int, re.findall(r"(\d+) bytes (?:spill|stack)", part)))
        shared = re.search(r"(\d+) bytes smem", part)
        found[name] = Facts(registers, spilled, int(shared[1]) if shared else 0, _mix(cubin.code, name))
    return found


def _mix(code: bytes, kernel: str) -> Counter[str]:
    tool = disassembler()
    if tool is None:
        return Counter()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    section = text.split(f"\n.text.{kernel}:\n", 1)[1].split("//----", 1)[0]
    return Counter(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", section, re.MULTILINE))


def disassembler() -> str | None:
    """`nvdisasm` of the wheel, or of the PATH."""
    wheels = (tool for folder in map(Path, sys.path) for tool in folder.glob("nvidia/*/bin/nvdisasm"))
    return next(map(str, wheels), shutil.which("nvdisasm"))


def _rows() -> list[str]:
    """One line for each kernel, its costliest variants in mind: the first and the last that it lists."""
    lines = []
    for name in names():
        kernel = source(name)
        cells = []
        for architecture in (80, 89, 90):
            found = [
                fact
                for variant in (kernel.variants[0], kernel.variants[-1])
                if architecture >= kernel.least_architecture(variant)
                for fact in facts(kernel, variant, architecture).values()
            ]
            registers, shared = (max(getattr(fact, what) for fact in found) for what in ("registers", "shared_bytes"))
            spilled = sum(fact.spilled_bytes for fact in found)
            occupancy = min(fact.occupancy(architecture, kernel.threads) for fact in found)
            mix = f"{min(fact.count('LDG.128') for fact in found)} / {min(fact.count('HMMA') for fact in found)}"
            cells.append(f"{registers} / {spilled} / {shared} / {occupancy:.0%} / {mix}")
        told = f"{len(kernel.variants)} | `{kernel.reference}` | `test_the_self_test[{name}]` | {kernel.traffic}"
        lines.append(f"| `{name}` | {told} | {' | '.join(cells)} |")
    return lines


HEAD = """# The CUDA kernels, without a GPU

    python tests/cuda_facts.py > docs/results/cuda-kernels.md

What NVRTC {version} makes of each kernel: registers / bytes of local memory / bytes of shared memory / share of a multiprocessor's threads that can
be resident / loads of 16 bytes / tensor-core instructions. Registers, memory and occupancy are those of the costlier, the instructions those of the
leaner of two variants, the first and the last that the source lists. Every variant, on sm_75 to sm_120, is held to the budget of its source by
`make proof`. Every kernel runs on the CPU against its reference, in the test of `tests/kernels/cuda/test_every_kernel.py` that the table names, and under
every order of threads in `make proof`; a source without such a sweep fails `test_every_kernel_has_cases`. Nothing here is a speed: that needs a card
(`make gpu-check`).

| kernel | variants | reference | sweep on the CPU | floor | sm_80 | sm_89 | sm_90 |
| --- | --- | --- | --- | --- | --- | --- | --- |"""

if __name__ == "__main__":
    print(HEAD.format(version=".".join(map(str, nvrtc.library().version))))
    print("\n".join(_rows()))
