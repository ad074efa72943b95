"""Captured launches without a GPU: a tape of every operation, with the memory that each had, which is played again.

What stands on the tape is what a CUDA graph would hold: kernels with their addresses and numbers, torch's operations
with the tensors that they had. Python does not run when it is played. So a number that the host worked out is that of
the recording, and what is read is what lies in the same memory by then.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from cuda_on_cpu.launcher import ExecutorLauncher

Launches = Callable[[], None]


class TapeLauncher(ExecutorLauncher):
    """Its kernels go to the tape of a recorder that is recording."""

    tape: list[Launches] | None = None

    def counters(self, *arguments: Any) -> Tensor:
        with _disable_current_modes():  # what the executor itself looks at is no launch
            return super().counters(*arguments)

    def run(self, *arguments: Any, **options: Any) -> None:
        with _disable_current_modes():
            super().run(*arguments, **options)
        if self.tape is not None:
            self.tape.append(lambda: super(TapeLauncher, self).run(*arguments, **options))


class TapeRecorder:
    """A `kernels.graphs.Recorder`. `recorded` and `replayed` are counted, and `launches` those on the tapes.

    Raises RuntimeError where a capture would fail or hold what a later replay does not find: the host reads what the
    device computed, or memory is made.
    """

    def __init__(self, launcher: TapeLauncher) -> None:
        self._launcher = launcher
        self.recorded = self.replayed = 0
        self.tapes: list[list[Launches]] = []

    def record(self, launches: Launches) -> Launches:
        launches()
        tape = self._launcher.tape = []
        try:
            with _Recording(tape):
                launches()
        finally:
            self._launcher.tape = None
        self.recorded += 1
        self.tapes.append(tape)
        return lambda: self._play(tape)

    def _play(self, tape: list[Launches]) -> None:
        self.replayed += 1
        for launch in tape:
            launch()


class _Recording(TorchDispatchMode):
    def __init__(self, tape: list[Launches]) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket._qualified_op_name
        if name in ("aten::item", "aten::_local_scalar_dense"):
            raise RuntimeError("operation not permitted when stream is capturing: the host reads a number")
        result = function(*args, **kwargs)
        if function._schema.is_mutable:
            self._tape.append(lambda: function(*args, **kwargs))
        elif _storages(result) - _storages((args, kwargs)):
            raise RuntimeError(f"`{name}` makes memory while launches are recorded")
        return result


def _storages(values: Any) -> set[int]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return {value.untyped_storage().data_ptr() for value in leaves if isinstance(value, Tensor)}
