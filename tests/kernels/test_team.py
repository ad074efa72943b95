"""The team of threads: as many as torch says, whatever the environment allows OpenMP."""

import os
import subprocess
import sys

import pytest

PRODUCTS = """
import torch
from quantkit import kernels

torch.set_num_threads(2)
kernels.backend("cpu")
x, w = (torch.ones(*shape, dtype=torch.bfloat16) for shape in ((400, 576), (576, 1536)))
for _ in range(8):
    junk = torch.full((400, 1536), 7.0, dtype=torch.bfloat16)
    del junk  # what a product that is never computed finds in its memory
    assert bool((x @ w == 576).all())
print(torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("setting", "threads"),
    [
        ("OMP_THREAD_LIMIT=1", "1"),
        ("OMP_MAX_ACTIVE_LEVELS=0", "1"),
        ("OMP_DYNAMIC=true", "2"),
        ("OMP_THREAD_LIMIT=8", "2"),
    ],
)
def test_products_are_whole_where_openmp_may_have_fewer_threads(setting: str, threads: str) -> None:
    name, value = setting.split("=")
    asked = {**os.environ, name: value}
    done = subprocess.run([sys.executable, "-c", PRODUCTS], env=asked, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{threads}\n"), done.stderr
