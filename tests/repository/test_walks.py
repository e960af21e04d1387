"""ARCHITECTURE.md and docs/walks.md name files and functions: all of them exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
STEPS_MAX = 12
CELL_MAX = 250
"""Characters of a cell of the map."""
WALKS = re.findall(
    r"^\*\*(An? [^*]+)\*\*\n\n((?:\d+\. .*\n)+)",
    TEXT + (ROOT / "docs/walks.md").read_text(),
    re.MULTILINE,
)


def _functions(path: Path) -> set[str]:
    """``function`` and ``Class.function`` of a module."""
    result = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            result |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            result.add(node.name)
    return result


def test_there_are_five_walks() -> None:
    assert len(WALKS) == 5


@pytest.mark.parametrize(("name", "steps"), WALKS)
def test_every_step_of_a_walk_exists(name: str, steps: str) -> None:
    lines = steps.splitlines()
    assert len(lines) <= STEPS_MAX
    for line in lines:
        places = re.findall(r"`(tickwheel/[\w/]+\.py):([\w.]+)`", line)
        assert places, line
        for path, function in places:
            assert function in _functions(ROOT / path), f"{path} has no {function}"


def test_every_path_on_the_map_exists() -> None:
    named = set(re.findall(r"`((?:tickwheel|tests|grafana|benchmarks)/[\w/.]*)`", TEXT))
    assert len(named) > 30
    assert not [path for path in named if not (ROOT / path).exists()]


def test_every_package_is_on_the_map() -> None:
    packages = {
        str(path.parent.relative_to(ROOT)) + "/"
        for path in (ROOT / "tickwheel").glob("*/**/__init__.py")
    }
    missing = {
        package for package in packages if f"`{package}`" not in TEXT and package not in TEXT
    }
    assert not missing


def test_the_cells_of_the_map_are_short() -> None:
    lines = [line for line in TEXT.splitlines() if line.startswith("| ")]
    cells = [cell for line in lines for cell in line.strip("| ").split(" | ")]
    assert len(cells) > 50
    assert [cell for cell in cells if len(cell) > CELL_MAX] == []
