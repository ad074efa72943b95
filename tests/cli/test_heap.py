"""What freed blocks cost a process, seen from outside: with and without the call."""

import platform
import subprocess
import sys

import pytest

# Blocks of 8 MiB come and go between small ones that stay: with its defaults the C library keeps the gaps.
SCRIPT = """
import ctypes, sys
from quantkit.cli.heap import return_large_blocks
if "fixed" in sys.argv:
    return_large_blocks()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def large(count, size=8 << 20):
    made = []
    for _ in range(count):
        block = libc.malloc(size)
        ctypes.memset(block, 1, size)
        made += [block, libc.malloc(200_000)]
        ctypes.memset(made[-1], 1, 200_000)
    return made
warm = large(1, 30 << 20)
libc.free(warm[0])
for block in large(10)[::2]:
    libc.free(block)
resident = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
print(int(resident.split()[1]) // 1024)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the fault")
def test_freed_blocks_go_back_to_the_system() -> None:
    resident = {
        mode: int(subprocess.check_output([sys.executable, "-c", SCRIPT, mode])) for mode in ("default", "fixed")
    }
    assert resident["default"] - resident["fixed"] > 40  # MiB
