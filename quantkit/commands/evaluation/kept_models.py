"""KeptModels: the models of a command that compares several times, each read once."""

from pathlib import Path

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.transformer import Model
from quantkit.runtime.load import load_model


class KeptModels:
    """The reference stays; a candidate makes room for the next one."""

    def __init__(self, reference: Path) -> None:
        self._reference = reference
        self._kept: dict[Path, Model] = {}

    def load(self, checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> Model:
        """A `Loader`; always asked for the same device and dtype, those of the command."""
        if checkpoint.path not in self._kept:
            self._kept = {path: model for path, model in self._kept.items() if path == self._reference}
            self._kept[checkpoint.path] = load_model(checkpoint, device, dtype)
        return self._kept[checkpoint.path]
