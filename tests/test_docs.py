"""The docs are held to the code: generated pages are fresh, the map is the tree, the README's commands run."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "reference" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["commands.md", "errors.md"])
def test_reference_is_fresh(name) -> None:
    generator = _generator()
    assert (ROOT / "docs" / "reference" / name).read_text() == generator.PAGES[name](), "run `make docs`"


def test_the_map_is_the_tree() -> None:
    """docs/contributing/architecture.md draws every Python file of the three packages, and no other."""
    drawing = re.search(r"```\n(.*?)```", (ROOT / "docs" / "contributing" / "architecture.md").read_text(), re.DOTALL)[1]
    drawn, folder = set(), ""
    for line in drawing.splitlines():
        name = line.split()[0] if line.split() else ""
        depth = (len(line) - len(line.lstrip())) // 2
        if name.endswith("/"):
            folder = name if depth == 0 else folder.split("/")[0] + "/" + name
        elif name.endswith(".py"):
            drawn.add((folder if depth == folder.count("/") else folder.split("/")[0] + "/") + name)
    tree = {
        str(path.relative_to(ROOT))
        for package in ("quantkit", "kernels", "calibration")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py" or path.parent == ROOT / "quantkit"
    }
    assert drawn == tree
