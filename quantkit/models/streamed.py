"""StreamedBlocks: the blocks of a model too large to be held, each read when it runs and forgotten afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch

from quantkit.models.architecture import Architecture
from quantkit.models.block import Block, load_block
from quantkit.models.config import ModelConfig
from quantkit.models.source import Device, Source


@dataclass(frozen=True)
class StreamedBlocks(Sequence[Block]):
    """Behaves as the tuple of blocks of a `Model`. Every access reads from the source again."""

    source: Source
    config: ModelConfig
    architecture: Architecture
    dtype: torch.dtype
    device: Device

    def __len__(self) -> int:
        return self.config.num_layers

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | Sequence[Block]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return load_block(self.source, self.config, self.architecture, index, self.dtype, self.device)
