"""Programs: every thread does its share, none begins what others have not finished, and nothing is freed too soon."""

import gc
import os
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from quantkit.kernels import program as programs
from quantkit.kernels.program import Program, operation
from quantkit.kernels.views import array_at


@pytest.fixture(params=["team", "pool"], autouse=True)
def threads_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's threads, and our own, as on systems where torch's cannot be had."""
    if request.param == "pool":
        monkeypatch.setattr(programs, "torch_team", lambda process: None)


@operation
def shift(thread, threads, arguments):  # type: ignore[no-untyped-def]
    """y[i] = x[i + 1] + 1, cyclically: it needs what other threads wrote in the operation before."""
    a = array_at(arguments, 3, np.int64)
    n = a[2]
    x, y = array_at(a[0], n, np.int64), array_at(a[1], n, np.int64)
    for i in range(n * thread // threads, n * (thread + 1) // threads):
        y[i] = x[(i + 1) % n] + 1


@operation
def set_own(thread, threads, arguments):  # type: ignore[no-untyped-def]
    """x[i] = 1 for the places of this thread."""
    a = array_at(arguments, 2, np.int64)
    x = array_at(a[0], a[1], np.int64)
    for i in range(thread, a[1], threads):
        x[i] += 1


def require_every_share_once() -> None:
    """In three threads."""
    x = np.zeros(10, np.int64)
    program = Program()
    program.add(set_own, (x, 10))
    program.run(3)
    assert np.array_equal(x, np.ones(10))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_an_operation_sees_all_of_the_one_before(threads: int) -> None:
    n, steps = 97, 200
    x, y = np.arange(n), np.zeros(n, np.int64)
    program = Program()
    for step in range(steps):
        program.add(shift, (x, y, n) if step % 2 == 0 else (y, x, n))
    program.run(threads)
    assert np.array_equal(x, (np.arange(n) + steps) % n + steps)
    program.run(threads)
    assert np.array_equal(x, (np.arange(n) + 2 * steps) % n + 2 * steps)


@pytest.mark.parametrize("threads", [1, 3])
def test_operations_that_nobody_waits_for(threads: int) -> None:
    x = np.zeros(10, np.int64)
    program = Program()
    for _ in range(5):
        program.add(set_own, (x, 10), waits=False)
    program.wait()
    program.run(threads)
    assert np.array_equal(x, np.full(10, 5))


def test_arrays_live_as_long_as_the_program() -> None:
    program = Program()
    program.add(shift, (np.arange(50_000), torch.zeros(50_000, dtype=torch.int64), 50_000))
    gc.collect()
    junk = [np.full(50_000, -1) for _ in range(8)]
    program.run(2)
    del junk
    assert isinstance(program._kept[3], torch.Tensor)
    assert int(program._kept[3][0]) == 2


def test_an_array_with_gaps_is_refused() -> None:
    with pytest.raises(AssertionError):
        Program().add(shift, (np.zeros((4, 4), np.int64)[:, 1], np.zeros(4, np.int64), 4))


def test_an_empty_program() -> None:
    Program().run(2)


def test_programs_of_several_callers_at_once() -> None:
    """Not one that has a worker and waits for a second, which another has."""

    def make() -> tuple[Program, np.ndarray]:
        x, y = np.arange(31), np.zeros(31, np.int64)
        program = Program()
        for step in range(100):
            program.add(shift, (x, y, 31) if step % 2 == 0 else (y, x, 31))
        return program, x

    made = [make() for _ in range(4)]
    callers = [threading.Thread(target=program.run, args=(3,), daemon=True) for program, _ in made]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert all(np.array_equal(x, (np.arange(31) + 100) % 31 + 100) for _, x in made)


def test_a_system_without_a_way_to_yield(monkeypatch) -> None:
    monkeypatch.setattr(programs, "GIVE_WAY", 0)
    require_every_share_once()


@pytest.mark.parametrize("threads_of", ["team"], indirect=True)
def test_torch_has_a_team_and_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if programs.torch_team(os.getpid()) is None:
        pytest.skip("no OpenMP runtime of torch is to be found on this system")
    monkeypatch.setattr(programs, "pool", None)
    require_every_share_once()


@pytest.mark.parametrize("threads_of", ["team"], indirect=True)
def test_a_team_of_another_size_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where OMP_THREAD_LIMIT allows fewer: half of the work would never be done."""
    team = programs.torch_team(os.getpid())
    if team is None:
        pytest.skip("no OpenMP runtime of torch is to be found on this system")
    other = replace(team, size=team.number)  # threads 0, 1 and 2 say that there are 0, 1 and 2
    monkeypatch.setattr(programs, "torch_team", lambda process: other)
    require_every_share_once()


@pytest.mark.parametrize("threads_of", ["team"], indirect=True)
def test_a_fork_computes_in_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


FORKING = """
import os
import torch
import numpy as np
from quantkit.kernels import operations
from quantkit.kernels.program import Program

both, fed = torch.ones(4, 64), torch.zeros(4, 32)
program = Program()
program.add(operations.silu_mul(), (both, fed, 4, 32))
program.run(2)
expected = fed.clone()
child = os.fork()
if not child:
    fed.zero_()
    program.run(2)
    os._exit(0 if np.array_equal(fed.numpy(), expected.numpy()) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("threads_of", ["pool"], indirect=True)
@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_thread_that_never_comes_leaves_nobody_waiting(stopped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the main thread at any moment: before the others were asked, among them, before its own share. (No
    Python runs in a team, where it is noticed afterwards.)"""
    n = 97
    x, y = np.arange(n), np.zeros(n, np.int64)
    program = Program()
    program.add(shift, (x, y, n))
    program.add(shift, (y, x, n))
    make = Program._job

    def interrupted(self, thread, threads, barrier):  # type: ignore[no-untyped-def]
        if threads > 1 and thread == stopped:
            raise KeyboardInterrupt
        return make(self, thread, threads, barrier)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "_job", interrupted)
        with pytest.raises(KeyboardInterrupt):
            program.run(3)
    x[:], y[:] = np.arange(n), 0
    program.run(3)
    assert x.tolist() == [(i + 2) % n + 2 for i in range(n)]
