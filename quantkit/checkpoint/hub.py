"""Models of the hub by id, `organisation/name`: which files are needed, and the folder they have on this machine.

The library `huggingface_hub` is imported here alone, and only when an id is asked for.
"""

import glob
import re
from pathlib import Path
from types import ModuleType

from quantkit.checkpoint.folder import (
    INDEX,
    PICKLE_HINT,
    PICKLE_REASON,
    QUANTIZATION_FILES,
    TEMPLATE_FOLDER,
    is_pickle,
    is_side_file,
)
from quantkit.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
DESCRIPTIONS = ("config.json", INDEX, *QUANTIZATION_FILES)


def fetch(hub_id: str, *, offline: bool = False) -> Path:
    """The folder of a model in the local cache. Downloads what it lacks, unless `offline` or HF_HUB_OFFLINE is set.

    Raises CheckpointError, with a hint, when this is no id, when the model is unknown, closed or without safetensors,
    and when the network, the disk or the library fails.
    """
    if not HUB_ID.fullmatch(hub_id):
        raise CheckpointError(f"`{hub_id}` does not exist", hint="give a model folder, or a hub id like `org/name`")
    library = _library(hub_id)
    # The library's errors have no common base but this, and other ones with each of its major versions.
    try:
        if offline or library.constants.HF_HUB_OFFLINE:
            return Path(library.snapshot_download(hub_id, local_files_only=True, allow_patterns=["config.json"]))
        listing = library.HfApi().model_info(hub_id)
        wanted = choose(hub_id, [file.rfilename for file in listing.siblings])
        patterns = [glob.escape(name) for name in wanted]
        return Path(library.snapshot_download(hub_id, allow_patterns=patterns))
    except CheckpointError:
        raise
    except Exception as error:
        raise _explained(hub_id, error, library) from error


def choose(hub_id: str, names: list[str]) -> list[str]:
    """Which files of a model are downloaded: weights by the rules of `folder`, and what goes along with them.

    Raises CheckpointError where the model has no safetensors, before anything is downloaded.
    """
    weights = [name for name in names if "/" not in name and name.endswith(".safetensors")]
    for stem in ("model", "output"):
        usual = [name for name in weights if name == f"{stem}.safetensors" or name.startswith(f"{stem}-")]
        if usual:
            weights = usual
            break
    if not weights:
        pickled = next((name for name in names if is_pickle(name)), None)
        if pickled is not None:
            message = f"`{hub_id}` has only pickled weights (`{pickled}`): {PICKLE_REASON}"
            raise CheckpointError(message, hint=PICKLE_HINT)
        raise CheckpointError(f"`{hub_id}` has no safetensors files", hint="choose a version of the model that has")
    beside = [
        name
        for name in names
        if name in DESCRIPTIONS or ("/" not in name and is_side_file(name)) or name.startswith(f"{TEMPLATE_FOLDER}/")
    ]
    return sorted(weights + beside)


def _library(hub_id: str) -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise CheckpointError(
            f"`{hub_id}` is no folder here, and hub ids need the `huggingface_hub` library, which is not installed",
            hint="pip install huggingface_hub",
        ) from error
    return huggingface_hub


def _explained(hub_id: str, error: Exception, library: ModuleType) -> CheckpointError:
    errors = library.errors
    if isinstance(error, errors.GatedRepoError):
        message = "is closed to you"
        hint = f"ask for access at {library.constants.ENDPOINT}/{hub_id}, then `hf auth login`"
    elif isinstance(error, errors.RepositoryNotFoundError):
        message = "is neither a folder here nor a model of the hub"
        hint = "check the name, or `hf auth login` if it is private"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        message = "is no folder here and not in the local cache"
        hint = f"`hf download {hub_id}` while online"
    else:
        message = f"is no folder here, and the hub failed: {next(iter(str(error).splitlines()), type(error).__name__)}"
        hint = "check the network; `HF_HUB_OFFLINE=1` uses what is in the local cache"
    return CheckpointError(f"`{hub_id}` {message}", hint=hint)
