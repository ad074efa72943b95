"""SimulatedCard: a GPU that is not there. Values stay in main memory and are real, places are claimed and held to.

    card = SimulatedCard(limit_bytes=64 << 20)
    with card.inserted(monkeypatch):
        x = torch.ones(4, 4, device="cuda:0")
        x + torch.ones(4, 4)            # RuntimeError, as on a GPU
        x.numpy()                       # TypeError, as on a GPU
        card.live, card.peak            # bytes of what is on the card

What is on the card is known by its memory: an operation with a tensor on the card gives tensors on the card. Beyond
`limit_bytes` an allocation raises `torch.OutOfMemoryError`. Nothing here says how fast a GPU is, in which order it sums,
or whether torch has a kernel for an operation there.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit import kernels
from quantkit.kernels import probe
from quantkit.kernels.cuda import CudaBackend
from quantkit.kernels.reference import ReferenceBackend

DEVICE = torch.device("cuda", 0)
ROUNDED = 512
"""Bytes that torch's allocator rounds to."""
READ_BY_THE_HOST = {"numpy", "__array__"}
MOVING = {"aten::copy_", "aten::_to_copy", "aten::set_", "aten::_foreach_copy_"}
INDEXING = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index"}


class SimulatedCard:
    """One GPU of `limit_bytes`, compute capability `capability`.

    backend  what its quantized weights are multiplied with and solved by; plain torch without one
    """

    def __init__(
        self,
        limit_bytes: int = 1 << 40,
        capability: tuple[int, int] = (9, 0),
        backend: Callable[[str], ReferenceBackend] | None = None,
    ) -> None:
        self.limit_bytes, self.capability = limit_bytes, capability
        self.live = self.peak = self.refused = 0
        self.operations: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        self.backend = backend or _PlainTorch

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the card."""
        return tensor.untyped_storage()._cdata in self._sizes

    def put(self, tensor: Tensor) -> None:
        """Counts the memory of a tensor as the card's. Raises torch.OutOfMemoryError where there is too little."""
        storage = tensor.untyped_storage()
        size = -(-storage.nbytes() // ROUNDED) * ROUNDED
        if self.live + size > self.limit_bytes:
            self.refused += 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes. GPU 0 has a total capacity of {self.limit_bytes} "
                f"bytes of which {self.limit_bytes - self.live} are free."
            )
        key = storage._cdata
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._give_back, key)

    def _give_back(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    @contextmanager
    def inserted(self, monkeypatch: Any) -> Iterator["SimulatedCard"]:
        """The machine has this card, and no other, meanwhile."""
        with monkeypatch.context() as patch:
            for name, answer in self._answers().items():
                patch.setattr(torch.cuda, name, answer)
            patch.setattr(torch.version, "cuda", "13.0")
            patch.setattr(probe, "cuda_backend", self.backend)
            kernels._choose.cache_clear()
            places = _Places(self)
            try:
                with places, _Words(self, places):
                    yield self
            finally:
                kernels._choose.cache_clear()

    def _answers(self) -> dict[str, Any]:
        properties = SimpleNamespace(multi_processor_count=4, total_memory=self.limit_bytes, name="Simulated")
        return {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: "Simulated",
            "get_device_capability": lambda device=None: self.capability,
            "get_device_properties": lambda device=None: properties,
            "is_bf16_supported": lambda *_, **__: self.capability >= (8, 0),
            "mem_get_info": lambda device=None: (self.limit_bytes - self.live, self.limit_bytes),
            "memory_allocated": lambda device=None: self.live,
            "max_memory_allocated": lambda device=None: self.peak,
            "memory_reserved": lambda device=None: self.live,
            "reset_peak_memory_stats": self._reset_peak,
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),
        }

    def _reset_peak(self, device: Any = None) -> None:
        self.peak = self.live


class _PlainTorch(ReferenceBackend):
    """The reference, for a device that it does not know."""

    name = "cuda"


class CardLauncher:
    """The executor of `cuda_on_cpu` as the launcher of a card: its kernels reach what is on the card and nothing else."""

    def __init__(self, card: SimulatedCard, executor: Any) -> None:
        self._card, self._executor = card, executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def device(self) -> torch.device:
        return DEVICE

    def reaches(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def empty(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        found = self._executor.empty(shape, dtype, device)
        self._card.put(found)
        return found

    def counters(self, count: int, device: torch.device) -> Tensor:
        kept = self._executor.counters(count, device)
        if not self._card.holds(kept):
            self._card.put(kept)
        return kept

    def run(self, name: str, defines: Any, entry: str, grid: Any, threads: int, arguments: Any, **options: Any) -> None:
        for value in arguments:
            assert not isinstance(value, Tensor) or value.is_cuda, f"`{entry}` was given a tensor of the host"
        self._executor.run(name, defines, entry, grid, threads, arguments, **options)


def kernels_of(card: SimulatedCard, executor: Any) -> Callable[[str], CudaBackend]:
    """For `SimulatedCard.backend`: the CUDA sources themselves, run by the executor."""
    launcher = CardLauncher(card, executor)
    return lambda reason: CudaBackend(launcher, reason)


class _Places(TorchDispatchMode):
    """Sees every operation, those inside of others too: refuses a mix of places, and notes where results are."""

    def __init__(self, card: SimulatedCard) -> None:
        super().__init__()
        self._card = card
        self.on_card: bool | None = None
        """Where memory is taken that no tensor of an operation tells: None is the host. Set by `_Words`."""
        self.forced = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        given = list(_tensors((args, kwargs)))
        on_card = [tensor for tensor in given if self._card.holds(tensor)]
        if on_card and not self.forced:
            self._require_one_place(name, args, given)
        found = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        if self.forced:
            to_card = bool(self.on_card)
        elif name == "aten::copy_":
            to_card = False
        else:
            to_card = bool(on_card) or (not given and bool(self.on_card))
        if to_card:
            self._card.operations[name] = self._card.operations.get(name, 0) + 1
            for tensor in _tensors(found):
                if tensor.untyped_storage()._cdata not in known and not self._card.holds(tensor):
                    self._card.put(tensor)
        return found

    def _require_one_place(self, name: str, args: Any, given: list[Tensor]) -> None:
        if name in MOVING:
            return
        judged = given
        if name in INDEXING:
            if not self._card.holds(args[0]):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            judged = [args[0], *_tensors(args[2:])]  # a tensor on the card may be indexed by one of the host
        if any(not self._card.holds(tensor) and tensor.dim() for tensor in judged):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name})"
            )


class _Words(TorchFunctionMode):
    """Sees every call as it is written: devices by name, moves, and what a host may not read."""

    def __init__(self, card: SimulatedCard, places: _Places) -> None:
        super().__init__()
        self._card, self._places = card, places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args)
        given = list(_tensors((args, kwargs)))
        on_card = any(self._card.holds(tensor) for tensor in given)
        if name == "get_device" and given:
            return 0 if on_card else -1
        if name in READ_BY_THE_HOST and on_card:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
            )
        if name in ("to", "cuda", "cpu", "type_as") and given:
            target, args, kwargs = self._target(name, args, kwargs)
            if target is not None and target != self._card.holds(given[0]):
                return self._moved(given[0], target, func if name == "to" else None, args, kwargs)
            return self._run(func if name == "to" else _itself, args, kwargs, on_card)
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = torch.device("cpu") if torch.device(device).type == "cuda" else device
            return self._made(func, args, kwargs, torch.device(device).type == "cuda", on_card)
        return self._run(func, args, kwargs, on_card)

    def _attribute(self, func: Any, args: Any) -> Any:
        found = func(*args)
        if isinstance(args[0], Tensor) and self._card.holds(args[0]):
            what = getattr(func.__self__, "__name__", "")
            return {"device": DEVICE, "is_cuda": True, "is_cpu": False}.get(what, found)
        return found

    def _target(self, name: str, args: Any, kwargs: dict[str, Any]) -> tuple[bool | None, Any, dict[str, Any]]:
        """Where a tensor is to go, True for the card, None where nothing is said; and the call without it."""
        if name in ("cuda", "cpu"):
            return name == "cuda", args[:1], {}
        target = None
        rest = [args[0]]
        for value in args[1:]:
            if isinstance(value, Tensor):
                target = self._card.holds(value)
                rest.append(value.dtype)
            elif isinstance(value, (str, torch.device)):
                target = torch.device(value).type == "cuda"
            else:
                rest.append(value)
        if (device := kwargs.pop("device", None)) is not None:
            target = torch.device(device).type == "cuda"
        return target, tuple(rest), kwargs

    def _moved(self, tensor: Tensor, to_card: bool, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        with self._placed(to_card, forced=True):
            copied = tensor.clone()
            return func(copied, *args[1:], **kwargs) if func is not None and (args[1:] or kwargs) else copied

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any], to_card: bool, from_card: bool) -> Any:
        generator = kwargs.get("generator")
        if to_card and generator is not None and generator.device.type == "cpu":
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        with self._placed(to_card, forced=True):
            found = func(*args, **kwargs)
            for tensor in _tensors(found) if to_card else ():
                if not self._card.holds(tensor):  # `torch.tensor` takes its memory where no operation is seen
                    self._card.put(tensor)
            if from_card != to_card and any(found is tensor for tensor in _tensors((args, kwargs))):
                return found.clone()
            if to_card and not self._card.holds(found):  # of Python's numbers: torch makes them before it sees them
                self._card.put(found)
            return found

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], on_card: bool) -> Any:
        with self._placed(on_card, forced=False):
            return func(*args, **kwargs)

    @contextmanager
    def _placed(self, on_card: bool, *, forced: bool) -> Iterator[None]:
        before = self._places.on_card, self._places.forced
        self._places.on_card, self._places.forced = on_card, forced
        try:
            yield
        finally:
            self._places.on_card, self._places.forced = before


def _itself(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        if found.layout == torch.strided:
            yield found
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from _tensors(one)
    elif isinstance(found, dict):
        for one in found.values():
            yield from _tensors(one)
