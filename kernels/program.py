"""Programs: operations that several threads run side by side in one call, without Python in between.

    program = Program()
    program.add(silu_mul(), (both, y, rows, width))
    program.run(threads=2)

An operation is a compiled C function `(thread, threads, arguments)`: it does the share of that thread, and finds what
it works on in a block of 64-bit numbers, mostly addresses (`views.array_at`). A decode step has hundreds of operations
of a few microseconds; threads that meet behind each of them in a barrier that spins cost one where waking a thread
costs forty. They are those of torch (`team.py`), else a pool of our own.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from quantkit.kernels.jit import compiled_as_c, pool
from quantkit.kernels.team import Team, address_of, torch_team
from quantkit.kernels.views import array_at

I64 = ir.IntType(64)
# Looks at a barrier before the processor is offered to others: about two microseconds.
SPINS = 500
COUNT, TURN, GIVEN_UP = 0, 8, 9
"""Places in a barrier, int64 [16], on two lines of the cache; all zero at first."""
TABLE, LENGTH, THREADS, THREAD, BARRIER, OTHERS, NUMBER, SIZE, REFUSED = range(9)
"""Places in a job, int64 [9]: where the operations are, and how many: [address, arguments, whether all threads wait
behind it]; threads, and which this is; the barrier; a C function that lets other threads run, or 0. In a team, the
functions that tell which this is and how many there are, else 0; set to 1 where there are other than so many."""

Operand = np.ndarray | Tensor | int | None


def operation(function: Callable[..., Any], **more: Any) -> Any:
    """Compile `function(thread, threads, arguments)`, three int64, as C; `.address` is where it is."""
    signature = types.void(types.int64, types.int64, types.int64)
    return compiled_as_c(signature, function, **{"_nrt": False, **more})  # nothing is allocated: nothing to count


@intrinsic
def call(typing, address, thread, threads, arguments):  # type: ignore[no-untyped-def]
    """Run the operation at `address`."""

    def emit(context, b, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.int64), emit


@intrinsic
def give_way(typing, address):  # type: ignore[no-untyped-def]
    """Call the C function at `address`, without arguments; 0 is none."""

    def emit(context, b, signature, args):  # type: ignore[no-untyped-def]
        with b.if_then(b.icmp_signed("!=", args[0], I64(0))):
            b.call(b.inttoptr(args[0], ir.FunctionType(ir.IntType(32), []).as_pointer()), [])
        return context.get_dummy_value()

    return types.none(types.int64), emit


@intrinsic
def ask(typing, address):  # type: ignore[no-untyped-def]
    """What the C function at `address` returns, an int, without arguments."""

    def emit(context, b, signature, args):  # type: ignore[no-untyped-def]
        found = b.call(b.inttoptr(args[0], ir.FunctionType(ir.IntType(32), []).as_pointer()), [])
        return b.sext(found, I64)

    return types.int64(types.int64), emit


@intrinsic
def add_atomically(typing, address, value):  # type: ignore[no-untyped-def]
    """int64 at `address` plus `value`, in one step for all threads; returns what was there."""

    def emit(context, b, signature, args):  # type: ignore[no-untyped-def]
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def look(typing, address):  # type: ignore[no-untyped-def]
    """int64 at `address` as other threads leave it, and all that they wrote before."""

    def emit(context, b, signature, args):  # type: ignore[no-untyped-def]
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), emit


@cache
def run() -> Any:
    """The C function that does the share of one thread of a job, whose address it is given."""

    def share(job):  # type: ignore[no-untyped-def]
        asked = array_at(job, 9, np.int64)
        threads, thread, barrier = asked[THREADS], asked[THREAD], asked[BARRIER]
        if asked[NUMBER]:
            if ask(asked[SIZE]) != threads:
                asked[REFUSED] = 1
                return
            thread = ask(asked[NUMBER])
        table = array_at(asked[TABLE], (asked[LENGTH], 3), np.int64)
        for index in range(asked[LENGTH]):
            call(table[index, 0], thread, threads, table[index, 1])
            if threads > 1 and table[index, 2]:
                turn = look(barrier + 8 * TURN)
                if add_atomically(barrier + 8 * COUNT, 1) == threads - 1:
                    add_atomically(barrier + 8 * COUNT, -threads)
                    add_atomically(barrier + 8 * TURN, 1)
                else:
                    spins = 0
                    while look(barrier + 8 * TURN) == turn:
                        if look(barrier + 8 * GIVEN_UP):
                            return
                        spins += 1
                        if spins > SPINS:
                            give_way(asked[OTHERS])

    return compiled_as_c(types.void(types.int64), share, _nrt=False)


class Program:
    """Operations in their order. Everything whose address they hold is kept alive here."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int]] = []
        self._kept: list[Any] = []
        self._table: np.ndarray | None = None
        self._barrier = np.zeros(16, np.int64)

    def add(self, compiled_operation: Any, operands: Sequence[Operand], *, waits: bool = True) -> None:
        """One more. Arrays and tensors are handed on by address, None as 0.

        waits  all threads have done their share before the next operation begins; else the next one touches, in each
               thread, only what no other thread has in hand
        """
        block = np.array([_number(operand) for operand in operands], np.int64)
        self._kept += [compiled_operation, block, *operands]
        self._rows.append((compiled_operation.address, block.ctypes.data, int(waits)))
        self._table = None

    def wait(self) -> None:
        """All threads have done their share of what was added last before the next operation begins."""
        address, block, _ = self._rows.pop()
        self._rows.append((address, block, 1))
        self._table = None

    def run(self, threads: int) -> None:
        """All of them, in so many threads: those of torch where they can be had, else a pool of our own."""
        if self._table is None:
            self._table = np.array(self._rows, np.int64).reshape(-1, 3)
        if threads == 1:
            self._share(0, 1, self._barrier)
            return
        with _turn(os.getpid()):
            team = torch_team(os.getpid())
            if team is None or not self._run_in(team, threads):
                self._run_in_pool(threads)

    def _run_in(self, team: Team, threads: int) -> bool:
        """False, and nothing is done, where the team has not so many threads."""
        job = self._job(0, threads, self._barrier)
        job[NUMBER], job[SIZE] = team.number, team.size
        team.parallel(run().address, job.ctypes.data, threads, 0)
        return not job[REFUSED]

    def _run_in_pool(self, threads: int) -> None:
        run()  # before anybody waits for anybody: a thread that fails to compile it would never come to the barrier
        workers = pool(os.getpid(), threads - 1)
        shares: list[Future[None]] = []
        try:
            for one in range(1, threads):
                shares.append(workers.submit(self._share, one, threads, self._barrier))
            self._share(0, threads, self._barrier)
            for share in shares:
                share.result()
        except BaseException:  # Ctrl-C, say: nobody may wait for a thread that never comes to the barrier
            self._give_up(shares)
            raise

    def _share(self, thread: int, threads: int, barrier: np.ndarray) -> None:
        try:
            job = self._job(thread, threads, barrier)
            ctypes.CFUNCTYPE(None, ctypes.c_int64)(run().address)(job.ctypes.data)
        except BaseException:
            barrier[GIVEN_UP] = 1
            raise

    def _job(self, thread: int, threads: int, barrier: np.ndarray) -> np.ndarray:
        assert self._table is not None
        job = np.zeros(9, np.int64)
        job[[TABLE, LENGTH, THREADS]] = self._table.ctypes.data, len(self._table), threads
        job[[THREAD, BARRIER, OTHERS]] = thread, barrier.ctypes.data, GIVE_WAY
        return job

    def _give_up(self, shares: Sequence["Future[None]"]) -> None:
        """Threads leave the barrier; the next run has another one, in case a thread comes to this one yet."""
        given_up, self._barrier = self._barrier, np.zeros(16, np.int64)
        given_up[GIVEN_UP] = 1
        self._kept.append(given_up)
        wait(shares)


@cache
def _turn(process: int) -> threading.Lock:
    """For one program at a time: two that share the workers could each wait for one that the other has. Keyed by
    process, as whoever holds a lock does not survive a fork."""
    return threading.Lock()


def _number(operand: Operand) -> int:
    if operand is None:
        return 0
    if isinstance(operand, Tensor):
        assert operand.is_contiguous()
        return operand.data_ptr()
    if isinstance(operand, np.ndarray):
        assert operand.flags.c_contiguous
        return operand.ctypes.data
    return operand


def _give_way() -> int:
    try:
        return address_of(ctypes.CDLL(None).sched_yield)
    except (AttributeError, OSError, TypeError):  # a system without it: threads spin on
        return 0


GIVE_WAY = _give_way()
