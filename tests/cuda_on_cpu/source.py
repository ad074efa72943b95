"""From a `.cu` file to C++ that a host compiler takes: shared-memory declarations are rewritten, line numbers kept."""

import re
from collections.abc import Iterator
from pathlib import Path

_EXTERN = re.compile(r"\bextern\s+__shared__\s+((?:__align__\s*\([^)]*\)\s*)?[\w:<>\s]+?)\s*\b(\w+)\s*\[\s*\]\s*;")
_SHARED = re.compile(r"(?<!extern )\b__shared__\s+([^;{}=()]*(?:\([^;{}=()]*\)[^;{}=()]*)?)\s*;")
_DECLARATION = re.compile(r"^(.*?)\b(\w+)\s*((?:\[[^\]]*\]\s*)*)$", re.DOTALL)
_PARENTHESES = r"\((?:[^()]|\([^()]*\))*\)"
_HEAD = rf"__global__\s+(?:void\s+)?(?:__launch_bounds__\s*{_PARENTHESES}\s*)?(?:void\s+)?(\w+)\s*\("
_KERNEL = re.compile(_HEAD)
_TEMPLATE = re.compile(r"template\s*<[^{};]*>\s*(?:static\s+)?" + _HEAD)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'', re.DOTALL)


class KernelError(RuntimeError):
    """A kernel does not compile, or did something that a GPU would not survive or would get wrong."""


def read(path: Path) -> dict[str, str]:
    """The file, under its own name, and the local files it includes, under names that lie side by side; each rewritten."""
    names = {path.resolve(): path.name}
    found: dict[str, str] = {}
    for file, name in _growing(names):
        text = file.read_text()
        for included in dict.fromkeys(_INCLUDE.findall(text)):
            other = (file.parent / included).resolve()
            if other.exists():
                names.setdefault(other, f"{len(names)}-{other.name}")
                text = text.replace(f'"{included}"', f'"{names[other]}"')
        found[name] = f'#line 1 "{file.name}"\n{rewrite(text)}'
    return found


def _growing(names: dict[Path, str]) -> Iterator[tuple[Path, str]]:
    """All items, those that are added on the way too."""
    done = 0
    while done < len(names):
        yield list(names.items())[done]
        done += 1


def rewrite(text: str) -> str:
    """Shared-memory declarations become macros of executor.h; comments become blanks."""
    text = _COMMENT.sub(lambda m: m[0] if m[0][0] in "\"'" else re.sub(r"[^\n]", " ", m[0]), text)
    text = _EXTERN.sub(lambda m: _same_lines(f"COC_DYNAMIC({' '.join(m[1].split())}, {m[2]});", m[0]), text)
    return _SHARED.sub(_shared, text)


def kernels(text: str) -> list[str]:
    """Names of the kernels that can be called as they stand: templates need an instance."""
    templates = set(_TEMPLATE.findall(text))
    return [name for name in dict.fromkeys(_KERNEL.findall(text)) if name not in templates]


def _shared(match: re.Match[str]) -> str:
    parts = _DECLARATION.match(match[1].strip())
    if not parts or "," in re.sub(r"<[^<>]*>|\([^()]*\)", "", match[1]):
        raise KernelError(f"one variable per __shared__ declaration, please: {match[0]!r}")
    return _same_lines(f"COC_SHARED({' '.join(parts[1].split())}, {parts[2]}, {' '.join(parts[3].split())});", match[0])


def _same_lines(new: str, old: str) -> str:
    return new + "\n" * old.count("\n")
