"""What the documents show is what happens: their examples are run as they stand."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    return [code for found, code in BLOCK.findall(text) if found == language]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `tickwheel` is this tree's, at an address of its own."""
    port = free_port()
    command = tmp_path / "bin" / "tickwheel"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tickwheel "$@"\n')
    command.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TICKWHEEL_LISTEN": f"tcp://127.0.0.1:{port}",
        "TICKWHEEL_URL": f"tcp://127.0.0.1:{port}",
    }


def test_the_tour_of_the_readme_works_as_it_stands(tmp_path: Path, shell: dict[str, str]) -> None:
    (program,) = blocks("README.md", "python")
    (tmp_path / "tour.py").write_text(program)
    script = "\n".join(
        [
            "set -e",
            "trap 'kill $(jobs -p) 2>/dev/null' EXIT",
            *blocks("README.md", "bash"),
            f"{sys.executable} tour.py",
        ]
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("order 42", "order 43", "closing order 44, attempt 1", "due now: b'46'"):
        assert word in done.stdout, (word, done.stdout, done.stderr)
    assert "due now: b'45'" not in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_links_inside_the_repository_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    targets = [t for t in re.findall(r"\]\(([^)#]+)", text) if "://" not in t]
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert targets
    assert missing == []


def test_make_targets_named_in_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\bmake ([a-z][a-z-]*)", (ROOT / document).read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (document, target)


def test_the_map_of_the_code_names_what_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) < 200
    paths = re.findall(r"`((?:tickwheel|tests|docs|benchmarks)/[\w/.]*)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
