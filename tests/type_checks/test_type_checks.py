"""Both type checkers accept the good programs, and reject every wrong line of the bad ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GOOD, BAD = (tuple(sorted((HERE / kind).glob("*.py"))) for kind in ("good", "bad"))
TIMEOUT_S = 300
Found = dict[Path, set[int]]
"""The numbers of the lines in which something is wrong."""


@cache
def mypy() -> Found:
    """Check each folder by itself, because their modules have the same names."""
    return _mypy(GOOD) | _mypy(BAD)


def _mypy(programs: Sequence[Path]) -> Found:
    """With the cache of `make check`, which has been there: without it this takes long."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    done = subprocess.run(
        [*command, *map(str, programs)], capture_output=True, text=True, check=False,
        cwd=ROOT, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    result: Found = defaultdict(set)
    for path, line in re.findall(r"^(\S+?):(\d+): error: ", done.stdout, re.MULTILINE):
        result[ROOT / path].add(int(line))
    assert bool(result) == bool(done.returncode), done.stdout
    return result


@cache
def pyright() -> Found:
    """Check all programs at once, because the start is most of the cost."""
    programs = GOOD + BAD
    wanted = {
        "include": [str(program) for program in programs],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "strict",
    }
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "pyrightconfig.json"
        settings.write_text(json.dumps(wanted))
        command = [
            Path(sys.executable).with_name("basedpyright"), "--outputjson",
            "--pythonpath", sys.executable, "--project", settings,
        ]  # fmt: skip
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    told = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] == len(programs), done.stdout + done.stderr
    result: Found = defaultdict(set)
    for diagnostic in told["generalDiagnostics"]:
        if diagnostic["severity"] == "error":
            result[Path(diagnostic["file"])].add(diagnostic["range"]["start"]["line"] + 1)
    return result


CHECKERS = {"mypy": mypy, "pyright": pyright}


@pytest.mark.parametrize("checker", CHECKERS)
def test_good_programs_pass(checker: str) -> None:
    assert len(GOOD) >= 2
    assert not CHECKERS[checker]().keys() & set(GOOD)


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("program", BAD, ids=lambda path: path.name)
def test_exactly_the_wrong_lines_are_found(program: Path, checker: str) -> None:
    lines = program.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
    assert len(wrong) > 20
    result = CHECKERS[checker]()
    assert result.keys() >= set(BAD)
    assert result[program] == wrong
