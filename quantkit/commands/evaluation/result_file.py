"""A file that a command writes beside its report: it never takes the place of another."""

from pathlib import Path

from quantkit.errors import CheckpointError


def require_absent(path: Path | None, option: str) -> None:
    """Raises CheckpointError where something is there already, asked before any work; None is no file."""
    if path is not None and (path.exists() or path.is_symlink()):
        raise CheckpointError(
            f"`{path}` exists, and is not replaced", hint=f"choose another name with `{option}`, or remove it yourself"
        )
