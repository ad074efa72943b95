"""Imports point down. The picture this keeps true is in docs/contributing/architecture.md."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Lowest first. A module may import its own package and any package on a lower line.
LAYERS = [
    {"errors", "heap", "version", "progress", "settings"},
    {"kernels"},
    {"formats"},
    {"models"},
    {"checkpoint"},
    {"allocation", "measurement", "memory", "inventory"},
    {"job", "plan", "mix_plan", "consumers", "consumer_rules", "calibration", "solver", "runtime"},
    {"evaluators"},
    {"commands"},
    {"console"},
    {"cli"},
]
# The few sideways steps, each with its reason.
SIDEWAYS = {
    ("consumers", "consumer_rules"),  # who asks, and what may be asked
    ("mix_plan", "plan"),  # mixes become layouts
}
# Settings stop at the commands.
SETTINGS_READERS = {"commands", "cli"}
PACKAGE_FOLDERS = {"kernels": ROOT / "kernels", "calibration": ROOT / "calibration"}


def _level(package: str) -> int:
    for level, packages in enumerate(LAYERS):
        if package in packages:
            return level
    raise AssertionError(f"`{package}` has no layer: give it one in LAYERS")


def _modules() -> list[tuple[str, Path]]:
    files = [(".".join(path.relative_to(ROOT).with_suffix("").parts), path) for path in sorted((ROOT / "quantkit").rglob("*.py"))]
    for package, folder in PACKAGE_FOLDERS.items():
        files += [(f"quantkit.{package}.{path.stem}", path) for path in sorted(folder.glob("*.py"))]
    return files


def _package(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            found.add(node.module or "")
            if node.module == "quantkit":
                found |= {f"quantkit.{name.name}" for name in node.names}
    return {name for name in found if name.split(".")[0] == "quantkit" and _package(name)}


@pytest.mark.parametrize(("module", "path"), [pytest.param(*item, id=item[0]) for item in _modules()])
def test_imports_point_down(module: str, path: Path) -> None:
    own = _package(module)
    if own in {"", "__init__", "__main__"}:
        return
    for imported in _imports(path):
        other = _package(imported)
        if other == own or (own, other) in SIDEWAYS:
            continue
        assert _level(other) < _level(own), f"{module} imports {imported}, which is not below it"
        assert other != "settings" or own in SETTINGS_READERS, f"{module} reads settings: take the values instead"


def test_every_sideways_step_is_taken() -> None:
    taken = {(_package(module), _package(imported)) for module, path in _modules() for imported in _imports(path)}
    assert taken >= SIDEWAYS


def test_every_module_has_a_purpose() -> None:
    for module, path in _modules():
        if path.name in {"__main__.py", "version.py"}:
            continue
        assert ast.get_docstring(ast.parse(path.read_text())), f"{module} does not say what it is for"


def test_no_drawer_names() -> None:
    drawers = {"utils", "util", "misc", "common", "helpers", "helper", "manager"}
    assert not [module for module, path in _modules() if path.stem in drawers]


def test_only_the_console_prints() -> None:
    for module, path in _modules():
        if module == "quantkit.console":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            assert called != "print", f"{module}:{node.lineno} prints"
