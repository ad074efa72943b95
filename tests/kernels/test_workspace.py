"""Memory that is made once: the same at each run, and none made while launches are recorded."""

import pytest
import torch
from cuda_on_cpu.launcher import ExecutorLauncher

from quantkit.errors import BackendError
from quantkit.kernels.workspace import Workspace

CPU = torch.device("cpu")


@pytest.fixture
def workspace() -> Workspace:
    return Workspace(ExecutorLauncher())


def test_a_second_run_gets_the_memory_of_the_first(workspace) -> None:
    runs = []
    for _ in range(2):
        workspace.enter("a")
        runs.append([workspace.empty((3, 4), torch.float16, CPU), workspace.empty((5,), torch.float32, CPU)])
    for first, second in zip(*runs, strict=True):
        assert first.data_ptr() == second.data_ptr() and first.shape == second.shape and first.dtype == second.dtype
    assert workspace.size_bytes == 3 * 4 * 2 + 5 * 4


def test_nothing_lies_in_the_memory_of_something_else(workspace) -> None:
    made = []
    for scope in ("a", "b"):
        workspace.enter(scope)
        made += [workspace.empty((8,), torch.float32, CPU).fill_(len(made) + i) for i in range(3)]
    assert [float(one[0]) for one in made] == [0, 1, 2, 3, 4, 5]


def test_what_is_outgrown_stays_where_it_is(workspace) -> None:
    """A graph may still point at it."""
    workspace.enter("a")
    small = workspace.empty((4,), torch.float32, CPU).fill_(7)
    workspace.enter("a")
    large = workspace.empty((400,), torch.float32, CPU).fill_(9)
    assert large.data_ptr() != small.data_ptr() and small.tolist() == [7] * 4
    assert workspace.size_bytes == 404 * 4
    workspace.enter("a")
    assert workspace.empty((4,), torch.float32, CPU).data_ptr() == large.data_ptr()


def test_sealed_it_gives_out_only_what_was_made(workspace) -> None:
    workspace.enter("a")
    workspace.empty((4,), torch.float32, CPU)
    with workspace.sealed():
        workspace.enter("a")
        workspace.empty((2,), torch.float32, CPU)
        with pytest.raises(BackendError, match="128 bytes are asked for in `a`"):
            workspace.empty((32,), torch.float32, CPU)
    workspace.empty((32,), torch.float32, CPU)
