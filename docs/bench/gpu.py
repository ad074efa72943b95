"""Self-test and speed of the CUDA kernels on this machine's card: `make gpu-check`; `make bench-gpu` is speed alone.

Needs torch, CuPy, NVRTC and this source tree, installed or not; no network and no other package. Writes
docs/results/gpu-CARD.md, and nothing when there is no card or a kernel is wrong. Every speed stands beside a copy or a
library product measured in the same run, since only ratios carry over to another machine. The self-test is what
`tests/kernels/cuda/test_every_kernel.py` runs without a card, the steps are those of `tests/runtime/test_decoding.py`.
"""

import argparse
import importlib.util
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def use_source_tree() -> None:
    """Make `quantkit` and its packages outside its folder importable where it is not installed, and what lies here."""
    sys.path.insert(0, str(Path(__file__).parent))
    if importlib.util.find_spec("quantkit") is not None:
        return
    sys.path.insert(1, str(ROOT))
    for name in ("kernels", "calibration"):
        folder = ROOT / name
        spec = importlib.util.spec_from_file_location(
            f"quantkit.{name}", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"quantkit.{name}"] = module
        spec.loader.exec_module(module)


use_source_tree()

from gpu_decode import check_rows, decode_rows  # noqa: E402

from quantkit.calibration.hessian import Hessian  # noqa: E402
from quantkit.commands.kernel_check import KernelReport  # noqa: E402
from quantkit.errors import BackendError  # noqa: E402
from quantkit.formats.gptq import GptqCodec  # noqa: E402
from quantkit.kernels.cuda import CudaBackend  # noqa: E402
from quantkit.kernels.graphs import CudaGraphs  # noqa: E402
from quantkit.kernels.probe import cuda_backend  # noqa: E402
from quantkit.kernels.self_test import self_test  # noqa: E402
from quantkit.kernels.tiles import RUN, STRIP, Exl2Tiles, GptqTiles  # noqa: E402
from quantkit.solver.gptq import solve_together  # noqa: E402
from quantkit.solver.inverse import factor  # noqa: E402

# Linears of one block of an 8B model, [in, out]; those on one line read the same input.
BLOCK = (((4096, 4096), (4096, 1024), (4096, 1024)), ((4096, 4096),), ((4096, 14336), (4096, 14336)), ((14336, 4096),))
BLOCKS = 32
WRONG = 3
"""The exit code where a result is wrong."""
HEAD = (4096, 128256)
# Weights are rotated over more bytes than any card's L2 cache, so that each product reads memory.
ROTATED_BYTES = 512 << 20
PREFILL = (128, 512, 2048)
SANITIZER_SECONDS = 75
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")


@dataclass(frozen=True)
class Machine:
    """Where to measure. `seconds(launches)` is the time of one call of `launches`, the median of several."""

    backend: CudaBackend
    device: torch.device
    seconds: Callable[[Callable[[], object]], float]


def seconds_of_graph(graphs: CudaGraphs, launches: Callable[[], object]) -> float:
    """Captured once as a CUDA graph and replayed between two events."""
    replay = graphs.record(launches)
    times = []
    for _ in range(25):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[5:])


def gptq(rows: int, out: int, bits: int, device: torch.device, group_size: int = 128) -> GptqTiles:
    """Random tiles, made on the device: only their size matters here."""
    strips, runs, groups = -(-out // STRIP), rows // RUN, rows // group_size
    scales = torch.rand(strips, groups, 8, 8, device=device).to(torch.float16) * 0.01
    return GptqTiles(
        words=_words(strips, runs * STRIP * bits, device),
        scales=scales,
        zeros=torch.full((strips, groups, 8, 8), 1 << bits - 1, dtype=torch.uint8, device=device),
        run_group=torch.arange(runs, dtype=torch.int32, device=device) // (group_size // RUN),
        group_shift=(group_size // RUN).bit_length() - 1,
        order=None,
        bits=bits,
        in_features=rows,
        out_features=out,
        scale_dtype=torch.float16,
    )


def exl2(rows: int, out: int, device: torch.device, group_size: int = 128) -> Exl2Tiles:
    """4.0 bits for each weight: a quarter of the rows in 5 bits, half in 4, a quarter in 3; rows in random order."""
    widths = [(5, rows // 4), (4, rows - 2 * (rows // 4)), (3, rows // 4)]
    groups = tuple((bits, group_size) for bits, count in widths for _ in range(count // group_size))
    table, first = [], 0
    for group, (bits, count) in enumerate(groups):
        for _ in range(count // RUN):
            table.append((first, bits, group, 0))
            first += STRIP * bits
    strips = -(-out // STRIP)
    return Exl2Tiles(
        words=_words(strips, first, device),
        scale_codes=_words(strips, len(groups) * 8, device).view(strips, len(groups), 8),
        scale_max=torch.full((len(groups),), 0.1, dtype=torch.float16, device=device),
        runs=torch.tensor(table, dtype=torch.int32, device=device),
        order=torch.randperm(rows, device=device).to(torch.int32),
        groups=groups,
        in_features=rows,
        out_features=out,
    )


def _words(strips: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (strips, count), device=device).to(torch.int32)


def multiply(backend: CudaBackend, x: torch.Tensor, tiles: GptqTiles | Exl2Tiles) -> torch.Tensor:
    return backend.gptq_matmul(x, tiles) if isinstance(tiles, GptqTiles) else backend.exl2_matmul(x, tiles)


def multiply_all(backend: CudaBackend, x: torch.Tensor, weights: Sequence[GptqTiles | Exl2Tiles]) -> None:
    for weight in weights:
        multiply(backend, x, weight)


def copied_bytes_per_second(machine: Machine, count: int = ROTATED_BYTES) -> float:
    """Read and written, by torch's copy."""
    source = torch.empty(count, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * count / machine.seconds(lambda: target.copy_(source))


def product_rows(machine: Machine, shapes: Sequence[tuple[int, int]], rotated: int = ROTATED_BYTES) -> list[list[str]]:
    """Each product of few rows: microseconds, how many times those of one row, and the bytes it must read as a share of
    the copy's rate."""
    copied = copied_bytes_per_second(machine, rotated)
    lines = []
    for rows, out in shapes:
        kinds = {f"GPTQ {bits} bits": partial(gptq, rows, out, bits, machine.device) for bits in (4, 3, 8)}
        kinds["EXL2 4.0 bits"] = partial(exl2, rows, out, machine.device)
        for kind, make in kinds.items():
            first = make()
            weights = [first, *(make() for _ in range(min(63, rotated // first.size_bytes)))]
            alone = 0.0
            for m in (1, 8, 16, 32, 64):
                x = torch.randn(m, rows, device=machine.device, dtype=torch.float16)
                one_each = partial(multiply_all, machine.backend, x, weights)
                each = machine.seconds(one_each) / len(weights)
                alone = alone or each
                moved = first.size_bytes + 2 * m * (rows + out)
                told = [f"{each * 1e6:.1f}", f"{each / alone:.2f}", f"{moved / each / copied:.0%}"]
                lines.append([f"{rows} x {out}", kind, str(m), *told])
    return lines


def prefill_rows(machine: Machine, shapes: Sequence[tuple[int, int]], tokens: Sequence[int]) -> list[list[str]]:
    """Each product of many rows: milliseconds, and the library's product of the same shape as a share of it."""
    lines = []
    for rows, out in shapes:
        tiles = gptq(rows, out, 4, machine.device)
        dense = torch.randn(rows, out, device=machine.device, dtype=torch.float16)
        for m in tokens:
            x = torch.randn(m, rows, device=machine.device, dtype=torch.float16)
            own = machine.seconds(partial(multiply, machine.backend, x, tiles))
            library = machine.seconds(partial(torch.matmul, x, dense))
            lines.append([f"{rows} x {out}", str(m), f"{own * 1e3:.2f}", f"{library / own:.0%}"])
    return lines


def decode_row(machine: Machine, blocks: int = BLOCKS, head: tuple[int, int] = HEAD) -> list[str]:
    """All linears of an 8B model at 4.0 bits for one token: tokens/s, and the same as a share of the copy's rate."""
    shapes = [shape for _ in range(blocks) for stage in BLOCK for shape in stage] + [head]
    weights = [exl2(rows, out, machine.device) for rows, out in shapes]
    inputs = {rows: torch.randn(1, rows, device=machine.device, dtype=torch.float16) for rows, _ in shapes}
    copied = copied_bytes_per_second(machine)
    seconds = machine.seconds(lambda: [machine.backend.exl2_matmul(inputs[w.in_features], w) for w in weights])
    size = sum(weight.size_bytes for weight in weights)
    return [f"{len(weights)} linears", f"{size / 1e9:.2f} GB", f"{1 / seconds:.1f}", f"{size / seconds / copied:.0%}"]


def quantize_row(machine: Machine, stages: Sequence[Sequence[tuple[int, int]]] = BLOCK) -> list[str]:
    """One block to 4 bits, Hessians of 128 rows of 2048 tokens included: seconds, and times 32 as an extrapolation."""
    start = time.perf_counter()
    for stage in stages:
        features = stage[0][0]
        hessian = Hessian(features, device=machine.device)
        for _ in range(128):
            hessian.add(torch.randn(2048, features, device=machine.device, dtype=torch.float16))
        weights = [torch.randn(rows, out, device=machine.device) for rows, out in stage]
        solve_together(weights, factor(hessian.finish()), GptqCodec(bits=4, group_size=128))
    if machine.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return [f"{seconds:.1f} s", f"{seconds * BLOCKS / 60:.1f} min"]


def repeats_are_equal(machine: Machine, times: int = 100) -> bool:
    """The same bits each time, with another stream keeping the card busy."""
    tiles = gptq(4096, 1024, 4, machine.device)
    x = torch.randn(5, 4096, device=machine.device, dtype=torch.float16)
    noise, other = torch.randn(2048, 2048, device=machine.device), torch.cuda.Stream()
    first = multiply(machine.backend, x, tiles)
    for _ in range(times):
        with torch.cuda.stream(other):
            noise = torch.tanh(noise @ noise)
        if not torch.equal(multiply(machine.backend, x, tiles), first):
            return False
    return True


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def check(backend: CudaBackend, device: torch.device) -> tuple[str, bool]:
    report = KernelReport("", tuple(self_test(backend, device)))
    return table(["kernel", "cases", "largest error", "result"], report.rows()), report.healthy


def sanitize(tool: str) -> list[str]:
    """The self-test under each checker of compute-sanitizer, as far as it comes in its time."""
    script = [sys.executable, str(Path(__file__).resolve()), "--self-test-only"]
    rows = []
    for checker in SANITIZERS:
        command = [tool, "--tool", checker, "--error-exitcode", "1", *script]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SANITIZER_SECONDS)
        except subprocess.TimeoutExpired:
            rows.append(f"- {checker}: not done after {SANITIZER_SECONDS} seconds")
            continue
        last = done.stdout.strip().splitlines()[-1:] or ["no output"]
        rows.append(f"- {checker}: {'no errors' if done.returncode == 0 else last[0]}")
    return rows


def check_steps(machine: Machine) -> tuple[str, bool]:
    """Steps in captured graphs against the plain forward."""
    found = list(check_rows(CudaGraphs(machine.device), machine.device))
    lines = [line for line, _ in found]
    head = ["weights", "cache", "texts", "way", "largest difference of a logit", "result"]
    return table(head, lines), all(right for _, right in found)


def speed(machine: Machine) -> str:
    """All measurements, in words."""
    large = [(4096, 4096), (4096, 14336), (14336, 4096), HEAD]
    copied = copied_bytes_per_second(machine)
    decoded = list(decode_rows(machine.seconds, copied, machine.device))
    products = ["weight", "kind", "rows of x", "µs", "of one row's time", "of the copy's rate"]
    decode = ["random 8B model", "cache", "texts", "positions of each", "tokens/s", "limit", "of the limit"]
    return "\n".join(
        (
            f"A copy reads and writes {copied / 1e9:.0f} GB/s. The limit of a decode step is the time in which it\n"
            "moves the bytes of all linears and of keys and values.\n",
            table(products, product_rows(machine, large)),
            table(["weight", "rows of x", "ms", "library product of it"], prefill_rows(machine, large[:3], PREFILL)),
            table(["decode, linears only", "weights", "tokens/s", "of the copy's rate"], [decode_row(machine)]),
            table(decode, decoded),
            table(["one 8B block to 4 bits", "32 blocks, extrapolated"], [quantize_row(machine)]),
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--self-test-only", action="store_true", help="no benchmark, no file")
    only.add_argument("--benchmark-only", action="store_true", help="no self-test, no checkers, no file")
    options = parser.parse_args()
    say = sys.stdout.write
    try:
        backend = cuda_backend("asked for by name")
    except BackendError as error:
        say(f"error: {error.message}\nhint: {error.hint}\n")
        return error.exit_code
    device = backend.device()
    machine = Machine(backend, device, partial(seconds_of_graph, CudaGraphs(device)))
    if options.benchmark_only:
        say(speed(machine))
        return 0
    results, right = check(backend, device)
    say(results)
    if options.self_test_only or not right:
        return 0 if right else WRONG
    steps, right = check_steps(machine)
    say(steps)
    if not right:
        return WRONG
    card = torch.cuda.get_device_name(device)
    tool = shutil.which("compute-sanitizer")
    parts = [
        f"# CUDA kernels on one {card}\n",
        f"    make gpu-check\n\ntorch {torch.__version__}, Python {platform.python_version()}, {platform.system()}.\n",
        f"## Self-test\n\n{results}",
        f"The same bits in 100 runs beside other work: {'yes' if repeats_are_equal(machine) else 'NO'}.\n",
        "\n".join(sanitize(tool)) + "\n" if tool else "compute-sanitizer is not installed.\n",
        f"## Decode steps of a small random model beside its plain forward\n\n{steps}",
        f"## Speed\n\n{speed(machine)}",
    ]
    text = "\n".join(parts)
    say(text)
    name = "".join(letter if letter.isalnum() else "-" for letter in card.lower())
    (ROOT / "docs" / "results" / f"gpu-{name}.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
