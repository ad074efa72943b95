"""What `quantkit quantize --dry-run` says beside what the same command then takes: memory, disk, time.

    python docs/bench/predictions.py MODEL… [--options "--group-size 64 --samples 4"]

The job folder is watched while it grows. On a machine that others use too, compare seconds of processor.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 2**20
ASKED = {"peak_memory_bytes": 1.15, "result_bytes": 1.02, "job_bytes": 1.02, "seconds": 1.5, "cpu_seconds": 1.5}
"""The factor between what was said and what happened that is still good."""


def taken_by(folder: Path) -> int:
    """Of the disk, in bytes."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += 512 * path.stat().st_blocks if path.is_file() else 0  # a file with a hole takes less than its size
        except FileNotFoundError:  # it has gone in the meantime
            continue
    return total


def command(model: str, out: Path, options: list[str]) -> list[str]:
    return [sys.executable, "-m", "quantkit", "quantize", model, "-o", str(out), "--no-eval", "--json", *options]


def foretell(model: str, out: Path, options: list[str]) -> dict[str, float]:
    done = subprocess.run(
        command(model, out, [*options, "--dry-run"]), check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return json.loads(done.stdout)


def happen(model: str, out: Path, options: list[str]) -> dict[str, float]:
    job = out.with_name(f"{out.name}.job")
    largest = 0
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command(model, out, options), stdout=said, stderr=subprocess.DEVNULL) as process,
    ):
        while process.poll() is None:
            largest = max(largest, taken_by(job))
            time.sleep(0.02)
        said.seek(0)
        report = json.loads(said.read())
    return {**report, "result_bytes": taken_by(out), "job_bytes": largest}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--options", default="")
    chosen = parser.parse_args()
    options = shlex.split(chosen.options)
    print("| model | | said | happened | ratio | asked |\n| --- | --- | --- | --- | --- | --- |")
    for model in chosen.models:
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            out = Path(folder) / "out"
            said, taken = foretell(model, out, options), happen(model, out, options)
            for key, factor in ASKED.items():
                unit = MIB if key.endswith("bytes") else 1
                ratio = taken[key] / said[key]
                verdict = "" if 1 / factor <= ratio <= factor else ", missed"
                name, figure = key.removesuffix("_bytes").replace("_", " "), said[key] / unit
                row = f"{figure:.1f} | {taken[key] / unit:.1f} | {ratio:.2f} | {factor:g}{verdict}"
                print(f"| {Path(model).name} | {name} | {row} |", flush=True)
            shutil.rmtree(out, ignore_errors=True)


if __name__ == "__main__":
    main()
