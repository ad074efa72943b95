"""Blueprint: a model as its config.json describes it, whether or not there are weights beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from quantkit.checkpoint.folder import read_json, readable
from quantkit.checkpoint.links import require_inside
from quantkit.errors import CheckpointError
from quantkit.inventory import family_name
from quantkit.models import catalog
from quantkit.models.architecture import Architecture
from quantkit.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Blueprint:
    """`path` is the folder, or the config.json itself where that was given."""

    path: Path
    family: str
    raw: Mapping[str, Any]
    config: ModelConfig
    architecture: Architecture

    @property
    def parameters(self) -> int:
        """Weights, biases and norms; a tied head is not counted twice."""
        return sum(prod(shape) for shape in self.architecture.tensors(self.config).values())


def open_blueprint(path: Path) -> Blueprint:
    """Of a folder that has a config.json, or of that file.

    Raises CheckpointError where there is none, UnsupportedModel for a model that is not known here.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise CheckpointError(f"`{file}` does not exist", hint="give a folder with a config.json, or that file")
    if path.is_dir():
        require_inside(path, readable(path))
    raw = read_json(file)
    config, architecture = ModelConfig.read(raw, str(file)), catalog.find(raw, str(file))
    return Blueprint(path, family_name(architecture), raw, config, architecture)


def has_weights(path: Path) -> bool:
    """Whether a local folder has anything that may be weights; a config on its own is a blueprint."""
    if not path.is_dir():
        return path.suffix != ".json"
    return any(file.suffix in (".safetensors", ".bin", ".pt", ".gguf") for file in path.iterdir()) or any(
        path.glob("*.index.json")
    )
