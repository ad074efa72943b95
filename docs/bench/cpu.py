"""Decode and prefill on this CPU beside llama.cpp and transformers, in one run: `make bench-cpu`.

    python docs/bench/cpu.py --llama PYTHON NAME=PATH NAME=PATH … [--threads 1 2] [--rounds 3] [--dense NAME=PATH …]

PATH is a folder that quantkit reads or a `.gguf` that llama.cpp reads, by the Python that `--llama` names; `--dense`
folders are run by transformers in bfloat16. Every contestant is a process of its own, all of them once in every round
(A B C, A B C, …), and the median of the rounds is shown. Tokens per second on the wall; in brackets the share of this
machine's read bandwidth that the weights read for a decoded token take, measured in the same run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROMPT, NEW = 512, 64
SHORT = 16
"""Positions before the first decoded token, the same for everybody."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One runtime with one model; `python` runs it."""

    runtime: str
    name: str
    path: Path
    python: str


def ids(count: int) -> list[int]:
    """Token ids that every vocabulary here has."""
    return [(7 * index) % 1000 + 5 for index in range(count)]


def run_quantkit(path: Path) -> dict[str, float]:
    import quantkit
    from quantkit import heap
    from quantkit.runtime.generator import Generator
    from quantkit.runtime.request import Request
    from quantkit.runtime.tokenizer import Tokenizer

    heap.settle()  # as the command line does
    generator = Generator(quantkit.load(path, dtype="bf16"), Tokenizer.open(path))
    generator.warm_up(Request(ids(PROMPT), 1))

    def seconds(length: int, new: int) -> list[float]:
        """Moments at which the request began and each token came."""
        moments = [time.perf_counter()]
        moments += [time.perf_counter() for _ in generator.stream(Request(ids(length), new))]
        return moments

    begun, first = seconds(PROMPT, 1)
    decoded = seconds(SHORT, NEW + 1)
    return {"prefill": PROMPT / (first - begun), "decode": NEW / (decoded[-1] - decoded[1])}


def run_transformers(path: Path) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        model(torch.tensor([ids(32)]), logits_to_keep=1)
        start = time.perf_counter()
        model(torch.tensor([ids(PROMPT)]), use_cache=True, logits_to_keep=1)
        prefill = PROMPT / (time.perf_counter() - start)
        said = model(torch.tensor([ids(SHORT)]), use_cache=True, logits_to_keep=1)
        start = time.perf_counter()
        for _ in range(NEW):
            token = said.logits[:, -1:].argmax(-1)
            said = model(token, past_key_values=said.past_key_values, use_cache=True)
        decode = NEW / (time.perf_counter() - start)
    return {"prefill": prefill, "decode": decode}


def run_llama(path: Path) -> dict[str, float]:
    import llama_cpp

    threads = int(os.environ["OMP_NUM_THREADS"])
    model = llama_cpp.Llama(
        str(path), n_ctx=PROMPT + NEW, n_batch=PROMPT, n_ubatch=PROMPT, verbose=False,
        n_threads=threads, n_threads_batch=threads,
    )  # fmt: skip
    model.eval(ids(32))
    model.reset()
    start = time.perf_counter()
    model.eval(ids(PROMPT))
    prefill = PROMPT / (time.perf_counter() - start)
    model.reset()
    model.eval(ids(SHORT))
    start = time.perf_counter()
    for token in ids(NEW):
        model.eval([token])
    return {"prefill": prefill, "decode": NEW / (time.perf_counter() - start)}


RUNTIMES = {"quantkit": run_quantkit, "transformers": run_transformers, "llama.cpp": run_llama}


def bytes_per_token(path: Path) -> int:
    """Bytes of the weights that a decoded token reads: everything but an embedding that is no head as well."""
    if path.suffix == ".gguf":
        from gguf import GGUFReader

        sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(path).tensors}
        return sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)
    from safetensors import safe_open

    sizes = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            sizes |= {name: opened.get_tensor(name).nbytes for name in opened.keys()}  # noqa: SIM118
    headed = any(name.startswith("lm_head.") for name in sizes)
    return sum(sizes.values()) - (sizes["model.embed_tokens.weight"] if headed else 0)


def bandwidth(threads: int) -> float:
    """Bytes a second that sums over a quarter of a gigabyte read, the best of ten."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(64 << 20)
    best = 0.0
    for _ in range(10):
        start = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - start))
    return best


def measure(one: Contestant, threads: int) -> dict[str, float]:
    """What a process of the contestant's own tells. Raises RuntimeError with its last words where it fails."""
    count = str(threads)
    environment = {**os.environ, "OMP_NUM_THREADS": count, "NUMBA_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    command = [one.python, __file__, "--one", one.runtime, str(one.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{one.runtime} on {one.path}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(contestants: Sequence[Contestant], threads: Sequence[int], rounds: int) -> None:
    say = sys.stdout.write
    say("| model | runtime | threads | prefill of 512, t/s | decode, t/s | share of bandwidth |\n")
    say("| --- | --- | --- | --- | --- | --- |\n")
    for count in threads:
        found: dict[Contestant, list[dict[str, float]]] = {one: [] for one in contestants}
        reads = []
        for _ in range(rounds):
            reads.append(bandwidth(count))
            for one in contestants:
                found[one].append(measure(one, count))
        read = statistics.median(reads)
        for one, runs in found.items():
            prefill, decode = (statistics.median(run[key] for run in runs) for key in ("prefill", "decode"))
            share = decode * bytes_per_token(one.path) / read
            say(f"| {one.name} | {one.runtime} | {count} | {prefill:.0f} | {decode:.1f} | {share:.2f} |\n")
        say(f"| | reading, {read / 1e9:.1f} GB/s | {count} | | | |\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="NAME=PATH")
    parser.add_argument("--dense", nargs="*", default=[], help="NAME=PATH for transformers")
    parser.add_argument("--llama", default=sys.executable)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("RUNTIME", "PATH"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        runtime, path = given.one
        sys.stdout.write(json.dumps(RUNTIMES[runtime](Path(path))) + "\n")
        return
    contestants = []
    for text in given.models:
        name, path = text.split("=", 1)
        runtime, python = ("llama.cpp", given.llama) if path.endswith(".gguf") else ("quantkit", sys.executable)
        contestants.append(Contestant(runtime, name, Path(path), python))
    for text in given.dense:
        name, path = text.split("=", 1)
        contestants.append(Contestant("transformers", name, Path(path), sys.executable))
    compare(contestants, given.threads, given.rounds)


if __name__ == "__main__":
    main()
