"""Links among the files of a model: followed within its folder and into the hub cache that it lies in, nowhere else.

A model is somebody else's work: a link that came with it could hand any file of this machine to the reader, or into
the result that is published next. So each file must end in the folder itself. The folders of the hub cache,
`models--ORG--NAME/snapshots/REVISION`, consist of links to `models--ORG--NAME/blobs`, which is as much theirs. The
path that a person gives is followed wherever it leads: a link to a whole folder is as good as the folder.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from quantkit.errors import CheckpointError, in_shell


def leading_out(folder: Path, files: Iterable[Path]) -> list[Path]:
    """Those of these files, named as in `folder`, that end outside it. What does not exist ends nowhere."""
    places = _places(Path(os.path.realpath(folder)))
    return [file for file in files if file.exists() and not _lies_in(Path(os.path.realpath(file)), places)]


def require_inside(folder: Path, files: Iterable[Path]) -> None:
    """Raises CheckpointError, naming each with its end, where any of these files ends outside the folder."""
    if out := leading_out(folder, files):
        raise outside(folder, out)


def outside(folder: Path, files: Sequence[Path]) -> CheckpointError:
    """The error for files of a folder that end elsewhere."""
    ends = ", ".join(f"`{file}` → `{os.path.realpath(file)}`" for file in files)
    kept = "or keep all files of a model in one folder, wherever that is, and give it or a link to it"
    if len(files) > 1:
        copy = f"cp -rL {in_shell(folder)} {in_shell(f'{folder}.copy')}"
        return CheckpointError(
            f"links that lead out of `{folder}`: {ends}",
            hint=f"if these files belong to the model, make copies of the links: `{copy}`; {kept}",
        )
    link, part = in_shell(files[0]), in_shell(f"{files[0]}.copy")
    return CheckpointError(
        f"a link that leads out of `{folder}`: {ends}",
        hint=f"if this file belongs to the model, copy it in: `cp -L {link} {part} && mv {part} {link}`; {kept}",
    )


def _places(folder: Path) -> list[Path]:
    """The folders that files of `folder`, a path without links, may lie in. `blobs` that is a link itself is none."""
    found = [folder]
    for place in (folder, *folder.parents):
        repository = place.parent.parent
        if place.parent.name == "snapshots" and repository.name.startswith("models--"):
            found.append(repository / "blobs")
    return found


def _lies_in(file: Path, places: Iterable[Path]) -> bool:
    return any(file.is_relative_to(place) for place in places)
