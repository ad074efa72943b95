"""Runs a command of quantkit in children that are killed, and in one that is not: `python killed.py < request.json`.

One process imports everything once and forks a child for each run. A child is killed by SIGKILL, either by itself at
the n-th call that changes the disk (before the call, after it, or in the middle of a write), or by its parent after some
time. Or its disk is full from the n-th call on. What is asked and what is answered is JSON; see `main`.
"""

import errno
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

CALLS = ("pwrite", "fsync", "replace", "rename", "ftruncate")


def run(arguments: list[str], report: int, kill_at: int = -1, manner: str = "after") -> None:
    """In a child: never returns. Writes `c` for each call that changes the disk and `s` for each finished step."""
    from quantkit import cli
    from quantkit.job.job import Job

    calls = 0
    own = os.getpid()

    def die() -> None:
        os.kill(own, signal.SIGKILL)

    def wrapped(name: str, real: Any) -> Any:
        def call(*values: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            os.write(report, b"c")
            if calls == kill_at and manner == "before":
                die()
            if calls >= kill_at > 0 and manner == "full" and name == "pwrite":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if calls == kill_at and manner == "torn" and name == "pwrite":
                real(values[0], values[1][: len(values[1]) // 2], values[2])
                die()
            done = real(*values, **named)
            if calls == kill_at and manner != "full":
                die()
            return done

        return call

    for name in CALLS:
        setattr(os, name, wrapped(name, getattr(os, name)))
    commit = Job._commit

    def committed(self: Job, step: Any) -> None:
        commit(self, step)
        os.write(report, b"s")

    Job._commit = committed
    code = 1
    try:
        code = cli.run(arguments)
    finally:
        os._exit(code)


def start(arguments: list[str], **how: Any) -> tuple[int, int]:
    """A child and what it reports through."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        run(arguments, writing, **how)
    os.close(writing)
    return child, reading


def end(child: int, reading: int) -> tuple[int, bytes]:
    """Its exit code, negative for a signal, and its report."""
    report = b""
    while part := os.read(reading, 1 << 16):
        report += part
    os.close(reading)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), report


def contents(folder: Path) -> dict[str, str]:
    """Digest of each file below a folder, by its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


def prepare(folder: Path, begin_with: str | None) -> None:
    """Empty, or a copy of another folder; and where commands run."""
    shutil.rmtree(folder, ignore_errors=True)
    if begin_with is None:
        folder.mkdir(parents=True)
    else:
        shutil.copytree(begin_with, folder)
    os.chdir(folder)


def one(
    arguments: list[str], folder: Path, kills: list[dict[str, Any]], total: int, begin_with: str | None
) -> dict[str, Any]:
    """Killed as often as asked, then left alone. `redone` is how many steps were finished more than once; a step that was
    finished just before a kill, and not reported any more, takes one off."""
    prepare(folder, begin_with)
    done, killed = 0, 0
    codes: list[int] = []
    for kill in kills:
        if "seconds" in kill:
            child, reading = start(arguments)
            time.sleep(kill["seconds"])
            os.kill(child, signal.SIGKILL)
        else:
            child, reading = start(arguments, kill_at=kill["call"], manner=kill["manner"])
        code, report = end(child, reading)
        done += report.count(b"s")
        if code == 0:
            break
        codes.append(code)
        killed += 1
    code, report = end(*start(arguments))
    done += report.count(b"s")
    again, nothing = end(*start(arguments))
    return {
        "killed": killed,
        "codes": codes,
        "code": code,
        "redone": done - total,
        "contents": contents(folder),
        "again": again,
        "again_steps": nothing.count(b"s"),
    }


def main() -> None:
    """`{"arguments": […], "folder": "…", "kills": [[{"call": 5, "manner": "torn"}, {"seconds": 0.1}], …]}`; `kills` may be
    `{"every": n}`, at each n-th call in one of the manners (`{"every": n, "manners": ["full"]}`), or
    `{"random": n, "seed": s}`, at random times. `begin_with` is a folder of which each run gets a copy to work in.

    Answers `{"calls": …, "steps": …, "seconds": …, "contents": {…}, "runs": […]}`, the first four of an undisturbed run.
    """
    request = json.load(sys.stdin)
    for name in ("cli.app", "commands.quantization.rates", "commands.conversion.to_exl2", "commands.conversion.gguf_to_hf"):
        importlib.import_module(f"quantkit.{name}")
    arguments, folder, kills = request["arguments"], Path(request["folder"]), request["kills"]
    begin_with = request.get("begin_with")
    prepare(folder, begin_with)
    begun = time.monotonic()
    code, report = end(*start(arguments))
    seconds = time.monotonic() - begun
    assert code == 0, f"the undisturbed run ended with {code}"
    calls, steps, expected = report.count(b"c"), report.count(b"s"), contents(folder)
    if "every" in kills:
        manners = kills.get("manners", ("before", "torn", "after"))
        points = range(1, calls + 1, kills["every"])
        kills = [[{"call": call, "manner": manners[number % len(manners)]}] for number, call in enumerate(points)]
    elif "random" in kills:
        source = random.Random(kills["seed"])
        kills = [[{"seconds": source.uniform(0, seconds)}] for _ in range(kills["random"])]
    runs = [one(arguments, folder, each, steps, begin_with) for each in kills]
    shutil.rmtree(folder)
    for found in runs:
        found["same"] = found.pop("contents") == expected
    json.dump({"calls": calls, "steps": steps, "seconds": seconds, "contents": expected, "runs": runs}, sys.stdout)


if __name__ == "__main__":
    main()
