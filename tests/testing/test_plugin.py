"""The fixtures that pytest has once the package is installed: in a project of their own, with
pytest-asyncio, with anyio's plugin, and without either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASYNC = """
async def test_a_task_comes_due(tickwheel):
    await tickwheel.client.enqueue("t", b"x", delay=60)
    assert tickwheel.due_next - tickwheel.now == timedelta(minutes=1)
    await tickwheel.advance("1m")
    (delivery,) = await tickwheel.client.pull("t", wait=0)
    assert delivery.body == b"x"
"""
PROJECTS = {
    "asyncio": "import pytest\npytestmark = pytest.mark.asyncio\n" + ASYNC,
    "anyio": (
        "import pytest\npytestmark = pytest.mark.anyio\n\n\n@pytest.fixture\n"
        "def anyio_backend():\n    return 'asyncio'\n" + ASYNC
    ),
    "sync": """
def test_a_task_comes_due(tickwheel_sync):
    tickwheel_sync.client.enqueue("t", b"x", delay=60)
    tickwheel_sync.advance(60)
    (delivery,) = tickwheel_sync.client.pull("t", wait=0)
    assert delivery.ack() == "acked"
""",
}
WITHOUT = {"asyncio": ["anyio"], "anyio": ["pytest_asyncio", "asyncio"], "sync": ["asyncio"]}


def run(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest over a project, with the package and all that is installed here."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            *options,
        ],
        cwd=project,
        env={**os.environ, "PYTHONPATH": f"{project}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("project", PROJECTS)
def test_the_fixtures_are_there(project: str, tmp_path: Path) -> None:
    text = "from datetime import timedelta\n\n" + PROJECTS[project]
    (tmp_path / "test_project.py").write_text(text)
    if project == "anyio":  # as if pytest-asyncio were not installed
        (tmp_path / "pytest_asyncio.py").write_text("raise ImportError('it is not installed')\n")
    without = [word for name in WITHOUT[project] for word in ("-p", f"no:{name}")]
    done = run(tmp_path, *without)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_a_project_with_the_client_alone_is_tested_as_before(tmp_path: Path) -> None:
    """pytest loads the plugin wherever the package is installed, also without the extra server."""
    (tmp_path / "test_project.py").write_text(
        "import sys\n\nimport tickwheel\n\n\ndef test_the_client():\n"
        "    assert tickwheel.Client and 'tickwheel.testing.plugin' in sys.modules\n"
    )
    for missing in ("pydantic", "pydantic_settings", "structlog", "uvloop"):
        (tmp_path / f"{missing}.py").write_text("raise ImportError('it is not installed')\n")
    done = run(tmp_path, "-p", "no:asyncio")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
