"""The quantization settings of a folder, wherever a quantizer put them."""

from pathlib import Path
from typing import Any

from quantkit.checkpoint.folder import QUANTIZATION_FILES, read_json
from quantkit.errors import CheckpointError

# Settings that change what a tensor means, each with the other name it may go by.
DECISIVE = {
    "quant_method": "method",
    "bits": "bits",
    "group_size": "group_size",
    "sym": "sym",
    "desc_act": "desc_act",
    "checkpoint_format": "format",
    "pack_dtype": "pack_dtype",
    "dynamic": "dynamic",
}


def read_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """`quantization_config` of config.json together with the quantizer's own file; None where there is neither.

    What one of them leaves out is taken from the other. Raises CheckpointError where they contradict each other in
    a setting that changes what the tensors mean.
    """
    places: dict[Path, dict[str, Any]] = {}
    if config.get("quantization_config") is not None:
        said = config["quantization_config"]
        if not isinstance(said, dict):
            raise CheckpointError(
                f"`quantization_config` in `{folder / 'config.json'}` is no object but `{said!r}`",
                hint="correct it, or fetch config.json again",
            )
        places[folder / "config.json"] = said
    for name in QUANTIZATION_FILES:
        if (folder / name).exists():
            places[folder / name] = read_json(folder / name)
    if not places:
        return None
    _check_agreement(places)
    merged: dict[str, Any] = {}
    for said in reversed(places.values()):
        merged.update({key: value for key, value in said.items() if value is not None})
    return merged


def _check_agreement(places: dict[Path, dict[str, Any]]) -> None:
    for key, alias in DECISIVE.items():
        found = {path: said.get(key, said.get(alias)) for path, said in places.items()}
        stated = {path: value for path, value in found.items() if value is not None}
        if any(value != next(iter(stated.values())) for value in stated.values()):
            words = ", ".join(f"{value!r} in `{path}`" for path, value in stated.items())
            raise CheckpointError(
                f"`{key}` of the quantization is {words}",
                hint="find out which of them wrote the weights, and remove or correct the other",
            )
