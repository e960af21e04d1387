"""Both type checkers accept the good programs, and reject every wrong line of the bad ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOOD, BAD = sorted((HERE / "good").glob("*.py")), sorted((HERE / "bad").glob("*.py"))
TIMEOUT_S = 300
Lines = dict[int, str]
"""Number of a line → what is wrong in it."""


def mypy(program: Path, folder: Path) -> Lines:
    """With the cache of `make check`, which has been there: without it this takes long."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    command += [str(program)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False,
        cwd=ROOT, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(\S+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    elsewhere = [one for one in found if Path(one[0]).name != program.name]
    assert elsewhere == [] and bool(found) == bool(done.returncode), done.stdout
    return {int(line): text for _, line, text in found}


def pyright(program: Path, folder: Path) -> Lines:
    settings = folder / "pyrightconfig.json"
    settings.write_text(
        json.dumps(
            {"include": [str(program)], "extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
        )
    )
    command = [
        Path(sys.executable).with_name("basedpyright"), "--outputjson",
        "--pythonpath", sys.executable, "--project", settings,
    ]  # fmt: skip
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    told = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] == 1, done.stdout + done.stderr
    return {
        one["range"]["start"]["line"] + 1: one["message"]
        for one in told["generalDiagnostics"]
        if one["severity"] == "error"
    }


CHECKERS = {"mypy": mypy, "pyright": pyright}


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("program", GOOD, ids=lambda path: path.name)
def test_a_good_program_passes(program: Path, checker: str, tmp_path: Path) -> None:
    assert CHECKERS[checker](program, tmp_path) == {}


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("program", BAD, ids=lambda path: path.name)
def test_every_wrong_line_of_a_bad_program_is_found_and_no_other(
    program: Path, checker: str, tmp_path: Path
) -> None:
    lines = program.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
    assert len(wrong) > 20
    assert CHECKERS[checker](program, tmp_path).keys() == wrong
