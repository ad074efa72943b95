"""What freed blocks cost a process, seen from outside: before and after they are given back."""

import platform
import subprocess
import sys

import pytest

# Blocks of 8 MiB come and go between small ones that stay: the C library keeps the gaps.
SCRIPT = """
import ctypes
from quantkit import heap
heap.settle()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) // 1024
def large(count, size=8 << 20):
    made = []
    for _ in range(count):
        block = libc.malloc(size)
        ctypes.memset(block, 1, size)
        made += [block, libc.malloc(200_000)]
        ctypes.memset(made[-1], 1, 200_000)
    return made
first = large(10)
for block in first[::2]:
    libc.free(block)
kept = resident()
again = large(10)
used_again = resident() - kept
for block in again[::2]:
    libc.free(block)
heap.give_back()
print(used_again, kept - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this heap")
def test_blocks_are_used_again_and_gaps_given_back() -> None:
    grown, given_back = map(int, subprocess.check_output([sys.executable, "-c", SCRIPT]).split())
    assert grown < 10  # MiB, of 82
    assert given_back > 60  # MiB
