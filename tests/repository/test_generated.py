"""What scripts/generate writes is checked in, and a line of it that is changed is noticed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, root / "scripts/generate", "--check"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_generated_files_are_current() -> None:
    done = check(ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the generator reads and writes, to be changed."""
    root = tmp_path_factory.mktemp("generated")
    for folder in ("tickwheel", "scripts", "docs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


CHANGED = {
    "tickwheel/client/keywords.py": "    priority: int\n",
    "tickwheel/client/generated.py": "        topic: str | None = None,\n",
    "tickwheel/client/task_options.py": "    def tag(self) -> str | None:\n",
    "tickwheel/server/generated.py": '        fields["tag"] = tag\n',
    "tickwheel/server/shard/verbs.py": "    cancel: Callable[[Call[Selection]], None]\n",
    "docs/protocol.md": "| 23 | PING | none | nil |\n",
}
"""A line of each file that is generated."""


def test_changed_lines_are_named(copy: Path) -> None:
    for name, line in CHANGED.items():
        before = (copy / name).read_text()
        assert line in before
        by_hand = line.replace("\n", "  # by hand\n")
        (copy / name).write_text(before.replace(line, by_hand, 1))
    done = check(copy)
    assert done.returncode == 1
    for name in CHANGED:
        assert f"generate: {name} differs" in done.stderr
