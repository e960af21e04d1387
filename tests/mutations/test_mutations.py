"""Tests of the tests: a bug is seeded into a copy of the repository, and must be found there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mutations.bugs import BUGS, Bug
from mutations.changes import (
    Change,
    Modules,
    Unfit,
    changed,
    condition,
    dropped,
    instead,
    returning,
    without,
)

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900
"""Longer than a torture run that waits for producers and for the end, 300 s each."""
FAILED = 1
"""pytest's exit code when tests ran and failed; anything else is not a finding."""


def copy(folder: Path) -> Path:
    """What the tests need of the repository; compiled modules come along, being valid still."""
    for name in ("tickwheel", "tests"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def seeded(modules: Modules, bug: Bug) -> dict[Path, bytes]:
    """The modules with the bug in them."""
    edited: dict[Path, bytes] = {}
    for place, changes in bug.changes.items():
        try:
            path, name, source = modules.with_function(place)
            edited[path] = changed(edited.get(path, source), name, changes)
        except Unfit as error:
            raise AssertionError(f"{bug.name}: look again at {place}: {error}") from error
    return edited


def run(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """pytest in the copy: its package comes first there, for the daemons it starts too."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("COV", "PYTEST", "PYTHON"))}
    clean |= {"EXAMPLES": "any-example", "BUSY_S_MAX": "0"}  # what does not come is seldom late
    # Stopped at the first failure; its own temporary folder, for it runs beside others.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--basetemp", str(folder / "tmp"), *tests]
    return subprocess.run(
        command, cwd=folder, env=clean, capture_output=True, text=True, check=False,
        timeout=TIMEOUT_S,
    )  # fmt: skip


PLAIN = next(bug for bug in BUGS if bug.name == "dedupe-mark-survives-a-refusal")


def test_without_a_bug_the_tests_pass(tmp_path: Path) -> None:
    """Otherwise a failure with one would show nothing. Two tests, one within a process and one with
    a daemon, show that a copy works; without a bug, those of the others run beside this one."""
    done = run(copy(tmp_path), PLAIN.tests)
    assert done.returncode == 0, done.stdout[-4_000:]


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, id=bug.name, marks=() if bug.usual else pytest.mark.slow)
        for bug in sorted(BUGS, key=lambda bug: not bug.usual)
    ],
)
def test_a_seeded_bug_is_found(tmp_path: Path, bug: Bug) -> None:
    """By each of its tests: what one finds, another must not hide."""
    folder = copy(tmp_path)
    for path, source in seeded(Modules(folder), bug).items():
        path.write_bytes(source)
    for test in bug.tests:
        done = run(folder, [test])
        assert done.returncode == FAILED, f"{bug.why}: {test}\n{done.stdout[-4_000:]}"


def test_every_named_test_exists(collected: frozenset[str]) -> None:
    """A seeded bug whose test is gone is found by nothing."""
    known = collected | {test.partition("[")[0] for test in collected}
    tests = dict.fromkeys(test for bug in BUGS for test in bug.tests)
    others = [test for test in tests if test not in known]
    if others:  # a run of a part of the tests has not collected them
        done = run(ROOT, ["--collect-only", *others])
        assert done.returncode == 0, done.stdout[-4_000:]


@pytest.fixture(scope="module")
def modules() -> Modules:
    return Modules(ROOT)


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in BUGS])
def test_every_seeded_bug_fits(modules: Modules, bug: Bug) -> None:
    """Each of its changes finds one place, so that none can rot until all of them are run."""
    for path, source in seeded(modules, bug).items():
        assert source.count(b"\n") == path.read_bytes().count(b"\n"), "lines keep their numbers"


def test_names_are_unique() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)


SOURCE = b"""\
class Door:
    def open(self, key: int) -> bool:
        # \xc3\xa9
        if key and self.fits(
            key
        ):
            self.turn(key); self.turns += 1
            return self.pushed
        return False
"""


@pytest.mark.parametrize(
    ("change", "old", "new"),
    [
        (dropped("turn"), "self.turn(key);", "pass;"),
        (condition("fits", "True"), "if key and self.fits(\n            key\n        ):",
         "if True \\\n \\\n:"),
        (without("fits"), "self.fits(\n            key\n        )", "True \\\n \\\n"),
        (instead("self.pushed", "1"), "self.pushed", "1"),
    ],
)  # fmt: skip
def test_a_change_replaces_only_its_place(change: Change, old: str, new: str) -> None:
    expected = SOURCE.decode().replace(old, new)
    assert changed(SOURCE, "Door.open", (change,)).decode() == expected


@pytest.mark.parametrize(
    ("function", "change"),
    [
        ("Door.shut", returning("None")),
        ("Door.open", dropped("nothing")),
        ("Door.open", condition("turn", "False")),
        ("Door.open", instead("key", "0")),
    ],
)
def test_an_ambiguous_or_missing_place_is_refused(function: str, change: Change) -> None:
    with pytest.raises(Unfit, match="places"):
        changed(SOURCE, function, (change,))
