"""RepackedTensor: a quantized weight whose codes are in memory once, as on disk or as the kernels read them."""

from abc import abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from quantkit import kernels
from quantkit.formats.codec import StoredTensor
from quantkit.kernels.protocol import Backend, Repacked

Weight = TypeVar("Weight")


class RepackedTensor(StoredTensor, Generic[Weight]):
    """Which backend serves it is decided by the device of its words, when it is first repacked."""

    def __init__(self, weight: Weight, device: torch.device) -> None:
        self._place = device
        self._device = device.type
        self._weight: Weight | None = weight
        self._reader: tuple[Backend, Repacked] | None = None

    @abstractmethod
    def _pack(self, backend: Backend, weight: Weight) -> Repacked:
        """The form that this backend multiplies with."""

    @abstractmethod
    def _restore(self, backend: Backend, repacked: Repacked) -> Weight:
        """The inverse of `_pack`."""

    @abstractmethod
    def _multiply(self, backend: Backend, repacked: Repacked, x: Tensor) -> Tensor:
        """`x · W`, without the bias."""

    def product(self, x: Tensor, backend: Backend | None = None) -> Tensor:
        """`x [m, in] · W [in, out] → [m, out]`, without the bias. `backend`: one that reads the same repacked form, in
        place of the weight's own."""
        own, repacked = self._repacked()
        return self._multiply(backend or own, repacked, x)

    @property
    def repacked(self) -> Repacked:
        """The form that the weight's own backend reads."""
        return self._repacked()[1]

    def matmul(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _is_on(self, device: str | torch.device) -> bool:
        return same_device(self._place, torch.device(device))

    def repack(self) -> None:
        self._repacked()

    def _repacked(self) -> tuple[Backend, Repacked]:
        if self._reader is None:
            backend = kernels.backend(self._device)
            self._reader = backend, self._pack(backend, self._stored())
            self._weight = None
        return self._reader

    def _stored(self) -> Weight:
        """As on disk; made again where it was repacked."""
        if self._weight is not None:
            return self._weight
        assert self._reader is not None
        return self._restore(*self._reader)


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether they may be one: of one type, and of one index where both have one."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))
